"""Who takes part in an elastic training, out of its events, and what each change cost, out of its steps."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from mlpipe._core.records import Membership, Step
from mlpipe.observe.records import decode_lines
from mlpipe.store.base import Store


def members(store: Store, attempt_key: str) -> Membership | None:
    """The last change; None of a training that is not elastic, or has not begun."""
    data, _ = store.read_log(f"{attempt_key}/events.jsonl")
    changes = [event for event in decode_lines(data.split(b"\n")) if isinstance(event, Membership)]
    return changes[-1] if changes else None


def costs(changes: Sequence[Membership], steps: Iterable[Step]) -> list[float | None]:
    """Of each change the seconds of the steps up to the next one: a replica's own, that was there; None where
    no step tells."""
    began = [change.step or 0 for change in changes]
    seconds: list[float | None] = [None] * len(changes)
    for step in steps:
        # several changes may come before the same step: the last one has it
        place = bisect_left(began, step.step) - 1
        if place >= 0 and step.membership_seconds is not None:
            seconds[place] = (seconds[place] or 0.0) + step.membership_seconds
    return seconds


def in_words(change: Membership) -> str:
    """For `mlpipe status`."""
    numbers = sorted(change.members or [])
    named = ", ".join(map(str, numbers))
    take = "node takes" if len(numbers) == 1 else "nodes take"
    return f"{len(numbers)} {take} part ({named}) since step {change.step}: {change.why}"
