"""What mlpipe may cost, in counts that do not depend on the machine: `tests/budgets.json`, one line a figure.

A budget is an upper bound near to what was counted when it was written: raise it knowingly, lower it when a
change made something cheaper.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_FILE = Path(__file__).parents[1] / "budgets.json"


def within(work: str, found: Mapping[str, float]) -> None:
    """Asserts that every figure of `work` has a budget and keeps it."""
    budgets: dict[str, Any] = json.loads(_FILE.read_text())[work]
    over = [
        f"{work}: {figure}: {count:g}, budget {budgets.get(figure, 'none')}"
        for figure, count in found.items()
        if count > budgets.get(figure, -1)
    ]
    assert not over, "\n".join([*over, f"see {_FILE.name}"])
