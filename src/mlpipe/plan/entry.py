"""A user's own function, as a plan names it."""

import os
from collections.abc import Mapping
from typing import Any, NamedTuple


class Entry(NamedTuple):
    """A user's function by import path. `entry` is `package.module:function`, called with `args`."""

    entry: str
    args: dict[str, Any]


def package_of(entry: str) -> str:
    """The topmost one of the function's module."""
    return entry.partition(":")[0].partition(".")[0]


def search_path(env: Mapping[str, str], folder: str) -> list[str]:
    """Where modules of a user are looked for before what is installed, in `env` of a stage that works in
    `folder`: Python's own stand between the two."""
    return [*filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), folder]
