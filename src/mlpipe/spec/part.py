"""What a kind of stages says in the layer `spec`: `PART` in `kinds/<kind>/spec.py`."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from mlpipe.kinds import KINDS, Kind
from mlpipe.spec.base import SpecModel
from mlpipe.spec.problems import Problem
from mlpipe.spec.tree import Node


class Reference(NamedTuple):
    """A key that names one stage of the kind of the same name, among all that the stage needs; left out, it
    is the only one. `lends`: where the stage says nothing of resources, that one's are meant, and it reads
    what that one reads."""

    kind: str
    required: bool = True
    lends: bool = False


def _none(*_: Any) -> Iterator[Any]:
    return iter(())


def _as_it_is(work: Any, smoke: Any, num_workers: int) -> dict[str, Any]:
    return {}


def _says_nothing(part: Node, key: Sequence[str], value: Any) -> str | None:
    return None


class SpecPart(NamedTuple):
    """`model`: type of the value under the kind's key, `description`: its reference. `problems(stage)`: what
    is wrong between several values. `texts(part)`: the leaves in which placeholders may stand.
    `overridden(part, key, value)`: called before `--set` puts `value` there; may change what fits it no more,
    and says so. `smoke(work, smoke, num_workers)`: what a smoke test changes of it (`spec/smoke.py`), by keys
    below the kind's ("": all of it); None removes one."""

    model: Any
    description: str
    references: tuple[Reference, ...] = ()
    problems: Callable[[Node], Iterator[Problem]] = _none
    texts: Callable[[Node], Iterator[Node]] = _none
    overridden: Callable[[Node, Sequence[str], Any], str | None] = _says_nothing
    smoke: Callable[[Any, Any, int], dict[str, Any]] = _as_it_is

    @property
    def keys(self) -> tuple[str, ...]:
        """Of the mapping under the kind's key, as in a file; none where it is no mapping."""
        if not (isinstance(self.model, type) and issubclass(self.model, SpecModel)):
            return ()
        return tuple(field.alias or name for name, field in self.model.model_fields.items())


def spec_part(kind: Kind) -> SpecPart:
    """Imports what it says first."""
    part: SpecPart = kind.part("spec").PART
    return part


def kind_of(stage: Node) -> Kind | None:
    """By the first key of a kind; None: the stage does nothing."""
    return next((kind for name, kind in KINDS.items() if name in stage.value), None)
