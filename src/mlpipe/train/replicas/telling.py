"""What an elastic training leaves in its store of how it went: a line for each quorum, and the end."""

from __future__ import annotations

from collections.abc import Iterable

from mlpipe._core.records import Membership as MembershipRecord
from mlpipe.store.base import Store
from mlpipe.store.outcome import AttemptOutcome
from mlpipe.store.runs import append_event
from mlpipe.train.replicas.membership import Membership


def tell_quorums(membership: Membership, num_told: int, store: Store, attempt_key: str) -> int:
    """Those from `num_told` on, into events.jsonl and the log of this process. Returns how many are told."""
    new = membership.quorums[num_told:]
    for quorum in new:
        if quorum.step < 0:  # of replicas that now look for a checkpoint
            continue
        names = ", ".join(map(str, quorum.members))
        print(f"replicas {names} take part: {quorum.why}", flush=True)  # noqa: T201
        event = MembershipRecord(members=list(quorum.members), step=int(max(0, quorum.step)), why=quorum.why)
        append_event(store, attempt_key, event)
    return num_told + len(new)


def best(ended: Iterable[AttemptOutcome]) -> AttemptOutcome:
    """Of the replicas: what the training has come to."""
    return max(
        ended,
        key=lambda one: (one.outcome == "done", one.outcome == "saved", one.step or 0, one.checkpoint or ""),
    )
