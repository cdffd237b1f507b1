"""A user's own function, as a plan names it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Entry:
    """A user's function by import path. `entry` is `package.module:function`, called with `args`."""

    entry: str
    args: dict[str, Any]
