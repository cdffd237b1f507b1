"""A gang whose node is lost for good is told from one that a person's taint makes save."""

from __future__ import annotations

import pytest
from kit.command_runs import until
from kit.rendered import QUICKSTART, pipeline_of, plan_of

from mlpipe.store.folder import FolderStore
from mlpipe.submit.kubernetes.gang import Gang, lost_for_good

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


@pytest.mark.parametrize("stage", ["train", "corpus"])
def test_what_is_given_up_does_not_wait_for_the_lost_pod(stage, server, api, tmp_path):
    """Else the JobSet, or Job, would stay, and hold its part of a queue's quota."""
    gang = Gang(FolderStore(tmp_path), api, plan_of(pipeline_of("quickstart", *QUICKSTART), stage))
    key = until(lambda: next((key for key in server.objects if key[0] in ("jobsets", "jobs")), None), "it")
    server.held.add(key[1])
    lost = pod(ready=("False", NOW), disrupted=(TAINT, NOW))  # in 1970
    lost["metadata"]["labels"] = server.objects[key]["metadata"]["labels"]
    server.put("pods", lost)
    ended = until(gang.poll, "its end")
    assert (ended.message, ended.lost) == ("node-1 was lost with pod p", True)
    assert key not in server.objects
