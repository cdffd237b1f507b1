"""An elastic training on a cluster: what befalls one node's pod is not the others' business."""

from __future__ import annotations

import json
from typing import Any

import pytest
from kit.place import shortened

from mlpipe._core.records import Membership, Start, Step
from mlpipe.observe.records import decode_lines, read_records
from mlpipe.render import names

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
STEPS = 240
KEY = "runs/elastic/stages/train/attempt-1"


def test_pods_die_leave_and_come_and_the_others_go_on(place, hold):
    """One of three is deleted by force, at once with the coordinator; then one fewer is wanted."""
    spec = place.spec(
        "elastic",
        model=hold.model,  # six minutes of so many steps
        nodes="2..3",
        strategy="single",
        deterministic=False,
        steps=STEPS,
        checkpoint={"every": "1000 steps"},
        # the next coordinator takes the seat of a dead one sooner than after half a minute
        env=shortened({"mlpipe.store.s3_log:FLUSH_SECONDS": 1.0, "mlpipe.store.replicas:SEAT_SECONDS": 10.0}),
    )

    def members() -> list[list[int]]:
        with place.cluster.inside():
            data, _ = place.store().read_log(f"{KEY}/events.jsonl")
        found = [one for one in decode_lines(data.split(b"\n")) if isinstance(one, Membership)]
        return [sorted(one.members or []) for one in found]

    def pods(replica: int | None) -> list[dict[str, Any]]:
        number = None if replica is None else str(replica)
        return [
            pod
            for pod in place.worker_pods("elastic")
            if pod["metadata"]["labels"].get(names.REPLICA) == number
        ]

    def delete(pod: dict[str, Any]) -> None:
        name = pod["metadata"]["name"]
        place.cluster.kubectl("-n", place.namespace, "delete", "pod", name, "--grace-period=0", "--force")

    with hold:
        place.submit(spec, "elastic")
        place.until("three nodes", lambda: [0, 1, 2] in members())
        place.until_step("elastic", 1)
        before, at = len(members()), place.last_step("elastic")
        for pod in pods(1) + pods(None):
            delete(pod)
        place.until("three again, by another coordinator", lambda: [0, 1, 2] in members()[before:])
        place.until_step("elastic", at + 2)
        place.mlpipe("scale", "elastic", "--nodes", "2")
        place.until("one fewer", lambda: members()[-1] == [0, 1])
        assert not pods(2)
    place.submit(spec, "elastic", "--wait")
    with place.cluster.inside():
        store = place.store()
        found = {rank: read_records(store, KEY, rank) for rank in range(3)}
    starts = {rank: [one for one in found[rank] if isinstance(one, Start)] for rank in range(3)}
    # one that did not hear of a commit when the coordinator was lost is healed to it, and has no record of it
    done = {one.step for lines in found.values() for one in lines if isinstance(one, Step)}
    assert done == set(range(1, STEPS + 1)), "no step lost"
    assert [len(starts[rank]) for rank in range(3)] == [1, 2, 1], "the others began once"
    assert starts[1][1].resumed_from is None, "healed by a peer, not by the store"
    state = place.run_state("elastic")
    assert (state.state, state.stages["train"].attempt) == ("done", 1)
    jobs = {job["metadata"]["name"] for job in place.objects("jobs", "elastic")}
    assert all(not name.endswith("a1-2") for name in jobs), json.dumps(sorted(jobs))
