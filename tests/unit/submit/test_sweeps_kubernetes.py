"""A sweep on a cluster, against a stand-in API server: each trial has a driver of its own there, a few at a
time, and the controller here only starts and follows them. Pods there are none: the test ends the trials."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from kit.apiserver import ApiServer
from kit.sweep_backend import Quiet

from mlpipe.spec.load import load_pipeline_text
from mlpipe.store import runs
from mlpipe.store.folder import FolderStore
from mlpipe.store.runs import RunState, StageState
from mlpipe.submit import backends
from mlpipe.submit.executor import StopRequest
from mlpipe.submit.kubernetes.api import ClusterApi
from mlpipe.submit.submission import Submission
from mlpipe.submit.sweeps import controller
from mlpipe.submit.sweeps.controller import STOPPED, drive_sweep
from mlpipe.submit.sweeps.create import create

pytestmark = pytest.mark.unit


@pytest.fixture
def store(server: ApiServer, api: ClusterApi, monkeypatch: pytest.MonkeyPatch) -> Iterator[FolderStore]:
    """Outside of /tmp, which is the pod's own and so no place for a volume."""
    monkeypatch.setattr(controller, "_LOOK_SECONDS", (0.01, 0.01))
    with tempfile.TemporaryDirectory(dir="/var/tmp") as path:
        folder = Path(path)
        monkeypatch.setenv("MLPIPE_CACHE", str(folder / "cache"))
        train = {
            "model": {"preset": "llama-1m", "seq_len": 32},
            "data": {"tokens": str(folder / "store/tokens"), "batch_size": 8},
            "steps": 10,
        }
        text = json.dumps(
            {
                "version": 1,
                "name": "swept",
                "image": "registry.example.com/team/mlpipe@sha256:" + "0" * 64,
                "kubernetes": {"volumes": [{"claim": "data", "path": str(folder / "store")}]},
                "stages": [{"name": "fit", "train": train}],
                "sweep": {"over": {"seed": "0..2"}, "metric": {"name": "loss"}, "max_parallel": 2},
            }
        )
        pipeline = load_pipeline_text(text, "pipeline.yaml")
        store = FolderStore(folder / "store")
        backend = backends.load("kubernetes").of_submission(pipeline, {})
        asked = Submission("pipeline.yaml", text, (), pipeline, store.url, str(folder), run_id="s")
        create(store, backend, asked, Quiet())
        yield store


def driver_jobs(server: ApiServer) -> dict[str, dict]:
    """By the run that each drives."""
    bodies = [body for (kind, _), body in server.objects.items() if kind == "jobs"]
    return {body["metadata"]["labels"]["mlpipe.dev/run"]: body for body in bodies}


def end(store: FolderStore, server: ApiServer, run_id: str) -> None:
    """As its driver does, which then leaves."""

    def done(run: RunState) -> RunState:
        return replace(run, state="done", stages={"fit": StageState("done", 1)})

    runs.update_run(store, run_id, lambda run: replace(run, state="running"))
    runs.update_run(store, run_id, done)
    job = driver_jobs(server)[run_id]
    job["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}


def test_each_trial_gets_a_driver_in_the_cluster_a_few_at_a_time(store, server):
    assert not driver_jobs(server)  # so far the cluster has only been asked
    assert any("dryRun=All" in request for request in server.requests)
    seen: list[set[str]] = []

    def watch(sweep: RunState) -> None:
        under_way = {name for name, trial in sweep.stages.items() if trial.state == "running"}
        seen.append(under_way)
        if len(under_way) == 2 or sweep.stages["002"].state == "running":
            end(store, server, f"s-{min(under_way)}")

    sweep = drive_sweep(store, "s", stop=StopRequest(), console=Quiet(), watch=watch)
    assert [trial.state for trial in sweep.stages.values()] == ["done"] * 3
    assert max(map(len, seen)) == 2
    jobs = driver_jobs(server)
    assert sorted(jobs) == ["s-000", "s-001", "s-002"]
    words = json.dumps(jobs["s-001"])
    assert "--seal" in words
    assert runs.read_run(store, "s-001").meta["set"] == ["sweep=null", "stages.fit.train.seed=1"]
    assert runs.read_run(store, "s-001").backend == "kubernetes"


def test_a_stop_asks_the_trials_and_a_second_one_leaves_them_saving(store, server):
    stop = StopRequest()

    def watch(sweep: RunState) -> None:
        if stop.kind is not None:
            raise KeyboardInterrupt
        if len(driver_jobs(server)) == 2:
            stop.request("interrupted", "stopped by SIGINT")

    sweep = drive_sweep(store, "s", stop=stop, console=Quiet(), watch=watch)
    assert sweep.state == "cancelled"
    assert runs.cancel_requested(store, "s-000") == STOPPED
    assert [trial.state for trial in sweep.stages.values()] == ["running", "running", "pending"]
