"""Callbacks: what they hear, and that nothing they do reaches the training."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from kit import plans

from mlpipe._core.errors import TrainError
from mlpipe._core.records import End, Save, Step
from mlpipe.plan.work import CallbackPlan
from mlpipe.train import prepare
from mlpipe.train.callbacks import Callbacks, make_callbacks

pytestmark = pytest.mark.torch


class Hears:
    def __init__(self) -> None:
        self.heard = []

    def on_step(self, record):
        self.heard.append(record.step)

    def on_end(self, record):
        self.heard.append(record.outcome)


class Fails(Hears):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def on_checkpoint(self, record):
        self.heard.append(record.key)
        raise self.error


def step(number: int) -> Step:
    return Step(
        step=number, loss=1.0, grad_norm=1.0, tokens=1, target_tokens=1, seconds=1.0, data_seconds=0.0,
        compute_seconds=1.0, collective_seconds=0.0, memory_bytes=1,
    )  # fmt: skip


SAVE = Save(step=1, key="k", bytes=1, stall_seconds=0.0, save_seconds=0.0, error=None)


@pytest.mark.parametrize("error", [ValueError("own words"), SystemExit(7)])
def test_one_that_raises_is_called_no_more_and_the_others_hear_all(caplog, error):
    beats = []
    bad, good = Fails(error), Hears()
    callbacks = Callbacks([("x:Bad", bad), ("x:Good", good)], lambda *beat: beats.append(beat))
    assert callbacks
    callbacks.on_end(End(outcome="failed", step=0, message="before it started"))
    callbacks.on_start(SAVE)
    callbacks.on_step(step(1))
    callbacks.on_checkpoint(SAVE)
    callbacks.on_step(step(2))
    callbacks.on_end(End(outcome="done", step=2, message=""))
    assert bad.heard == [1, "k"]
    assert good.heard == [1, 2, "done"]
    (said,) = caplog.records
    text = said.getMessage()
    assert "x:Bad failed in on_checkpoint and is called no more" in text
    assert text.splitlines()[2].startswith(f'  File "{__file__}"')  # theirs, not ours, is the first frame
    assert beats[:3] == [
        ("in on_step of the callback x:Bad", 1),
        ("in on_step of the callback x:Good", 1),
        ("in on_checkpoint of the callback x:Bad", 1),
    ]


def test_without_any_there_is_nobody_to_call():
    assert not Callbacks([], lambda *beat: pytest.fail("beat"))


@pytest.mark.parametrize(
    ("entry", "args", "words"),
    [
        ("kit.heard:Deaf", {}, "a Deaf has none of on_start, on_step, on_validation, on_checkpoint, on_end"),
        ("kit.heard:broken", {}, "failed to make the callback: OSError: not today"),
        ("kit.heard:Raises", {"hook": "on_step", "x": 1}, "unexpected keyword argument 'x'"),
        ("kit.heard:Missing", {}, "has no function 'Missing'"),
        ("kit.unheard:X", {}, "cannot be imported"),
    ],
)
def test_one_that_cannot_be_made_is_bad_input_that_names_it(entry, args, words):
    with pytest.raises(TrainError) as caught:
        make_callbacks(
            SimpleNamespace(rank=0), SimpleNamespace(track=(), callbacks=(CallbackPlan(entry, args),))
        )
    assert caught.value.kind == "input"
    assert caught.value.where == entry
    assert words in caught.value.message


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """With callbacks on one and on all of 2 ranks, and without any."""
    folder = tmp_path_factory.mktemp("callbacks")
    tokens = plans.write_tokens(folder / "tokens")
    callbacks = (
        CallbackPlan("kit.heard:Raises", {"hook": "on_checkpoint"}),
        CallbackPlan("kit.heard:Raises", {"hook": "on_step"}, "all"),
        CallbackPlan("kit.heard:Hears", {"folder": str(folder / "first")}),
        CallbackPlan("kit.heard:Hears", {"folder": str(folder / "all")}, "all"),
    )
    with_them = plans.train_plan(folder / "with", tokens, steps=6, every=3, callbacks=callbacks)
    without = plans.train_plan(folder / "without", tokens, steps=6, every=3)
    plans.run_together([with_them, without], folder / "runs")
    return SimpleNamespace(folder=folder, plan=with_them, without=without)


def heard(trained, which: str, rank: int) -> list[list]:
    return [json.loads(line) for line in (trained.folder / which / str(rank)).read_text().splitlines()]


def test_they_hear_what_was_recorded(trained):
    found = heard(trained, "first", 0)
    assert not (trained.folder / "first" / "1").exists()
    assert found[:2] == [["made", "run", 2, 6], ["start", 0, 0]]
    records = plans.records(trained.folder / "with", trained.plan)
    steps = [one for one in records if one["kind"] == "step"]
    assert [one[1:] for one in found if one[0] == "step"] == [
        [one["step"], one["loss"], one["lr"], one["tokens_per_second"]] for one in steps
    ]
    keys = [[one["step"], one["key"]] for one in records if one["kind"] == "checkpoint"]
    assert [one[1:] for one in found if one[0] == "checkpoint"] == keys
    assert [step for step, _ in keys] == [3, 6]
    assert found[-1] == ["end", "done", 6, ""]
    other = heard(trained, "all", 1)  # when a save is seen to be committed differs
    assert sorted(one[:2] for one in other[1:]) == sorted(one[:2] for one in found[1:])


def test_a_training_with_them_is_the_one_without(trained):
    assert plans.losses(trained.folder / "with", trained.plan) == plans.losses(
        trained.folder / "without", trained.without
    )
    log = (trained.folder / "runs" / "output.log").read_text()
    assert log.count("kit.heard:Raises failed in on_checkpoint and is called no more") == 1  # the first rank
    assert log.count("kit.heard:Raises failed in on_step and is called no more") == 2


def test_one_that_hangs_is_named(tmp_path):
    tokens = plans.write_tokens(tmp_path / "tokens")
    plan = plans.train_plan(
        tmp_path / "store", tokens, world_size=1, strategy="single", steps=2,
        callbacks=(CallbackPlan("kit.heard:Sleeps", {}),),
    )  # fmt: skip
    assert plans.launch(plan, tmp_path / "scratch") == 3
    assert (
        "in on_step of the callback kit.heard:Sleeps (step 1)"
        in plans.outcome(tmp_path / "store", plan)["message"]
    )


def test_a_failure_between_the_start_and_the_first_step_is_heard(monkeypatch):
    good = Hears()
    callbacks = Callbacks([("x:Good", good)], lambda *beat: None)

    def fails(session, plan, progress, callbacks):
        callbacks.on_start(SAVE)
        raise TrainError("no worker starts")

    monkeypatch.setattr(prepare, "make_callbacks", lambda session, plan: callbacks)
    monkeypatch.setattr(prepare, "prepare", fails)
    with pytest.raises(TrainError):
        prepare.train(SimpleNamespace(rank=0), None, [0])  # type: ignore[arg-type]
    assert good.heard == ["failed"]
