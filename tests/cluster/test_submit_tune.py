"""`mlpipe tune` on a real cluster: trials are JobSets of the person who asks, and no driver is there."""

from __future__ import annotations

import json

import pytest

from mlpipe.store import catalogue, runs

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


def test_trials_are_jobsets_that_leave_nothing_but_their_figures(place):
    """One change: of micro-batches half as large. Who tunes has the rights of a driver."""
    binding = f"create rolebinding tuner --role=mlpipe-driver --serviceaccount={place.namespace}:person"
    place.cluster.kubectl("-n", place.namespace, *binding.split())
    data = {"entry": "kit.models:numbers", "batch_size": 4}
    resources = {"workers_per_node": 2}
    spec = place.spec("tuned", model={"preset": "llama-1m"}, nodes=1, resources=resources, data=data)
    out = place.folder / "tune.json"
    said = place.mlpipe("tune", spec, "--only", "micro_batch", "--steps", "6", "--out", out)
    assert "micro_batch=1" in said.stdout
    trials = json.loads(out.read_bytes())["trials"]
    smaller = ["stages.train.train.data.micro_batch=1"]
    assert {len(trial["sets"]) for trial in trials} == {0, 1}
    assert all(trial["seconds"] > 0 and trial["sets"] in ([], smaller) for trial in trials)
    with place.cluster.inside():
        (run,) = [one for one in runs.list_runs(place.store()) if "-tune-" in one.run_id]
        assert run.state == "done"
        assert catalogue.latest(place.store(), f"runs/{run.run_id}/stages/train") is None
    assert place.objects("pods", run.run_id, **{"app.kubernetes.io/component": "driver"}) == []
    assert len(place.objects("jobsets", run.run_id)) == len(trials)
