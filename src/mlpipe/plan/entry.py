"""A user's own function, as a plan names it."""

from typing import Any, NamedTuple


class Entry(NamedTuple):
    """A user's function by import path. `entry` is `package.module:function`, called with `args`."""

    entry: str
    args: dict[str, Any]
