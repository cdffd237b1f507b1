"""What a resume may change of a run, what it does again because of it, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from mlpipe._core.errors import SpecError, SubmitError
from mlpipe.plan.training import meaning_of
from mlpipe.spec.load import load_pipeline_text
from mlpipe.store import catalogue, leases, outputs, runs
from mlpipe.store.base import Store
from mlpipe.store.folder import FolderStore
from mlpipe.submit import driver, seal
from mlpipe.submit.changes import Changes, Prepared, apply, prepare
from mlpipe.submit.driver import DriveOptions, drive
from mlpipe.submit.executor import StopRequest

pytestmark = pytest.mark.unit

STAGES = ["corpus", "train", "evaluate", "card", "promote"]
TRAIN = "runs/r/stages/train"
SPEC = json.dumps(
    {
        "version": 1,
        "name": "r",
        "stages": [
            {"name": "corpus", "command": ["true"]},
            {
                "name": "train",
                "needs": ["corpus"],
                "train": {
                    "model": {"preset": "llama-1m", "seq_len": 32, "num_heads": 4, "num_kv_heads": 2},
                    "data": {"entry": "my.data:make", "args": {"num": 8, "at": "{{store}}"}, "batch_size": 8},
                    "steps": 40,
                },
            },
            {"name": "evaluate", "needs": ["train"], "evaluate": {"gate": "val_loss < 3"}},
            {"name": "card", "needs": ["train"], "command": ["true"]},
            {"name": "promote", "needs": ["evaluate"], "promote": {"as": "m"}},
        ],
    }
)


def save(store: Store, step: int, scalars: dict[str, Any], stage_key: str = TRAIN) -> None:
    prefix = catalogue.new_prefix(stage_key, step, 1)
    blob = catalogue.write_blob(store, f"{prefix}/model-0", [b"four"])
    chunk = {"offset": [0], "shape": [4], "blob": 0, "byte_offset": 0}
    manifest = {"format": 1, "step": step, "attempt": 1, "uuid": prefix[-8:], "time": 1.0, "code": {}}
    tensors = {"model.w": {"dtype": "uint8", "shape": [4], "chunks": [chunk]}}
    assert catalogue.commit(
        store, prefix, {**manifest, "scalars": scalars, "tensors": tensors, "blobs": [blob]}
    )


@pytest.fixture
def store(tmp_path) -> Store:
    """With the run `r`, which is done: checkpoints of steps 30 and 40, outputs of its commands."""
    store = FolderStore(tmp_path)
    pipeline = load_pipeline_text(SPEC, "spec")
    runs.create_run(store, "r", SPEC, pipeline.digest, STAGES, "local", {"set": []})
    for step in (30, 40):
        save(store, step, {"meaning": meaning_of(pipeline, "train", {})})
    (tmp_path / "made").mkdir()
    for name in ("corpus", "card"):
        outputs.commit_output(store, f"runs/r/stages/{name}", tmp_path / "made")
    end(store, "done", dict.fromkeys(STAGES, "done"))
    return store


def end(store: Store, state: Any, stages: dict[str, Any], run_id: str = "r") -> None:
    def change(run: runs.RunState) -> runs.RunState:
        states = {name: replace(run.stages[name], state=stages[name], attempt=1) for name in STAGES}
        return replace(run, state=state, stages=states)

    runs.update_run(store, run_id, change)


def asked(store: Store, *overrides: str, only: str | None = None, **more: Any) -> Prepared:
    run = runs.read_run(store, "r")
    return prepare(store, run, seal.read(store, run), Changes(overrides, **more), only)


AFTER = {"train", "evaluate", "card", "promote"}


@pytest.mark.parametrize(
    ("overrides", "again"),
    [
        (["train.steps=60"], AFTER),
        (["evaluate.gate=val_loss < 4"], {"evaluate", "promote"}),
        (["promote.alias=best"], {"promote"}),
    ],
)
def test_what_a_change_concerns_is_done_again(store, overrides, again):
    assert asked(store, *overrides).again == again


def test_the_rest_stays_and_what_is_done_again_waits(store):
    run = apply(store, "r", asked(store, "train.steps=60"))
    assert {name for name, stage in run.stages.items() if stage.state == "pending"} == AFTER
    assert (run.state, run.meta["set"], run.stages["train"].attempt) == ("running", ["train.steps=60"], 1)
    assert outputs.load_output(store, "runs/r/stages/corpus")
    assert not store.exists("runs/r/stages/card/outputs/MANIFEST.json")  # else it would count as made


@pytest.mark.parametrize(
    "override",
    ["train.steps=40", "train.strategy=ddp", "train.optimizer.lr=1e-5", "name=other"],
)
def test_what_changes_nothing_of_a_done_run_is_refused(store, override):
    with pytest.raises(SubmitError, match="is done, and what is asked for changes nothing") as caught:
        asked(store, override)
    assert caught.value.kind == "input"


@pytest.mark.parametrize("state", ["done", "cancelled"])
def test_fewer_steps_than_are_done_are_refused(store, state):
    """A training that was stopped ended at once, as done, with another number of steps than was asked for."""
    runs.reopen(store, "r", (), again={"train"})
    end(store, state, {**dict.fromkeys(STAGES, "done"), "train": state})
    with pytest.raises(SubmitError, match="'train' has done 40 steps already, 39 are asked for") as caught:
        asked(store, "train.steps=39")
    assert caught.value.kind == "input"
    assert "train.steps=40 ends it there" in str(caught.value.hint)
    assert asked(store, "train.steps=39", from_step=30).behind[0].step == 40
    if state == "cancelled":
        assert asked(store, "train.steps=40").pipeline.stage("train").train.steps == 40
        # as an mlpipe left it that took such an end for done: what else is asked for is no reason to refuse
        runs.update_run(store, "r", lambda run: replace(run, meta={**run.meta, "set": ["train.steps=39"]}))
        assert asked(store, "evaluate.gate=val_loss < 4").pipeline.stage("train").train.steps == 39


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("corpus.command=[false]", "stage 'corpus' is done, and others may have read what it made"),
        ("promote.name=other", "the stages of a run keep their names"),
        ("store=/elsewhere", "a run stays in its store"),
    ],
)
def test_what_cannot_be_taken_up_is_refused(store, override, says):
    with pytest.raises(SubmitError, match=says):
        asked(store, override)


def test_nonsense_is_refused_of_a_done_run_as_of_any(store):
    with pytest.raises(SpecError, match="no stage 'nonsense'"):
        asked(store, "nonsense.key=3")


@pytest.mark.parametrize(
    ("override", "key", "change"),
    [
        ("train.seed=3", "train.seed", "0 there, 3 now"),
        ("train.model.seq_len=16", "train.model.seq_len", "32 there, 16 now"),
        ("train.model.rope_theta=1e6", "train.model.rope_theta", "10000.0 there, 1000000.0 now"),
        ("train.data.args.num=9", "train.data.args.num", "8 there, 9 now"),
        ("train.data.args={num: 8}", "train.data.args.at", '"{{store}}" there, not set now'),
        ("stages.train.train.data.entry=my.data:other", "train.data.entry", '"my.data:make" there'),
    ],
)
def test_another_training_is_refused_unless_it_is_allowed_by_name(store, override, key, change):
    with pytest.raises(SubmitError) as caught:
        asked(store, override, "train.steps=60")
    assert caught.value.kind == "input"
    assert f"step 40 is of another training:\n  {key}: {change}" in caught.value.message
    assert f"(--set {override})" in caught.value.message
    assert f"--allow-change {key}" in caught.value.hint
    run = apply(store, "r", asked(store, override, "train.steps=60", allow=(f"stages.train.{key}",)))
    assert (
        prepare(store, run, seal.read(store, run), Changes()).allowed == run.meta["allowed"]
    )  # before the next checkpoint, too
    assert run.meta["allowed"].keys() == {key}


def test_another_base_beside_adapters_is_another_training(tmp_path):
    spec = json.loads(SPEC)
    spec["stages"][1]["train"] |= {
        "init_from": {"path": "w"},
        "adapter": {"lora": {"rank": 4}, "base": "nf4"},
    }
    store, text = FolderStore(tmp_path), json.dumps(spec)
    pipeline = load_pipeline_text(text, "spec")
    runs.create_run(store, "r", text, pipeline.digest, STAGES, "local", {"set": []})
    save(store, 30, {"meaning": meaning_of(pipeline, "train", {})})
    end(store, "cancelled", {**dict.fromkeys(STAGES, "pending"), "train": "cancelled"})
    for value, now in (("int8", '"int8" now'), ("null", "not set now")):
        other = f"train.adapter.base={value}"
        with pytest.raises(SubmitError, match=f'train.adapter.base: "nf4" there, {now}') as caught:
            asked(store, other)
        assert "--allow-change train.adapter.base" in (caught.value.hint or "")
        assert asked(store, other, allow=("train.adapter.base",)).allowed.keys() == {"train.adapter.base"}


def test_several_are_named_together_and_an_unknown_one_is_refused(store):
    with pytest.raises(SubmitError) as caught:
        asked(store, "train.model.num_heads=2", "train.model.num_kv_heads=1", "train.steps=60")
    assert "train.model.num_heads: 4 there, 2 now" in caught.value.message
    assert "train.model.num_kv_heads: 2 there, 1 now" in caught.value.message
    with pytest.raises(SubmitError, match=r"--allow-change train\.sede: no such setting"):
        asked(store, "train.steps=60", allow=("train.sede",))


def test_an_older_manifest_is_compared_as_far_as_it_goes(store):
    model = {"preset": "llama-1m", "entry": "x:y", "args": {"num_heads": 4}}
    save(store, 50, {"seed": 0, "seq_len": 32, "data_digest": None, "model": model})
    assert asked(store, "train.steps=60", "train.model.rope_theta=1e6").again == AFTER
    with pytest.raises(SubmitError, match=r"train\.model\.num_heads: 4 there, 8 now"):
        asked(store, "train.steps=60", "train.model.num_heads=8")


def test_from_step_gives_up_what_comes_after_it(store):
    with pytest.raises(SubmitError, match="no checkpoint of step 35") as caught:
        asked(store, from_step=35)
    assert caught.value.hint == "it has 30, 40; 0 begins anew"
    prepared = asked(store, from_step=30)
    assert prepared.again == AFTER
    apply(store, "r", prepared)
    assert [found.step for found in catalogue.list_checkpoints(store, TRAIN)] == [30]
    begun_anew = asked(store, "train.seed=3", from_step=0)  # nothing is left to compare with
    apply(store, "r", begun_anew)
    assert catalogue.latest(store, TRAIN) is None
    with pytest.raises(SubmitError, match="--from-step is of one training stage"):
        asked(store, from_step=30, only="evaluate")


@pytest.mark.parametrize(("from_step", "words"), [(30, "no checkpoint of step 30"), (0, None)])
def test_a_checkpoint_that_is_pruned_before_the_run_is_ours_is_not_gone_back_to(
    store, monkeypatch, from_step, words
):
    """The later ones were given up for it, and the training began anew. Nor is it given up itself."""
    take, first = leases.take_lease, catalogue.list_checkpoints(store, TRAIN)[0]

    def pruned(*args: Any, **more: Any) -> runs.RunState:
        catalogue.discard(store, first.key)
        return take(*args, **more)

    monkeypatch.setattr(leases, "take_lease", pruned)
    options = DriveOptions(changes=Changes(from_step=from_step))
    if words is None:
        applied = []
        monkeypatch.setattr(
            driver, "apply", lambda store, run_id, prepared: applied.append(prepared) or 1 / 0
        )
        with pytest.raises(ZeroDivisionError):
            drive(store, "r", options, stop=StopRequest())
        assert [found.step for found in applied[0].behind] == [40]
        return
    with pytest.raises(SubmitError, match=words):
        drive(store, "r", options, stop=StopRequest())
    assert [found.step for found in catalogue.list_checkpoints(store, TRAIN)] == [40]


def test_a_training_whose_last_checkpoint_was_discarded_is_done_again_from_the_one_before(store):
    catalogue.discard(store, catalogue.latest(store, TRAIN).key)
    assert asked(store).again == AFTER
    assert asked(store, only="evaluate").again == set()


def test_a_training_that_gave_up_hope_stays_ended_unless_it_may_go_on_for_longer(store):
    """Also where what came after it is done again."""
    spec = json.loads(SPEC)
    spec["name"] = "early"
    spec["stages"][1]["train"] |= {
        "data": {"tokens": "nowhere", "batch_size": 8},
        "validate": {"every": "10 steps", "best": {"metric": "loss"}, "stop": {"patience": 2}},
        "steps": 80,
    }
    pipeline = load_pipeline_text(json.dumps(spec), "spec")
    runs.create_run(store, "e", json.dumps(spec), pipeline.digest, STAGES, "local", {"set": []})
    judge = {"metric": "loss", "mode": "min", "value": 2.0, "step": 20, "reference": 2.0}
    for step, without in ((30, 1), (40, 2)):
        scalars = {"steps": 80, "validation": {"judge": {**judge, "num_without": without}}}
        save(store, step, scalars | {"meaning": meaning_of(pipeline, "train", {})}, "runs/e/stages/train")
    end(store, "done", dict.fromkeys(STAGES, "done"), "e")

    def again(*overrides: str, **more: Any) -> frozenset[str]:
        run = runs.read_run(store, "e")
        return prepare(store, run, seal.read(store, run), Changes(overrides, **more)).again

    assert again() == frozenset()
    assert again("promote.alias=best") == {"promote"}
    assert again("train.validate.stop.patience=3") == again("train.steps=90") == again(from_step=40) == AFTER
    catalogue.discard(store, catalogue.latest(store, "runs/e/stages/train").key)
    assert again() == AFTER


def test_what_is_mixed_how_a_stream_is_cut_and_who_makes_batches_is_what_a_training_is_about():
    def about(data: dict[str, Any]) -> dict[str, Any]:
        spec = json.loads(SPEC)
        spec["stages"][1]["train"]["data"] = {"batch_size": 8, **data}
        return {
            key: value
            for key, value in meaning_of(load_pipeline_text(json.dumps(spec), "x"), "train", {}).items()
            if key.startswith("data.")
        }

    own = {"entry": "my.data:make", "args": {"num": 8}}
    assert about(own) == about({**own, "workers": 3}) == {"data.entry": "my.data:make", "data.args.num": 8}
    assert about({**own, "splits": 4, "collate": "my.data:pad"}) == {
        **about(own),
        "data.splits": 4,
        "data.collate": "my.data:pad",
    }
    assert about({"mix": [{"tokens": "nowhere", "weight": 3}, own]}) == {
        "data.mix.0.weight": 3.0,
        "data.mix.0.tokens": None,
        "data.mix.1.weight": 1.0,
        "data.mix.1.entry": "my.data:make",
        "data.mix.1.args.num": 8,
    }
