"""Patterns of names of parameters, as `train.freeze` has them: those of a shell (`*`, `?`, `[ab]`) over the
names that `named_parameters()` of the user's own module gives, a dot being a character like any other."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

from mlpipe._core.errors import MlpipeError


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """Those of `names` that fit, in their order."""
    return [name for name in names if fnmatchcase(name, pattern)]


def frozen(patterns: Iterable[str], names: Collection[str], error: type[MlpipeError]) -> list[str]:
    """Those of a model's parameters that `train.freeze` fits. Raises `error` (input) for a pattern that fits
    none."""
    fitting: list[str] = []
    for pattern in patterns:
        some = matching(pattern, names)
        if not some:
            raise error(
                f"{pattern!r} fits no parameter of the model",
                where="train.freeze",
                hint=nearest(pattern, names),
                kind="input",
            )
        fitting += some
    return fitting


def nearest(pattern: str, names: Iterable[str]) -> str:
    """A hint for a pattern that fits no name: those that are nearest to it, else the first ones."""
    known = list(dict.fromkeys(names))
    near = difflib.get_close_matches(pattern.replace("*", ""), known, n=3, cutoff=0.4) or known[:3]
    more = len(known) - len(near)
    return f"its names are like {', '.join(near)}" + (f" ({more} more)" if more else "")
