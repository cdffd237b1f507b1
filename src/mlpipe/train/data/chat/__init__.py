"""Conversations, prompts with completions and plain text, out of JSON lines: tokens, and which are learnt."""
