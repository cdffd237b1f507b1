"""Validation while a model trains: it changes nothing of the training, and its metrics are the same on any
number of ranks; the best checkpoint is kept, and who gives up hope stops."""

from __future__ import annotations

import json
import math
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit import plans

from mlpipe.plan.data import DataPlan
from mlpipe.plan.entry import Entry
from mlpipe.plan.model import ModelPlan
from mlpipe.plan.plan import Plan
from mlpipe.plan.updates import EmaPlan, OptimizerPlan
from mlpipe.plan.validation import BestPlan, MetricPlan, StopPlan, ValidatePlan
from mlpipe.store import catalogue
from mlpipe.store.folder import FolderStore
from mlpipe.train.export import export_checkpoint
from mlpipe.train.loop import Loop
from mlpipe.train.parallel.waits import Waits
from mlpipe.train.reshard import load
from mlpipe.train.shards import LocalShard
from mlpipe.train.validation import Judge, Validation

pytestmark = pytest.mark.torch

STEPS, EVERY, SEQ_LEN = 6, 3, 32
SAMPLES = 9  # of which the second of two ranks has four, and a microbatch of nothing
OWN = tuple(
    MetricPlan(name, f"kit.metrics:{name.title()}")
    for name in ("right", "extremes", "median", "counts", "merging")
)
BUILT_IN = tuple(map(MetricPlan, ("loss", "perplexity", "bits_per_byte", "accuracy")))
DRAWS = MetricPlan("draws", "kit.metrics:Draws")


def validate(*metrics: MetricPlan, **changes: Any) -> ValidatePlan:
    return ValidatePlan(EVERY, SAMPLES * SEQ_LEN, metrics)._replace(**changes)


def plan_of(folder: Path, run_id: str, strategy: Any, world_size: int, entry: Entry, **changes: Any) -> Plan:
    given = {
        "model": ModelPlan(entry, None, SEQ_LEN, ()),
        "micro_batch": 4,
        "accumulation": 16 // (4 * world_size),
        "steps": STEPS,
        **changes,
    }
    return plans.train_plan(
        folder / "store",
        folder / "tokens",
        strategy=strategy,
        world_size=world_size,
        every=100,
        run_id=run_id,
        **given,
    )


TEXT = Entry("kit.models:initialized", {"dim": 16, "dropout": 0.0})
DROPOUT = Entry("kit.models:plain", {"dim": 16, "dropout": 0.3})
NORMED = Entry("kit.own:normed", {})
POINTS = DataPlan(None, Entry("kit.own:points", {}), None)
OFF_AND_ON = {"dropout": (DROPOUT, {}), "batch norm": (NORMED, {"data": POINTS})}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By run: its plan, and rank 0's records."""
    folder = tmp_path_factory.mktemp("validated")
    plans.write_tokens(folder / "tokens", num_tokens=4000)
    pairs = [
        plan_of(folder, f"{strategy} {name} {onoff}", strategy, 2, entry, **changes, validate=asked)
        for strategy in ("ddp", "fsdp", "zero2")
        for name, (entry, changes) in OFF_AND_ON.items()
        for onoff, asked in (
            ("off", None),
            ("on", validate(MetricPlan("loss"), *([DRAWS] if name == "dropout" else [DISTANCE]))),
        )
    ]
    same = [
        plan_of(folder, strategy, strategy, world_size, TEXT, validate=validate(*BUILT_IN, *OWN))
        for strategy, world_size in (("single", 1), ("ddp", 2), ("fsdp", 2))
    ]
    plans.run_together([*pairs, *same[1:]], folder / "two", worker="kit.counted")
    averaged = [plan for name in AVERAGED for plan in averaging(folder, name)]
    plans.run_together([same[0], *averaged], folder / "one")
    return {
        plan.run_id: (plan, plans.records(folder / "store", plan))
        for plan in (*pairs, *same, *averaged)
        if plan.stage == "train"
    } | {"folder": folder}


AVERAGED = {
    "ema": {"ema": EmaPlan(0.9)},
    "schedule-free": {
        "optimizer": OptimizerPlan(
            "schedule_free_adamw", None, {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0},
            12, 0.05, 1.0, "constant", 0, 0, 0.0,
        )
    },
}  # fmt: skip


def averaging(folder: Path, name: str) -> list[Plan]:
    """A training whose best validation is its first, and two evaluations of that: of what a checkpoint has as
    the model, and, of the training with an `ema`, of the average."""
    asked = validate(MetricPlan("loss"), every_steps=2, best=BestPlan("loss", "max"))
    plan = plan_of(folder, name, "single", 1, TEXT, validate=asked, **AVERAGED[name])
    given: Any = {"checkpoint": "best", "max_tokens": SAMPLES * SEQ_LEN}
    last, average = (plans.evaluate_plan(plan, **given, weights=weights) for weights in (None, "ema"))
    return [plan, last, *([replace(average, stage="average")] if name == "ema" else [])]


DISTANCE = MetricPlan("distance", "kit.metrics:Distance")


def of_kind(records: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [record for record in records if record["kind"] == kind]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero2"])
@pytest.mark.parametrize("name", OFF_AND_ON)
def test_the_training_is_the_same_bit_for_bit_with_and_without_it(trained, strategy, name):
    """Under dropout, with batch norm's running statistics, and with metrics that draw at random."""
    (_, off), (_, on) = (trained[f"{strategy} {name} {onoff}"] for onoff in ("off", "on"))
    steps = [[(one["loss"], one["grad_norm"]) for one in of_kind(run, "step")] for run in (off, on)]
    assert steps[0] == steps[1]
    assert len(steps[0]) == STEPS
    assert [one["step"] for one in of_kind(on, "validation")] == [3, 6]
    assert not of_kind(off, "validation")


@pytest.mark.parametrize(("strategy", "gathers"), [("fsdp", 2 * 3), ("zero2", 3)])
def test_it_gathers_weights_for_its_own_passes_and_leaves_none_to_the_next_step(trained, strategy, gathers):
    """Two blocks and what is around them, in each of two passes or, where they stay, in the first."""
    counts = [
        json.loads((trained["folder"] / "two" / f"counts-{strategy} dropout {onoff}.json").read_text())["end"]
        for onoff in ("off", "on")
    ]
    found = [sum(one.get(name, 0) for name in ("_allgather_base_", "allgather_")) for one in counts]
    exchange = 2  # of the metrics' states: their sizes, and they
    assert found[1] - found[0] == 2 * (gathers + exchange)
    assert counts[1]["_reduce_scatter_base_"] == counts[0]["_reduce_scatter_base_"]


@pytest.mark.combines("dp_replicate", "validate")
@pytest.mark.combines("dp_shard", "validate")
def test_metrics_are_equal_on_one_rank_and_on_two(trained):
    alone = of_kind(trained["single"][1], "validation")
    names = set(alone[0]["metrics"])
    assert names >= {"loss", "perplexity", "bits_per_byte", "accuracy", "right", "extremes.highest", "median"}
    for strategy in ("ddp", "fsdp"):
        for one, two in zip(alone, of_kind(trained[strategy][1], "validation"), strict=True):
            assert two["metrics"] == pytest.approx(one["metrics"], rel=1e-6)
            assert two["num_samples"] == one["num_samples"] == SAMPLES
    last = alone[-1]["metrics"]
    assert last["accuracy"] == last["merging"] == pytest.approx(last["right"])
    assert last["counts.batches"] == SAMPLES
    assert last["perplexity"] == pytest.approx(math.exp(last["loss"]))
    assert last["bits_per_byte"] == pytest.approx(last["loss"] / math.log(2))  # a byte a token here


def test_its_time_is_its_own(trained):
    plan, records = trained["ddp"]
    for one in of_kind(records, "validation"):
        assert one["seconds"] > 0
        assert one["best"] is None
    (peer,) = {record["metrics"] for record in of_kind(plans.records(plan.store_url, plan, 1), "validation")}
    assert peer is None


@pytest.mark.parametrize("name", AVERAGED)
def test_the_average_is_what_is_validated_and_kept_as_the_best_and_exported(trained, tmp_path, name):
    """And nothing but a checkpoint's own copy of the weights, where it has one, is what was trained."""
    (plan, records), store = trained[name], FolderStore(trained["folder"] / "store")
    validations = of_kind(records, "validation")
    values = {one["step"]: one["metrics"]["loss"] for one in validations}
    best = catalogue.best(store, plan.stage_key)
    assert best is not None
    assert best.step == max(values, key=lambda step: values[step])
    measured = {
        one.stage: of_kind(plans.records(store.root, one), "evaluate")[0]["val_loss"]
        for one in averaging(trained["folder"], name)[1:]
    }
    stage = "average" if name == "ema" else "evaluate"
    assert measured.pop(stage) == pytest.approx(values[best.step], rel=1e-6)
    assert all(abs(value - values[best.step]) > 1e-5 for value in measured.values())
    exported = export_checkpoint(store, best.key, tmp_path / "out", ema=name == "ema")
    tensors = load_manifest_tensors(store, best.key)
    expected = {
        key.removeprefix("model."): tensors.get(f"optim.{key}.ema", value)
        for key, value in tensors.items()
        if key.startswith("model.")
    }
    found = safetensors_of(exported.folder / "model.safetensors")
    assert expected
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def load_manifest_tensors(store: FolderStore, key: str) -> dict[str, torch.Tensor]:
    manifest = catalogue.load_manifest(store, key)
    whole = [
        LocalShard(name, torch.empty(one["shape"]), tuple(one["shape"]), (0,) * len(one["shape"]))
        for name, one in manifest["tensors"].items()
        if one["dtype"] == "float32"
    ]
    load(store, key, manifest, whole)
    return {one.name: one.local for one in whole}


def safetensors_of(path: Path) -> dict[str, torch.Tensor]:
    data = bytearray(path.read_bytes())
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    return {
        name: torch.frombuffer(data[end + first : end + last], dtype=torch.float32).view(one["shape"])
        for name, one in header.items()
        if one.get("dtype") == "F32"
        for first, last in (one["data_offsets"],)
    }


# The judge


def test_the_best_is_better_than_all_before_and_hope_ends_after_patience():
    judge = Judge(BestPlan("accuracy", "max"), StopPlan(patience=2, min_delta=0.1))
    found = [
        (judge.judge(step, value), judge.why_stop is None) for step, value in enumerate((0.5, 0.55, 0.65))
    ]
    assert found == [(True, True), (True, True), (True, True)]  # 0.65 beats 0.5 by more than 0.1
    assert not judge.judge(3, math.nan)
    again = Judge(BestPlan("accuracy", "max"), StopPlan(patience=2, min_delta=0.1))
    again.load(json.loads(json.dumps(judge.state())))
    assert again.why_stop is None
    assert again.judge(4, 0.7)  # the best, but no reason to hope
    assert again.why_stop == "accuracy: the last 2 validations were no better than 0.65 by more than 0.1"
    other = Judge(BestPlan("loss", "min"), None)
    other.load(again.state())
    assert other.value is None


def test_of_a_best_one_that_could_not_be_saved_nothing_is_left():
    judge = Judge(BestPlan("loss", "min"), None)
    judge.judge(1, 3.0)
    judge.judge(2, 2.0)
    judge.forget(1)
    assert judge.value == 2.0
    judge.forget(2)
    assert judge.judge(3, 2.5)


@pytest.mark.parametrize(
    ("left", "expected"),
    [(None, (None, None)), (20, (2.0, 20)), (10, (3.0, 10)), (15, (None, None))],
)
def test_a_best_one_that_is_gone_need_not_be_beaten(monkeypatch, left, expected):
    """Where an older one is left, that has to be; of 15 nobody knows how good it is."""
    judge = Judge(BestPlan("loss", "min"), StopPlan(2, 0.0))
    for step, value in ((10, 3.0), (20, 2.0), (30, 2.5)):
        judge.judge(step, value)
        if step == left:
            marked = {"judge": judge.state()}
    found = None if left is None else SimpleNamespace(key="k", step=left)
    monkeypatch.setattr(catalogue, "best", lambda store, stage_key: found)
    monkeypatch.setattr(catalogue, "read_best", lambda store, key: {} if left == 15 else marked)
    one = object.__new__(Validation)
    one.session = SimpleNamespace(
        world=SimpleNamespace(rank=0), store=None, plan=SimpleNamespace(stage_key="s")
    )
    one.judge = Judge(BestPlan("loss", "min"), StopPlan(2, 0.0))
    one.load({"validation": {"step": 30, "metrics": {"loss": 2.5}, "judge": judge.state()}})
    assert (one.judge.value, one.judge.step) == expected
    assert one.judge.num_without == 1  # patience goes on
    assert one.judge.judge(40, 2.6) == (expected != (2.0, 20))
    assert one.judge.why_stop is not None


@pytest.mark.parametrize(
    ("steps", "patience", "left", "again"),
    [(30, 9, None, True), (30, 9, 20, False), (40, 9, None, False), (40, 1, None, True)],
)
def test_at_the_end_without_a_best_one_it_is_measured_again(monkeypatch, steps, patience, left, again):
    """At step 30: the last one, or that after which hope ended. Rank 0 says so to all."""
    judge = Judge(BestPlan("loss", "min"), StopPlan(patience, 0.0))
    for step, value in ((20, 2.0), (30, 2.5)):
        judge.judge(step, value)
    found = None if left is None else SimpleNamespace(key="k", step=left)
    monkeypatch.setattr(catalogue, "best", lambda store, stage_key: found)
    told: list[Any] = []
    for rank in (0, 1):
        broadcast = told.append if rank == 0 else lambda mine: mine.copy_(told[0])
        monkeypatch.setattr("torch.distributed.broadcast", lambda mine, src, send=broadcast: send(mine))
        one = object.__new__(Validation)
        one.session = SimpleNamespace(
            world=SimpleNamespace(rank=rank), store=None, plan=SimpleNamespace(stage_key="s")
        )
        one.plan = SimpleNamespace(steps=steps)
        one.validate = SimpleNamespace(every_steps=10)
        one.judge = Judge(BestPlan("loss", "min"), StopPlan(patience, 0.0))
        one.load({"step": 30, "validation": {"step": 30, "metrics": {}, "judge": judge.state()}})
        assert one.is_due(30) == again


def test_waiting_while_the_averages_go_back_is_no_part_of_the_next_step(monkeypatch):
    waits = Waits()

    @contextmanager
    def swapped_in(averages, model):
        assert averages == ["average"]
        yield
        waits.timed(sum)(range(1000))

    monkeypatch.setattr("mlpipe.train.optim.averages.swapped_in", swapped_in)
    loop = SimpleNamespace(
        validation=SimpleNamespace(run=lambda schedule, step: SimpleNamespace(best=True)),
        checkpointer=SimpleNamespace(wait_for_staging=lambda: 0.0),
        update=SimpleNamespace(averages=lambda: ["average"]),
        model=SimpleNamespace(waits=waits),
        recording=SimpleNamespace(validating=lambda: None, validated=lambda record: None),
        schedule=None,
        position=SimpleNamespace(step=3),
    )
    assert Loop.validate(loop)  # type: ignore[arg-type]
    assert waits.take() == (0.0, 0.0)


def test_a_save_of_the_best_is_marked_when_it_is_committed_or_not_at_all(tmp_path: Path):
    """The mark without the manifest is no checkpoint, and is swept."""
    store = FolderStore(tmp_path)
    key = catalogue.new_prefix("s", 5, 1)
    catalogue.mark_best(store, key, {"judge": {"metric": "loss"}})
    assert catalogue.best(store, "s") is None
    assert catalogue.list_checkpoints(store, "s") == []
