"""MLflow's real server: one run over kills and resumes, each step once, and its registry."""

from __future__ import annotations

import json
from typing import Any

import pytest
import urllib3
from kit import processes
from kit.command_runs import Cli, until
from kit.faultproxy import FaultProxy
from kit.mlflow_server import mlflow_server
from kit.plans import write_tokens
from kit.servers import ServerMissingError
from kit.tracked import START, resumed, run_of, save, step, validation
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mlpipe._core.records import End
from mlpipe.observe.tracking import tracking
from mlpipe.observe.tracking.mlflow import Mlflow
from mlpipe.observe.tracking.mlflow_registry import register
from mlpipe.observe.tracking.tracking import Tracking
from mlpipe.store.registry import Model

pytestmark = [pytest.mark.services, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    try:
        with mlflow_server(tmp_path_factory.mktemp("mlflow")) as url:
            yield url
    except ServerMissingError as error:
        pytest.skip(str(error))


def ask(url: str, path: str, **query: str) -> dict[str, Any]:
    found = urllib3.request("GET", f"{url}/api/2.0/mlflow/{path}", fields=query).json()
    assert "error_code" not in found, found
    return found


def history(url: str, run: str, metric: str) -> list[tuple[int, float]]:
    """As MLflow keeps it, sorted by step."""
    points = ask(url, "metrics/get-history", run_id=run, metric_key=metric, max_results="25000").get(
        "metrics", []
    )
    return sorted((int(one["step"]), one["value"]) for one in points)


def runs_of(url: str, experiment: str) -> list[dict[str, Any]]:
    known = ask(url, "experiments/get-by-name", experiment_name=experiment)["experiment"]["experiment_id"]
    body = json.dumps({"experiment_ids": [known]})
    headers = {"Content-Type": "application/json"}
    return urllib3.request("POST", f"{url}/api/2.0/mlflow/runs/search", body=body, headers=headers).json()[
        "runs"
    ]


def pairs(items) -> dict[str, str]:
    return {one["key"]: one["value"] for one in items}


def test_one_run_over_a_resume_and_lost_answers_has_each_step_once(server):
    settings = {"uri": server, "experiment": "once"}
    first = Mlflow(settings, run_of())
    assert first.begin(START) == 0
    batch = [step(number) for number in range(1, 301)]  # 1,500 metrics: more than a request may hold
    first.log(batch)
    first.log(batch)  # as after an answer that was lost
    first.log([save(300), step(301, loss=float("nan")), step(302, loss=float("inf"))])
    first.log([step(number) for number in range(303, 311)])
    first.log([validation(310)])

    changed = run_of(attempt=2, decided={"steps": 50, "optimizer": {"name": "adamw", "lr": 0.001}})
    again = Mlflow(settings, changed)
    assert again.begin(resumed(300)) == 310
    again.log([step(number, loss=7.0) for number in range(301, 321)])
    again.end("done")
    (run,) = runs_of(server, "once")
    found = history(server, run["info"]["run_id"], "train/loss")
    assert [at for at, _ in found] == list(range(1, 321))
    assert found[309:] == [(310, 1.0)] + [(at, 7.0) for at in range(311, 321)]
    assert str(found[300][1]).lower() == "nan"
    params, tags = pairs(run["data"]["params"]), pairs(run["data"]["tags"])
    assert (params["steps"], params["optimizer.lr"], params["optimizer.args.betas"]) == (
        "40",
        "0.001",
        "[0.9, 0.95]",
    )
    assert (tags["mlpipe.run_id"], tags["mlpipe.now.steps"]) == ("r", "50")
    assert tags["mlpipe.checkpoint"] == tags["mlpipe.resumed_from"] == "checkpoints/step-300"
    assert run["info"]["status"] == "FINISHED"
    files = ask(server, "artifacts/list", run_id=run["info"]["run_id"])["files"]
    assert sorted(one["path"] for one in files) == [
        "pipeline.yaml",
        "plan-attempt-1.json",
        "plan-attempt-2.json",
        "samples",
    ]


def test_a_server_that_is_away_or_hangs_is_told_all_when_it_is_back(server, monkeypatch, caplog):
    monkeypatch.setattr(tracking, "FLUSH_SECONDS", 0.05)
    monkeypatch.setattr(tracking, "_UNTIL_WARNED_SECONDS", 0.2)
    monkeypatch.setattr(tracking, "_LATER_SECONDS", 0.1)
    monkeypatch.setattr(tracking, "END_SECONDS", 60.0)
    host, _, port = server.removeprefix("http://").partition(":")
    with FaultProxy((host, int(port))) as proxy:
        proxy.away("refuse")
        tracker = Mlflow({"uri": proxy.endpoint, "experiment": "away"}, run_of())
        tracker._api._pool.connection_pool_kw["timeout"] = urllib3.Timeout(1.0)
        one = Tracking(tracker, lambda first, last: [], [].append, lambda: None)
        one.on_start(START)
        for number in range(1, 11):
            one.on_step(step(number))
        until(lambda: "is away" in caplog.text, "the warning")
        proxy.back()
        until(lambda: tracker.url and len(one._waiting) == 1, "all but the last to be told")
        proxy.away("hang")
        for number in range(11, 21):
            one.on_step(step(number))
        until(lambda: one._is_away, "the silence to be noticed")
        proxy.back()
        one.on_end(End(outcome="failed", step=20, message="its own"))
    assert caplog.text.count("is away") == 1
    (run,) = runs_of(server, "away")
    assert history(server, run["info"]["run_id"], "train/loss") == [(at, 1.0) for at in range(1, 21)]
    assert run["info"]["status"] == "FAILED"


def test_a_promoted_version_stands_in_the_registry_once_under_its_alias(server):
    Mlflow({"uri": server, "experiment": "models"}, run_of()).begin(START)
    for version, store in ((1, "s3://bucket/pre"), (2, "s3://bucket/pre"), (1, "/home/me/store")):
        model = Model("lm", version, f"models/lm/{version}", (), 0.0, 9, 1, {"run": "r", "stage": "train"})
        pages = {
            register({"uri": server}, "models", store, model, "best") for _ in range(2)
        }  # a driver that died
        assert len(pages) == 1
    found = ask(server, "model-versions/search", filter="name='lm'")["model_versions"]
    assert {(one["version"], one["source"]) for one in found} == {
        ("1", "s3://bucket/pre/models/lm/1"),
        ("2", "s3://bucket/pre/models/lm/2"),
        ("3", "mlpipe:/home/me/store/models/lm/1"),
    }
    (run,) = runs_of(server, "models")
    assert {one["run_id"] for one in found} == {run["info"]["run_id"]}
    assert ask(server, "registered-models/alias", name="lm", alias="best")["model_version"]["version"] == "3"


def test_at_the_command_line_killed_and_resumed_on_two_ranks(tmp_path, server):
    """TensorBoard and MLflow both have each step once, of rank 0; the promoted model is in the registry."""
    write_tokens(tmp_path / "tokens")
    (tmp_path / "slow").touch()
    slow = {"seconds": 0.2, "while_file": str(tmp_path / "slow"), "dropout": 0.0}
    train = {
        "model": {"entry": "kit.models:slow", "args": slow, "seq_len": 32},
        "data": {"tokens": str(tmp_path / "tokens"), "batch_size": 8},
        "steps": 40,
        "strategy": "ddp",
        "checkpoint": {"every": "5 steps"},
        "validate": {"every": "10 steps", "max_tokens": 512},
        "track": ["tensorboard", {"mlflow": {"uri": server, "experiment": "cli"}}],
        "max_restarts": 1,
    }
    stages = [
        {"name": "train", "train": train, "resources": {"workers_per_node": 2}},
        {"name": "promote", "needs": ["train"], "promote": {"as": "cli-model", "alias": "best"}},
    ]
    (tmp_path / "pipeline.yaml").write_text(json.dumps({"version": 1, "name": "tracked", "stages": stages}))
    cli = Cli(tmp_path, warm=True)
    cli.env["PYTHONPATH"] = str(processes.__file__).rpartition("/kit/")[0]
    stage = cli.store / "runs/r/stages/train"

    def steps_done(attempt: int) -> int:
        path = stage / f"attempt-{attempt}/records/rank-0.jsonl"
        return path.read_text().count('"kind": "step"') if path.exists() else 0

    running = cli.start("run", "pipeline.yaml", "--run-id", "r")
    until(lambda: steps_done(1) > 12, "the training to be on its way")
    everything = cli.processes()
    processes.kill(everything)
    running.communicate(timeout=300)
    until(lambda: processes.gone(everything), "the end of all")
    (tmp_path / "slow").unlink()
    document = cli.json("resume", "r")
    assert document["state"] == "done"

    board = EventAccumulator(str(stage / "tensorboard"), size_guidance={"scalars": 0})
    board.Reload()
    assert [one.step for one in board.Scalars("train/loss")] == list(range(1, 41))
    assert len(list((stage / "tensorboard").iterdir())) == 2  # of two processes of rank 0; rank 1 has none
    (run,) = runs_of(server, "cli")
    assert [at for at, _ in history(server, run["info"]["run_id"], "train/loss")] == list(range(1, 41))
    validated = history(server, run["info"]["run_id"], "validation/loss")
    assert [at for at, _ in validated] == [10, 20, 30, 40]
    shown = [(one.step, one.value) for one in board.Scalars("validation/loss")]
    assert shown == [(at, pytest.approx(value)) for at, value in validated]
    saved = [at for at, _ in history(server, run["info"]["run_id"], "checkpoint/seconds")]
    assert len(saved) == len(set(saved))
    assert set(saved) >= set(range(15, 41, 5))  # who is killed as it commits tells nobody
    assert run["info"]["status"] == "FINISHED"
    page = f"{server}/#/experiments/{run['info']['experiment_id']}/runs/{run['info']['run_id']}"
    assert f"mlflow: {page}" in cli("status", "r").stdout
    assert page in (cli.store / "runs/r/report.html").read_text()
    (version,) = ask(server, "model-versions/search", filter="name='cli-model'")["model_versions"]
    assert version["run_id"] == run["info"]["run_id"]
    best = ask(server, "registered-models/alias", name="cli-model", alias="best")["model_version"]
    assert best["version"] == "1"
    outcome = document["stages"]["promote"]["outcome"]
    assert outcome["mlflow"] == f"{server}/#/models/cli-model/versions/1"
