"""Who takes part in an elastic training, out of its events."""

from __future__ import annotations

from mlpipe._core.records import Membership
from mlpipe.observe.records import decode_lines
from mlpipe.store.base import Store


def members(store: Store, attempt_key: str) -> Membership | None:
    """The last change; None of a training that is not elastic, or has not begun."""
    data, _ = store.read_log(f"{attempt_key}/events.jsonl")
    changes = [event for event in decode_lines(data.split(b"\n")) if isinstance(event, Membership)]
    return changes[-1] if changes else None


def in_words(change: Membership) -> str:
    """For `mlpipe status`."""
    numbers = change.members or []
    named = ", ".join(map(str, numbers))
    return f"{len(numbers)} nodes take part ({named}) since step {change.step}: {change.why}"
