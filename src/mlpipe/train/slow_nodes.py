"""Which nodes are slow while they train, said to the launcher, which tells who may take others instead. One
small file of the scratch folder; standard library only: the launcher reads it without torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

SLOW_FILE = "slow-nodes.json"


class SlowNodes:
    """What one rank says of them, in a file of `scratch`."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._told: dict[str, float] | None = None  # None: nobody knows yet

    def tell(self, slow: Iterable[tuple[str, float]]) -> None:
        """By node, of each slow rank its time for the same work over that of the others; a node is as slow as
        its slowest rank. Nothing is written where nothing changed, and a full disk takes nothing: no reason
        to end a training."""
        told: dict[str, float] = {}
        for node, ratio in slow:
            told[node] = max(round(ratio, 1), told.get(node, 0.0))
        if told == self._told:
            return
        temporary = self._scratch / f".{SLOW_FILE}.{os.getpid()}"
        with suppress(OSError):
            temporary.write_text(json.dumps(told))
            temporary.rename(self._scratch / SLOW_FILE)
        self._told = told
