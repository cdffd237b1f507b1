"""Sizes, durations and cadences with units, as users write them and as we print them."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

_BYTES = {
    "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
_SECONDS = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)\s*")


def parse_bytes(text: str) -> int:
    """`"30 GiB"` -> bytes. Raises ValueError that says what to write instead."""
    return int(_parse(text, _BYTES, "a size", "30 GiB"))


def parse_seconds(text: str) -> float:
    """`"15 min"` -> seconds. Raises ValueError that says what to write instead."""
    return _parse(text, _SECONDS, "a duration", "15 min")


def _parse(text: str, units: dict[str, float] | dict[str, int], what: str, example: str) -> float:
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not {what}; write a number and a unit, like {example!r}")
    number, unit = match.groups()
    if unit not in units:
        raise ValueError(f"unknown unit {unit!r} in {text!r}; use one of {', '.join(units)}")
    return float(number) * units[unit]


class Cadence(NamedTuple):
    """How often something happens: every so many steps, or every so many seconds. Exactly one is set."""

    steps: int | None = None
    seconds: float | None = None


def parse_cadence(text: str) -> Cadence:
    """`"100 steps"` or `"15 min"`. Raises ValueError that says what to write instead."""
    match = re.fullmatch(r"\s*([0-9]+)\s*steps?\s*", text)
    if match:
        if int(match.group(1)) == 0:
            raise ValueError("0 steps is not a cadence; write at least '1 step'")
        return Cadence(steps=int(match.group(1)))
    try:
        seconds = parse_seconds(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a cadence; write like '100 steps' or '15 min'") from None
    if seconds <= 0:
        raise ValueError(f"{text!r} is not a cadence; a duration must be above 0")
    return Cadence(seconds=seconds)


def format_bytes(num_bytes: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def format_step_seconds(seconds: float) -> str:
    """0.25 -> '250 ms'; from a second on as `format_seconds`."""
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else format_seconds(seconds)


def format_seconds(seconds: float) -> str:
    """75 -> '1m15s'; 0.25 -> '0.2s'; '?' for what is no number."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 60:
        return f"{seconds:.1f}s" if seconds < 10 else f"{seconds:.0f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"
