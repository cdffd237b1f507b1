"""Which tensor of some weights goes to which of a model, by names and shapes alone; without torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mlpipe._core.errors import TrainError
from mlpipe.store.manifest import Tensor

_FLOATS = {"float64", "float32", "float16", "bfloat16"}
_SHOWN = 6


@dataclass(frozen=True)
class Here:
    """A tensor of the model. `others`: further names of a tied parameter."""

    dtype: str
    shape: tuple[int, ...]
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class Match:
    """`pairs`: name here, name there. `doubles`: the same of further tensors there for the same one here.
    `missing`: names here; `left_over`: names there; `unlike`: in words."""

    pairs: list[tuple[str, str]]
    doubles: list[tuple[str, str]]
    missing: list[str]
    left_over: list[str]
    unlike: list[str]

    def words(self) -> list[str]:
        """What does not fit."""
        return [
            *([f"missing there: {_some(self.missing)}"] if self.missing else []),
            *([f"not in the model: {_some(self.left_over)}"] if self.left_over else []),
            *([f"unlike: {_some(self.unlike)}"] if self.unlike else []),
        ]


def match(here: Mapping[str, Here], there: Mapping[str, Tensor], names: Mapping[str, str]) -> Match:
    """`names`: patterns of names there, and what they are here. Floats are converted to one another; all else
    has to be alike. Raises TrainError (input) where two tensors get one name."""
    renamed = rename(there, names)
    result = Match([], [], [], [], [])
    used: set[str] = set()
    for name, tensor in here.items():
        matches = [other for other in (name, *tensor.others) if other in renamed]
        used.update(matches)
        if not matches:
            result.missing.append(name)
        elif why := _unlike(tensor, there[renamed[matches[0]]]):
            result.unlike.append(f"{name} ({why})")
        else:
            first = renamed[matches[0]]
            result.pairs.append((name, first))
            result.doubles.extend(
                (name, renamed[other]) for other in matches[1:] if there[renamed[other]] is not there[first]
            )
    result.left_over.extend(old for new, old in renamed.items() if new not in used)
    return result


def rename(there: Iterable[str], names: Mapping[str, str]) -> dict[str, str]:
    """The name there of each name that they have here. Of several patterns that fit the one with most
    characters besides `*` counts."""
    rules = sorted(names.items(), key=lambda rule: (-len(rule[0].replace("*", "")), rule[0]))
    compiled = [
        (re.compile("(.*?)".join(re.escape(part) for part in old.split("*")), re.DOTALL), new)
        for old, new in rules
    ]
    renamed: dict[str, str] = {}
    for name in there:
        new = next(
            (_put(pattern, target, name) for pattern, target in compiled if pattern.fullmatch(name)), name
        )
        if new in renamed:
            raise TrainError(
                f"{renamed[new]} and {name} there would both be {new}",
                where="train.init_from.map",
                hint="write patterns that fit one of them only",
                kind="input",
            )
        renamed[new] = name
    return renamed


def _put(pattern: re.Pattern[str], target: str, name: str) -> str:
    matched = pattern.fullmatch(name)
    groups = iter(matched.groups() if matched else ())
    return re.sub(r"\*", lambda star: next(groups), target)


def _unlike(here: Here, there: Tensor) -> str | None:
    floats = here.dtype in _FLOATS and there["dtype"] in _FLOATS
    if tuple(there["shape"]) == here.shape and (floats or here.dtype == there["dtype"]):
        return None
    return f"{here.dtype}{list(here.shape)} here, {there['dtype']}{there['shape']} there"


def hint(result: Match) -> str:
    """What to write instead."""
    for short, long, written in (
        (result.missing, result.left_over, '{{"{0}*": "*"}}'),
        (result.left_over, result.missing, '{{"*": "{0}*"}}'),
    ):
        prefix = _prefix(short, long)
        if prefix:
            return f"the names differ by what they begin with: map: {written.format(prefix)}"
    if result.missing and result.left_over:
        return 'map: {"there.*": "here.*"} renames; strict: false loads what fits and lists the rest'
    return "strict: false loads what fits and lists the rest"


def _prefix(short: Sequence[str], long: Sequence[str]) -> str | None:
    """What stands before every name of `short` in `long`."""
    ends = {name[: -len(short[0])] for name in long if name.endswith(short[0])} if short else set()
    return next(
        (start for start in sorted(ends) if start and {start + name for name in short} <= set(long)), None
    )


def _some(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
