"""`{{...}}` in a pipeline: plain substitution, no code.

Known names: `store`, `run.id`, `output` (a command stage's own output folder) and `stages.NAME.output`.
`{{{{` stands for two literal braces; `}}` outside a placeholder is literal anyway.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mlpipe._core.errors import SpecError

_TOKEN = re.compile(r"\{\{\{\{|\{\{(.*?)\}\}|\{\{", re.DOTALL)
_STAGE = re.compile(r"stages\.(.+)\.output")
FIXED = ("store", "run.id", "output")


def names(text: str) -> list[str]:
    """Names in order of appearance; an unclosed `{{` gives "" ."""
    return [(m.group(1) or "").strip() for m in _TOKEN.finditer(text) if m.group() != "{{{{"]


def stage_of(name: str) -> str | None:
    """`stages.corpus.output` -> `corpus`; None for every other name."""
    match = _STAGE.fullmatch(name)
    return match.group(1) if match else None


def resolve(text: str, mapping: Mapping[str, str], *, partial: bool = False) -> str:
    """Replace placeholders by `mapping`. Unknown ones raise SpecError; with `partial` they stay, as do
    literal `{{{{`, so that a later `resolve` can finish the work."""

    def replace(match: re.Match[str]) -> str:
        if match.group() == "{{{{":
            return match.group() if partial else "{{"
        name = (match.group(1) or "").strip()
        if name in mapping:
            value = mapping[name]
            return value.replace("{{", "{{{{") if partial else value
        if partial:
            return match.group()
        known = ", ".join(f"{{{{{key}}}}}" for key in mapping) or "none"
        raise SpecError(
            f"unknown placeholder {match.group()!r}", hint=f"known here: {known}; literal braces are {{{{{{{{"
        )

    return _TOKEN.sub(replace, text)


def fill(value: Any, known: Mapping[str, str]) -> Any:
    """`value` with its placeholders resolved, also inside lists and mappings; text with one that is not among
    `known` yet stays as it is."""
    if isinstance(value, dict):
        return {key: fill(item, known) for key, item in value.items()}
    if isinstance(value, list):
        return [fill(item, known) for item in value]
    if isinstance(value, str):
        return resolve(value, known, partial=not set(names(value)) <= known.keys())
    return value
