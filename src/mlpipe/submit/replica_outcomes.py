"""The replicas of an elastic training: how many there should be, and how it has ended, by the outcomes that
their launchers left."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from mlpipe._core.errors import FATAL_KINDS
from mlpipe.plan.plan import Replicas
from mlpipe.store import replicas
from mlpipe.store.base import Store
from mlpipe.store.outcome import AttemptOutcome
from mlpipe.store.preflight import slow_replicas
from mlpipe.submit.executor import Ended
from mlpipe.submit.handle import MOST_AVOIDED, blamed, ended_by


def num_wanted(limits: Replicas, told: int | None, num_failed: int) -> int:
    """How many should be alive. `told`: by `mlpipe scale`. Of the most that there may be those that failed
    for good are not replaced: the next one would, too."""
    return max(0, min(max(limits.fewest, told or limits.most), limits.most - num_failed))


def hinders(
    slow: Mapping[int, tuple[str, float] | None],
    nodes: Mapping[int, str],
    limits: Replicas,
    num_left_out: int,
) -> int | None:
    """The replica without which the others are faster, though each of them then computes more of a batch:
    n - 1 that are as fast as usual need n / (n - 1) of the time that n need. None: no such. `slow`: by
    number of those that were measured, the node that a replica was slow on, and how slow; `nodes`: of those
    that run, where each is. Who runs and was not measured may still be on its way."""
    ratios, num = dict[int, float](), 0
    for number in nodes.keys() & slow.keys():
        node, ratio = slow[number] or (nodes[number], 0.0)
        if node == nodes[number]:  # else it is another's word, who had this number
            num, ratios[number] = num + 1, ratio
    if num - 1 < limits.fewest or num_left_out >= MOST_AVOIDED:
        return None
    slowest = max(ratios, key=lambda number: ratios[number], default=None)
    return slowest if slowest is not None and ratios[slowest] * (num - 1) > num else None


class LeftOut:
    """Nodes that were too slow for the replicas of an attempt, as its store has them: another driver goes on
    with these. `nodes`: none until the first look."""

    def __init__(self, store: Store, attempt_key: str, limits: Replicas) -> None:
        self.nodes: list[str] = []
        self._store, self._key, self._limits = store, attempt_key, limits
        self._is_read = False

    def look(self, nodes: Mapping[int, str]) -> int | None:
        """The replica that is to leave, whose node is left out from now on; None: none is. `nodes`: of those
        that run, where each is. Raises StoreError."""
        if not self._is_read:
            self.nodes, self._is_read = replicas.left_out(self._store, self._key), True
        if len(nodes) - 1 < self._limits.fewest:
            return None
        slow = slow_replicas(self._store, self._key)
        number = hinders(slow, nodes, self._limits, len(self.nodes))
        if number is not None:
            replicas.leave_out(self._store, self._key, nodes[number])
            self.nodes.append(nodes[number])
        return number

    def note(self) -> str:
        nodes = ", ".join(self.nodes)
        return f"no replica shall run on {nodes}: the others were faster without" if nodes else ""


def fatal(outcomes: Iterable[AttemptOutcome]) -> list[AttemptOutcome]:
    """What the other replicas would come to as well."""
    return [one for one in outcomes if one.kind in FATAL_KINDS or one.cause == "not_finite"]


def blame(outcomes: Collection[AttemptOutcome]) -> Ended | None:
    """Of replicas that failed, the word of the one to blame; None: none is to."""
    culprit = blamed(fatal(outcomes) or list(outcomes))
    return None if culprit is None else ended_by(culprit)


def done(outcomes: Iterable[AttemptOutcome]) -> Ended:
    """Of replicas one of which has done the training."""
    first = next((one for one in outcomes if one.outcome == "done"), None)
    if first is not None:
        return ended_by(first)
    return Ended("failed", "a replica's job is complete, but left no outcome", kind="bug")


def saved(outcomes: Iterable[AttemptOutcome]) -> Ended:
    """Of replicas that were told to stop."""
    for one in sorted(outcomes, key=lambda one: (one.outcome == "done", one.step or 0), reverse=True):
        if one.outcome in ("done", "saved"):
            return ended_by(one)
    return Ended("cancelled", "stopped before a checkpoint could be saved")
