"""Counts the words of a file that an earlier stage made."""
