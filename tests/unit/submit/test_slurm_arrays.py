"""Trials of a sweep as one array of Slurm: what is sent, and how often when answers are lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlpipe._core.errors import RenderError, SubmitError
from mlpipe.plan.ahead import plan_ahead
from mlpipe.plan.plan import Plan
from mlpipe.render.slurm import comment, plan_of_task
from mlpipe.spec.load import load_pipeline_text
from mlpipe.store.runs import RunState
from mlpipe.submit.slurm import arrays, client
from mlpipe.submit.slurm.client import AwayError, Job
from mlpipe.submit.submission import Submission
from mlpipe.submit.sweeps.create import trial_submission

pytestmark = pytest.mark.unit
NAME = "mlpipe/s/fit/1"


def submission(folder: Path, over: dict[str, Any], **resources: Any) -> Submission:
    train = {
        "model": {"entry": "a.b:c"},
        "data": {"entry": "a.b:d", "batch_size": 8},
        "steps": 6,
    }
    stage = {"name": "fit", "train": train, "resources": {"cpus": 1, **resources}}
    sweep = {"over": over, "max_parallel": 2, "metric": {"name": "loss"}}
    text = json.dumps({"version": 1, "name": "p", "stages": [stage], "sweep": sweep})
    pipeline = load_pipeline_text(text, "p.yaml")
    return Submission("p.yaml", text, (), pipeline, str(folder), str(folder), run_id="s")


def trials(folder: Path, over: dict[str, Any]) -> dict[str, Submission]:
    (key, values), asked = *over.items(), submission(folder, over)
    return {
        f"{number:03}": trial_submission(asked, "s", f"{number:03}", {key: value})
        for number, value in enumerate(values)
    }


def ahead(trial: Submission, stage: str) -> Plan:
    return plan_ahead(trial.pipeline, stage, trial.store_url, trial.run_id or "", cluster=True)


def test_each_task_has_the_plan_that_its_trial_would_have_alone(tmp_path: Path) -> None:
    asked = trials(tmp_path, {"stages.fit.train.optimizer.lr": [0.1, 0.2, 0.3]})
    text = arrays.script_of("s", {name: asked[name] for name in ("002", "000")}, 2, ahead)
    assert "\n#SBATCH --array=0,2%2\n" in text
    held = text.partition("<<'END_OF_PLAN' &\n")[2].partition("\nEND_OF_PLAN")[0].encode()
    for name in ("000", "002"):
        assert plan_of_task(held, int(name)) == (ahead(asked[name], "fit"), "s")
    assert text == arrays.script_of("s", {name: asked[name] for name in ("000", "002")}, 2, ahead)


def test_trials_of_several_sizes_are_no_array(tmp_path: Path) -> None:
    asked = trials(tmp_path, {"stages.fit.resources.cpus": [1, 2]})
    with pytest.raises(RenderError, match="one size"):
        arrays.script_of("s", asked, 2, ahead)


def test_trials_on_groups_of_machines_are_no_array(tmp_path: Path) -> None:
    groups = [[{"nodes": 1}, {"nodes": number}] for number in (1, 2)]
    with pytest.raises(RenderError, match="no task of an array"):
        arrays.script_of("s", trials(tmp_path, {"stages.fit.resources": groups}), 2, ahead)


class Cluster:
    """What squeue would say, and what was sent and cancelled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.jobs: list[Job] = []
        self.sent: list[str] = []
        self.cancelled: list[str] = []
        self.answers: list[Exception] = []  # of sbatch
        self.takes = True
        monkeypatch.setattr(client, "jobs", lambda prefix: list(self.jobs))
        monkeypatch.setattr(client, "submit", self._submit)
        monkeypatch.setattr(client, "cancel", lambda *ids: self.cancelled.extend(ids))
        monkeypatch.setattr(arrays, "FIRST_POLL_SECONDS", 0.0)
        monkeypatch.setattr(arrays, "LAST_POLL_SECONDS", 0.0)

    def _submit(self, text: str, folder: str) -> str:
        self.sent.append(text)
        number = len(self.sent)
        if self.takes:
            self.jobs += [self.task(f"{number}_{task}", "PENDING", text) for task in range(3)]
        if self.answers:
            raise self.answers.pop()
        return str(number)

    def task(self, number: str, state: str, text: str) -> Job:
        return Job(number, state, "JobArrayTaskLimit", 0, 0, "", NAME, comment(text))

    def now(self, number: str, state: str) -> None:
        self.jobs = [replace(job, state=state) if job.id == number else job for job in self.jobs]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


def state_of(folder: Path) -> RunState:
    return RunState(1, "s", "p", "slurm", "running", 0.0, 0.0, "", 1, {}, None, "", {"folder": str(folder)})


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*given: Any) -> Any:
        raise error

    return fail


def batch(folder: Path, kept: Any = None, number: int = 3, state: Any = "running") -> arrays.ArrayBatch:
    asked = trials(folder, {"stages.fit.train.optimizer.lr": [0.1, 0.2, 0.3][:number]})
    text = arrays.script_of("s", asked, 2, ahead)
    meta = {"folder": str(folder), **({"batch": kept} if kept else {})}
    sweep = replace(state_of(folder), state=state, meta=meta)
    return arrays.ArrayBatch(sweep, str(folder), text, asked, lambda text: None)


def test_an_array_is_sent_once_and_a_trial_that_is_cancelled_in_it_will_not_begin(
    tmp_path: Path, cluster: Cluster
) -> None:
    one = batch(tmp_path)
    assert set(one.waiting()) == {"000", "001", "002"}
    assert (tmp_path / "runs/s/logs").is_dir(), "where Slurm writes what tasks say"
    cluster.now("1_0", "RUNNING")
    assert "sweep.max_parallel" in one.waiting()["001"]
    assert set(one.waiting()) == {"001", "002"}
    cluster.jobs = [job for job in cluster.jobs if job.id != "1_2"]  # by scancel: squeue tells of it no more
    assert set(one.waiting()) == {"001", "002"}, "one look may miss it"
    assert set(one.waiting()) == {"001"}
    assert "Slurm job 1_2" in one.gone()["002"]
    again = batch(tmp_path, one.meta(), 2)  # another controller: what it would send is not what is there
    assert set(again.waiting()) == {"001", "002"}
    task = again.trial("001")
    assert task is not None
    assert (task["job"], Path(task["output"]).name) == ("1_1", "slurm-001.log")
    assert len(cluster.sent) == 1
    assert not again.cancel(but=["000"])
    assert cluster.cancelled == ["1_1"], "the one with a driver saves"


def test_a_trial_that_is_taken_back_is_gone_and_one_that_has_begun_goes_on(
    tmp_path: Path, cluster: Cluster
) -> None:
    """Also where it was not sent yet."""
    one = batch(tmp_path)
    one.take_back("001")
    one.take_back("000")
    one.waiting()
    cluster.now("1_0", "RUNNING")
    one.waiting()
    assert cluster.cancelled == ["1_1"]
    cluster.jobs = [job for job in cluster.jobs if job.id != "1_1"]
    one.waiting()
    assert one.waiting() == {"002": one.waiting()["002"]}
    assert list(one.gone()) == ["001"]


def test_a_lost_answer_sends_no_second_array_and_one_that_comes_late_is_cancelled(
    tmp_path: Path, cluster: Cluster
) -> None:
    cluster.answers = [AwayError("Slurm's controller does not answer")]
    one = batch(tmp_path)
    assert one.waiting() == dict.fromkeys(("000", "001", "002"), "Slurm's controller does not answer")
    one.waiting()
    assert len(cluster.sent) == 1
    assert one.trial("002") is not None
    cluster.jobs += [cluster.task(f"7_{task}", "PENDING", cluster.sent[0]) for task in range(3)]
    one.waiting()
    assert cluster.cancelled == ["7"]


def test_a_trial_begins_nowhere_else_while_slurm_does_not_say_what_became_of_the_array(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next controller's first look fails, and of a single trial it would send no array."""
    kept = batch(tmp_path)
    kept.waiting()
    state = replace(state_of(tmp_path), meta={"folder": str(tmp_path), "batch": kept.meta()})
    again = arrays.ArrayBatch(state, str(tmp_path), None, (), lambda text: None)
    with monkeypatch.context() as broken:
        broken.setattr(client, "jobs", raising(SubmitError("RPC limit exceeded")))
        assert set(again.waiting()) == {"000", "001", "002"}
    assert "sweep.max_parallel" in again.waiting()["000"]
    cluster.jobs.clear()
    state.meta["batch"]["taken"].clear()  # its answer was lost
    assert arrays.ArrayBatch(state, str(tmp_path), None, (), lambda text: None).waiting() == {}


def test_a_stop_takes_tasks_back_at_once_and_does_not_ask_slurm_at_each_look(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second Ctrl-C leaves nobody who would do so later."""
    monkeypatch.setattr(arrays, "FIRST_POLL_SECONDS", 3600.0)
    looks: list[str] = []
    monkeypatch.setattr(client, "jobs", lambda prefix: looks.append(prefix) or list(cluster.jobs))
    one = batch(tmp_path)
    one.waiting()
    assert [one.cancel(but=["000"]) for _ in range(3)] == [False] * 3
    assert cluster.cancelled == ["1_1", "1_2"]
    assert len(looks) == 2


def test_what_a_stop_took_back_is_sent_again_once_it_has_ended(tmp_path: Path, cluster: Cluster) -> None:
    """Resumed while a task that had begun still ends: squeue tells of the others no more."""
    one = batch(tmp_path)
    one.waiting()
    cluster.now("1_0", "COMPLETING")
    cluster.jobs = cluster.jobs[:1]
    again = batch(tmp_path, one.meta(), state="cancelled")
    for _ in range(4):
        assert set(again.waiting()) == {"000", "001", "002"}
    assert len(cluster.sent) == 1
    cluster.now("1_0", "CANCELLED")
    again.waiting()
    assert len(cluster.sent) == 2
    assert again.waiting()["002"]
    assert not again.gone(), "nobody cancelled them but the sweep"
    task = again.trial("002")
    assert task is not None
    assert task["job"] == "2_2"


def test_what_was_cancelled_while_nobody_looked_is_not_sent_again(tmp_path: Path, cluster: Cluster) -> None:
    """With the whole array: Slurm forgets it, and only the sweep knows that it was taken."""
    first = batch(tmp_path)
    first.waiting()
    cluster.jobs.clear()
    again = batch(tmp_path, json.loads(json.dumps(first.meta())))
    again.waiting()
    again.waiting()
    assert "Slurm job 1_2" in again.gone()["002"]
    assert again.waiting() == {}
    assert len(cluster.sent) == 1


def test_what_slurm_refuses_as_an_array_is_submitted_one_by_one(tmp_path: Path, cluster: Cluster) -> None:
    cluster.takes, cluster.answers = False, [SubmitError("Invalid job array specification", kind="input")]
    one = batch(tmp_path)
    assert one.waiting() == {}
    assert one.trial("000") is None
