"""Runs by what they were asked for and what came of them, out of stores that the test writes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kit import synthetic_run
from kit.command_runs import Cli
from kit.synthetic_run import Life

import mlpipe
from mlpipe._core.errors import SubmitError
from mlpipe.api import listing
from mlpipe.api.listing import find, short
from mlpipe.store import catalogue, runs
from mlpipe.store.folder import FolderStore

pytestmark = pytest.mark.unit

SPEC = {
    "version": 1,
    "name": "lm",
    "stages": [
        {
            "name": "train",
            "train": {
                "model": {"preset": "llama-1m", "seq_len": 64},
                "data": {"tokens": "/tokens", "batch_size": 8},
                "steps": 40,
            },
            "resources": {"workers_per_node": 2},
        },
        {"name": "evaluate", "needs": ["train"], "evaluate": {}},
    ],
}
LRS = {"slow": "1e-4", "fast": "1e-2", "better": "1e-3"}
LOSSES = {"slow": 3.5, "fast": 2.5, "better": 2.25}


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> FolderStore:
    store = FolderStore(tmp_path_factory.mktemp("listing"))
    for run_id, lr in LRS.items():
        written(store, run_id, lr)
    runs.create_run(store, "waits", json.dumps(SPEC), "0" * 64, ["train"], "local", {"pipeline": "lm"})
    store.put_if_absent("index/half/000000-claimed", b"")
    return store


def written(store: FolderStore, run_id: str, lr: str) -> None:
    """A run that trained 40 steps, validated after 20 and 40, and was evaluated."""
    synthetic_run.write_train_stage(store, run_id, [Life(1, 0, 0, 40)], steps=40, every=20)
    key = f"runs/{run_id}/stages/train/attempt-1"
    found = [
        {"v": 1, "kind": "validation", "time": synthetic_run.BEGIN + step, "rank": 0, "restart": 0,
         "step": step,
         "metrics": {"loss": LOSSES[run_id] + (0.5 if step == 20 else 0.1), "accuracy": step / 100},
         "num_samples": 8, "best": step == 20, "seconds": 0.1, "sample": None}
        for step in (20, 40)
    ]  # fmt: skip
    synthetic_run.write_records(store, key, 0, found)
    for step in (20, 40):
        name = synthetic_run.checkpoint_key(step, 1, run_id)
        if step == 20:
            catalogue.mark_best(store, name, {})
        synthetic_run.commit_checkpoint(store, name, step=step, attempt=1)
    states = {"train": synthetic_run.stage_state(), "evaluate": synthetic_run.stage_state()}
    metrics = {"val_loss": LOSSES[run_id], "val_bits_per_byte": None, "num_tokens": 2048}
    outcome: dict[str, Any] = {"step": 40, "metrics": metrics, "passed": True}
    states["evaluate"] = replace(states["evaluate"], outcome=outcome)
    synthetic_run.write_run(store, run_id, states, pipeline=json.dumps(SPEC))
    overrides = [f"train.optimizer.lr={lr}"]
    runs.update_run(
        store, run_id, lambda run: replace(run, meta={**run.meta, "set": overrides, "user": "ada"})
    )


def found(store: FolderStore, where: str | None = None, sort: str | None = None) -> list[str]:
    return [run.id for run in mlpipe.runs(store.url, where=where, sort=sort)]


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("state == done", {"slow", "fast", "better"}),
        ("state == claimed", {"half"}),
        ("train.lr < 1e-3", {"slow", "waits"}),  # whose lr is the default of 3e-4
        ("stages.train.train.optimizer.lr = 0.01", {"fast"}),
        ("train.optimizer.lr >= 1e-3 and val_loss < 2.4", {"better"}),
        ("val_accuracy == 0.4 and run != slow", {"fast", "better"}),
        ("num_tokens > 2000 and val_loss > 3", {"slow"}),
        ("step == 40 and not run == fast", {"slow", "better"}),
        ("pipeline == lm and state == pending", {"waits"}),
        ("user == ada and steps == 40 and num_tokens > 2000", {"slow", "fast", "better"}),
        ("model.preset == llama-1m and state == pending", {"waits"}),
    ],
)
def test_runs_are_chosen_by_keys_metrics_and_state(store, where, expected):
    assert set(found(store, where)) == expected


def test_runs_are_sorted_and_those_without_come_last(store):
    assert found(store, "state == done", "val_loss") == ["better", "fast", "slow"]
    assert found(store, "state == done", "-val_loss") == ["slow", "fast", "better"]
    assert found(store, "pipeline != null", "val_loss")[-1] == "waits"
    assert found(store, None, "-run") == ["waits", "slow", "half", "fast", "better"]


def test_what_is_not_a_number_comes_last_like_what_is_absent(store, monkeypatch):
    whole = listing._Facts.__call__
    monkeypatch.setattr(
        listing._Facts,
        "__call__",
        lambda self, name: math.nan if self._summary.run_id == "fast" else whole(self, name),
    )
    for sort in ("val_loss", "-val_loss"):
        assert set(found(store, None, sort)[2:]) == {"fast", "half", "waits"}
    assert found(store, None, "val_loss")[:2] == ["better", "slow"]


def test_a_field_that_no_run_has_is_a_slip(store):
    with pytest.raises(SubmitError, match=r"no run has a field 'train\.stepps'") as caught:
        found(store, "train.stepps == 40")
    assert "did you mean train.steps?" in (caught.value.hint or "")
    with pytest.raises(SubmitError, match="no run has a field 'val_los'"):
        found(store, None, "val_los")


def test_only_what_is_asked_for_is_read(store, monkeypatch):
    asked: list[str] = []
    get = FolderStore.get_with_etag
    monkeypatch.setattr(FolderStore, "get_with_etag", lambda self, key: asked.append(key) or get(self, key))
    plain = FolderStore.get
    monkeypatch.setattr(
        FolderStore, "get", lambda self, key, **more: asked.append(key) or plain(self, key, **more)
    )
    monkeypatch.setattr(FolderStore, "read_log", lambda *_, **__: pytest.fail("records were read"))
    assert found(store, "state == done and run == fast") == ["fast"]
    assert asked == []
    assert found(store, "state == done and val_loss == 2.5") == ["fast"]
    assert {key.rpartition("/")[2] for key in asked} == {"run.json"}
    asked.clear()
    assert found(store, "run == fast and train.lr > 0") == ["fast"]
    assert set(asked) == {"runs/fast/pipeline.yaml", "runs/fast/run.json"}


def test_a_key_is_meant_by_its_shortest_path():
    keys = {
        "stages.train.train.optimizer.lr": 1,
        "stages.train.train.groups.0.lr": 2,
        "store": "s",
        "a.b.c": 3,
    }
    assert find(keys, "train.optimizer.lr") == 1
    assert find(keys, "train.lr") == 1  # five parts, the other six
    assert find(keys, "groups.lr") == 2
    assert find(keys, "b.c") == 3
    assert find(keys, "c.b") is None
    assert find(keys, "store") == "s"
    with pytest.raises(SubmitError, match=r"'x' may be a\.x or b\.x"):
        find({"a.x": 1, "b.x": 2, "c.d.x": 3}, "x")
    assert short("stages.train.train.steps") == "train.steps"
    assert short("stages.train.resources.nodes") == "train.resources.nodes"
    assert short("stages.first.train.steps") == "first.train.steps"


def test_metrics_and_checkpoints_of_a_run(store):
    run = mlpipe.Run("better", store=store.url)
    table = run.metrics()
    train = table.where(stage="train")
    assert train.column("step") == list(range(1, 41))
    assert all(isinstance(loss, float) for loss in train.column("loss"))
    assert train[19]["val_accuracy"] == 0.2
    assert train[39]["val_loss"] == pytest.approx(2.35)
    assert "val_loss" not in train[20]
    assert table.where(stage="evaluate") == [
        {"stage": "evaluate", "step": 40, "val_loss": 2.25, "num_tokens": 2048}
    ]
    assert run.metrics(stage="evaluate").column("val_loss") == [2.25]
    newest, best = run.checkpoint(), run.checkpoint("best")
    assert newest is not None
    assert (newest.step, newest.stage) == (40, "train")
    assert newest.path == Path(store.url) / newest.key
    assert best is not None
    assert best.step == 20
    assert mlpipe.Run("waits", store=store.url).checkpoint("best") is None


def test_the_command_line_shows_what_was_asked_for(store, tmp_path):
    cli = Cli(tmp_path)
    cli.store = Path(store.url)
    cli.env["MLPIPE_STORE"] = store.url
    lines = cli(
        "list", "--where", "train.lr > 2e-4 and val_loss < 3", "--sort", "val_loss"
    ).stdout.splitlines()
    assert lines[0].split()[-2:] == ["train.lr", "val_loss"]
    assert [line.split()[0] for line in lines[1:]] == ["better", "fast"]
    assert lines[1].split()[-2:] == ["0.001", "2.25"]
    document = cli.json("list", "--where", "run == fast and train.lr > 0")
    assert document["runs"][0]["values"] == {"train.lr": 0.01}
    assert "no runs in" in cli("list", "--where", "val_loss > 100").stdout
    said = cli("list", "--where", "train.lr <", code=2).stderr
    assert "column 11: it ends where a value should follow" in said
    assert "            ^" in said


def test_runs_beside_each_other(store, tmp_path):
    rows = mlpipe.compare([mlpipe.Run(name, store=store.url) for name in ("slow", "fast")])
    by_key = {row["key"]: row for row in rows}
    assert by_key["stages.train.train.optimizer.lr"] == {
        "group": "pipeline", "key": "stages.train.train.optimizer.lr", "slow": 1e-4, "fast": 1e-2,
    }  # fmt: skip
    assert (by_key["evaluate.val_loss"]["slow"], by_key["evaluate.val_loss"]["fast"]) == (3.5, 2.5)
    assert by_key["train.best accuracy"]["slow"] == 0.2
    assert by_key["train.validation accuracy"]["slow"] == 0.4
    assert by_key["state"]["fast"] == "done"  # the outcome is told, alike or not
    assert "stages.train.train.steps" not in by_key
    assert "train.goodput" in by_key
    alike = mlpipe.compare([mlpipe.Run(name, store=store.url) for name in ("slow", "fast")], every=True)
    assert {"stages.train.train.steps", "train.strategy", "train.torch"} <= {row["key"] for row in alike}
    cli = Cli(tmp_path)
    cli.env["MLPIPE_STORE"] = store.url
    text = cli("compare", "slow", "fast", "better", "--out", "page.html").stdout
    (line,) = [line for line in text.splitlines() if line.startswith("stages.train.train.optimizer.lr")]
    assert line.split()[1:] == ["0.0001", "0.01", "0.001"]
    page = (tmp_path / "page.html").read_text()
    assert page.count('<svg class="chart"') == 6  # loss, throughput, MFU, gradient norm, two validations
    assert page.count("stages.train.train.steps") == 1  # among what is alike
    assert "<script" not in page
    document = cli.json("compare", "slow", "fast")
    assert all(row["differs"] or row["group"] == "outcome" for row in document["rows"])
    assert "end it in .html" in cli("compare", "slow", "fast", "--out", "page.md", code=2).stderr
    assert not (tmp_path / "page.md").exists()
    assert "name two runs" in cli("compare", "slow", "slow", code=2).stderr
    assert "there is no run nobody" in cli("compare", "slow", "nobody", code=2).stderr
