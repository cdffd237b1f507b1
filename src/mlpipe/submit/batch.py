"""Trials that a place starts by itself, a few at a time, once it was told of all of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

METHODS = ("grid", "random")  # whose trials are known before the first one, and end by themselves


class Batch(Protocol):
    """None of these waits long, or raises where the place is away for a while."""

    def meta(self) -> Mapping[str, Any]:
        """What the sweep keeps of it, in JSON's types, written before any of it is sent and when it changes:
        the next controller finds it by that."""

    def waiting(self) -> Mapping[str, str]:
        """Trials that have not begun, and why not. A trial gets its driver once it is none of them."""

    def gone(self) -> Mapping[str, str]:
        """Trials that will not begin, and why not, unless they did while nobody looked."""

    def trial(self, name: str) -> Mapping[str, str] | None:
        """What the trial's run keeps of it; None: the trial is not in it."""

    def take_back(self, name: str) -> None:
        """Ends a trial that has not begun; it is `gone` then. One that begins meanwhile goes on."""

    def cancel(self, but: Collection[str]) -> bool:
        """Ends all trials `but` those that have drivers. Whether they have ended."""
