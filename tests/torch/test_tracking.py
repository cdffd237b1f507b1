"""Trackers in a real training: what cannot be told ends no run, what cannot be is told before it begins."""

from __future__ import annotations

import socket

import pytest
from kit import plans, wandb_files
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mlpipe.plan.validation import MetricPlan, ValidatePlan
from mlpipe.plan.work import CallbackPlan, TrackerPlan
from mlpipe.store import catalogue
from mlpipe.store.folder import FolderStore
from mlpipe.train.tracking import history

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return plans.write_tokens(tmp_path_factory.mktemp("tracking") / "tokens")


def test_a_server_that_never_answers_costs_no_step(tmp_path, tokens):
    """It takes connections, as one that hangs does. TensorBoard beside it has every step."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        track = (TrackerPlan("mlflow", {"uri": uri}), TrackerPlan("tensorboard"))
        plan = plans.train_plan(tmp_path, tokens, world_size=2, steps=6, every=3, track=track)
        assert plans.launch(plan, tmp_path / "scratch") == 0
    log = plans.log_of(tmp_path / "scratch")
    assert log.count(f"mlflow at {uri} has not heard of 9 records") == 1  # 6 steps, 2 saves, the end
    board = EventAccumulator(str(tmp_path / plan.stage_key / "tensorboard"))
    board.Reload()
    losses = [one.value for one in board.Scalars("train/loss")]
    assert losses == pytest.approx(plans.losses(tmp_path, plan), rel=1e-6)
    assert [one.step for one in board.Scalars("checkpoint/seconds")] == [3, 6]
    tracked = [one for one in plans.records(tmp_path, plan) if one["kind"] == "tracked"]
    assert [one["tracker"] for one in tracked] == ["tensorboard"]
    of_other = {one["kind"] for one in plans.records(tmp_path, plan, rank=1)}
    assert "step" in of_other
    assert "tracked" not in of_other
    evaluation = plans.evaluate_plan(plan, track=(TrackerPlan("tensorboard"),))
    assert plans.launch(evaluation, tmp_path / "evaluation") == 0
    board = EventAccumulator(str(tmp_path / evaluation.stage_key / "tensorboard"))
    board.Reload()
    (loss,) = board.Scalars("evaluation/loss")
    (found,) = [one["val_loss"] for one in plans.records(tmp_path, evaluation) if one["kind"] == "evaluate"]
    assert (loss.step, loss.value) == (6, pytest.approx(found, rel=1e-6))
    told = history(FolderStore(tmp_path), plan.stage_key, 3, 4)
    assert [(type(one).__name__, one.step) for one in told] == [("Step", 3), ("Save", 3), ("Step", 4)]


def test_wandbs_own_package_has_every_step_once_also_of_a_resumed_training(tmp_path, tokens):
    """Offline, which is without its server: what `wandb sync` would send."""
    track = (TrackerPlan("wandb", {"mode": "offline", "project": "tiny"}),)
    validate = ValidatePlan(2, 9 * 32, (MetricPlan("loss"),))
    attempts = [
        plans.train_plan(
            tmp_path, tokens, world_size=2, steps=steps, every=2, attempt=attempt, track=track,
            validate=validate, callbacks=(CallbackPlan("kit.heard:Patient", {}),),
        )
        for attempt, steps in ((1, 4), (2, 6))
    ]  # fmt: skip
    files = []
    for plan in attempts:
        assert plans.launch(plan, tmp_path / f"scratch-{plan.attempt}") == 0
        found = set((tmp_path / plan.stage_key / "wandb").glob("offline-run-*/run-*.wandb"))
        files += found - set(files)
    assert len(files) == 2
    rows = [row for file in files for row in wandb_files.rows(file)]
    assert [row["_step"] for row in rows] == list(range(1, 7))
    losses = [loss for plan in attempts for loss in plans.losses(tmp_path, plan)]
    assert [row["train/loss"] for row in rows] == losses
    records = [one for plan in attempts for one in plans.records(tmp_path, plan)]
    validations = {one["step"]: one["metrics"]["loss"] for one in records if one["kind"] == "validation"}
    assert {row["_step"]: row["validation/loss"] for row in rows if "validation/loss" in row} == validations
    (first, config, saved), (second, _, _) = map(wandb_files.told, files)
    assert first.run_id == second.run_id
    assert (first.project, first.display_name) == ("tiny", "run/train")
    assert config["mlpipe"]["plan"]["optimizer"]["lr"] == attempts[0].work.optimizer.lr
    assert saved["checkpoint"] == catalogue.list_checkpoints(FolderStore(tmp_path), plan.stage_key)[-2].key


def test_a_tracker_that_cannot_be_is_bad_input(tmp_path, tokens):
    track = (TrackerPlan("mlflow"),)
    plan = plans.train_plan(tmp_path, tokens, world_size=1, strategy="single", steps=1, track=track)
    assert plans.launch(plan, tmp_path / "scratch") == 2
    ended = plans.outcome(tmp_path, plan)
    assert "nothing says where MLflow is" in f"{ended['message']} {ended['hint']}"
    assert not [one for one in plans.records(tmp_path, plan) if one["kind"] == "step"]
