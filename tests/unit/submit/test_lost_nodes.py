"""A gang whose node is lost for good is told from one that a person's taint makes save."""

from __future__ import annotations

import pytest

from mlpipe.submit.kubernetes.gang import lost_for_good

pytestmark = pytest.mark.unit

NOW = 1_800_000_000.0


def at(seconds_ago: float) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(NOW - seconds_ago, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def pod(*, ready: tuple[str, float], disrupted: tuple[str, float] | None, deleted: bool = True):
    conditions = [{"type": "Ready", "status": ready[0], "lastTransitionTime": at(ready[1])}]
    if disrupted is not None:
        reason, ago = disrupted
        conditions.append(
            {"type": "DisruptionTarget", "status": "True", "reason": reason, "lastTransitionTime": at(ago)}
        )
    metadata = {"name": "p"} | ({"deletionTimestamp": at(0)} if deleted else {})
    return {"metadata": metadata, "spec": {"nodeName": "node-1"}, "status": {"conditions": conditions}}


TAINT = "DeletionByTaintManager"
CASES = {
    "lost": (pod(ready=("False", 400), disrupted=(TAINT, 100)), "node-1 was lost with pod p"),
    "lost a moment ago": (pod(ready=("False", 400), disrupted=(TAINT, 10)), None),
    "evicted by a taint, saving": (pod(ready=("True", 900), disrupted=(TAINT, 100)), None),
    "evicted by a taint, has saved": (pod(ready=("False", 5), disrupted=(TAINT, 100)), None),
    "drained": (pod(ready=("False", 400), disrupted=("EvictionByEvictionAPI", 100)), None),
    "cut off, not given up by the cluster": (pod(ready=("False", 400), disrupted=None, deleted=False), None),
    "runs": (pod(ready=("True", 900), disrupted=None, deleted=False), None),
}


@pytest.mark.parametrize("case", CASES)
def test_lost_for_good(case):
    found, expected = CASES[case]
    assert lost_for_good([pod(ready=("True", 9), disrupted=None, deleted=False), found], NOW) == expected
