"""Switch at any time: the same strategy and world size resumes bit for bit, any other within rounding."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from kit import plans, processes
from kit.command_runs import until

from mlpipe.plan.entry import Entry
from mlpipe.plan.model import ModelPlan
from mlpipe.plan.plan import Plan
from mlpipe.store import catalogue
from mlpipe.store.folder import FolderStore

pytestmark = [pytest.mark.torch, pytest.mark.timeout(1200)]

HALF, STEPS = 3, 6
WORLDS = {
    1: ("single", "ddp", "fsdp"),
    2: ("ddp", "zero1", "zero2", "fsdp"),
    4: ("fsdp", "hsdp"),
}
SOURCES = (("fsdp", 4), ("hsdp", 4), ("ddp", 2), ("zero1", 2))
TARGETS = [(strategy, world) for world, strategies in WORLDS.items() for strategy in strategies]
# each goes on from another; of all pairs of meshes: test_reshard_meshes.py
CHANGES = list(zip(itertools.cycle(SOURCES), TARGETS, strict=False))


def user(entry: str, **args: object) -> ModelPlan:
    return ModelPlan(Entry(f"kit.models:{entry}", dict(args)), None, 32, ())


def second(plan: Plan, *, steps: int = STEPS, **changes: object) -> Plan:
    """The next attempt of the same stage, which resumes."""
    train = plan.work._replace(resume=True, steps=steps, **changes)
    return replace(plan, attempt=plan.attempt + 1, work=train)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With the runs of STEPS steps: `whole` in one go; `parts` in two attempts. Of `plain` (dropout, a
    buffer) for exact resumes, of `odd` for resharding: the first half under every source."""
    folder = tmp_path_factory.mktemp("resume")
    tokens = plans.write_tokens(folder / "tokens")
    for world, strategies in WORLDS.items():
        made = []
        for strategy in strategies:
            plain = plans.train_plan(
                folder / "whole",
                tokens,
                strategy=strategy,
                world_size=world,
                steps=STEPS,
                every=HALF,
                run_id=f"{strategy}-{world}",
                model=user("plain"),
            )
            # every step is saved in the background here, which must change nothing
            often = plain.work.checkpoint._replace(every_steps=1)
            first = replace(
                plain,
                store_url=str(folder / "parts"),
                work=plain.work._replace(steps=HALF, checkpoint=often),
            )
            made += [plain, first, second(first)]
            if (strategy, world) in (*SOURCES, ("single", 1)):
                odd = replace(
                    plain, store_url=str(folder / "odd"), work=plain.work._replace(model=user("odd"))
                )
                made.append(odd)
        plans.run_together(made, folder / f"world-{world}")
    return folder


@pytest.mark.combines("dp_replicate", "deterministic")
@pytest.mark.combines("dp_shard", "deterministic")
@pytest.mark.parametrize(("strategy", "world"), TARGETS)
def test_same_strategy_and_world_size_resume_bit_for_bit(folder, strategy, world):
    plan = plans.train_plan(folder, folder / "tokens", run_id=f"{strategy}-{world}")
    whole = processes.digests(FolderStore(folder / "whole"), plan)
    parts = processes.digests(FolderStore(folder / "parts"), plan)
    assert parts[STEPS, 2] == whole[STEPS, 1]
    assert whole[HALF, 1] != whole[STEPS, 1]
    again = plans.losses(folder / "parts", replace(plan, attempt=2))
    assert again == plans.losses(folder / "whole", plan)[HALF:]


@pytest.fixture(scope="module")
def resharded(folder):
    """Checkpoints of the first half, resumed under every strategy and world size: a store for each, since a
    checkpoint belongs to its run."""
    for world in WORLDS:
        made = []
        for (source, source_world), (strategy, target_world) in CHANGES:
            if target_world != world:
                continue
            run_id = f"{source}-{source_world}"
            store = folder / f"{run_id}-to-{strategy}-{world}"
            stage = Path("runs", run_id, "stages", "train", "checkpoints")
            shutil.copytree(folder / "odd" / stage / f"step-{HALF:09d}", store / stage / f"step-{HALF:09d}")
            made.append(
                plans.train_plan(
                    store,
                    folder / "tokens",
                    strategy=strategy,
                    world_size=world,
                    steps=STEPS,
                    every=STEPS,
                    run_id=run_id,
                    attempt=2,
                    model=user("odd"),
                )
            )
        plans.run_together(made, folder / f"resharded-{world}", resave=True)
    return folder


@pytest.mark.combines("dp_replicate", "resume under another mesh")
@pytest.mark.combines("dp_shard", "resume under another mesh")
@pytest.mark.parametrize(("source", "target"), CHANGES, ids=lambda one: f"{one[0]}-{one[1]}")
def test_any_strategy_and_world_size_resumes_under_any_other(resharded, source, target):
    strategy, world = target
    run_id = f"{source[0]}-{source[1]}"
    store = resharded / f"{run_id}-to-{strategy}-{world}"
    plan = plans.train_plan(store, resharded / "tokens", run_id=run_id, attempt=2)
    expected = plans.losses(resharded / "odd", replace(plan, run_id="single-1", attempt=1))[HALF:]
    found = plans.losses(store, plan)
    assert len(found) == STEPS - HALF
    for a, b in zip(found, expected, strict=True):
        assert abs(a - b) <= 1e-5 * b
    digests = processes.digests(FolderStore(store), plan)
    assert digests[HALF, 2] == digests[HALF, 1]  # what was loaded, saved again at once


def test_another_batch_size_goes_on_at_the_same_sample(folder, tmp_path):
    shutil.copytree(folder / "parts" / "runs" / "single-1", tmp_path / "store" / "runs" / "single-1")
    plan = plans.train_plan(
        tmp_path / "store",
        folder / "tokens",
        strategy="single",
        world_size=1,
        steps=STEPS + 2,
        run_id="single-1",
        attempt=3,
        model=user("plain"),
        global_batch=4,
        micro_batch=4,
    )
    plans.run_together([plan], tmp_path / "run")
    store = FolderStore(tmp_path / "store")
    last = catalogue.latest(store, plan.stage_key)
    scalars = catalogue.load_manifest(store, last.key)["scalars"]
    assert (scalars["step"], scalars["samples"]) == (STEPS + 2, STEPS * 16 + 2 * 4)


def test_ranks_that_have_nothing_to_do_wait_for_each_other(folder, tmp_path):
    """Rank 0 has the store of the group, which the others still look for when it could have ended."""
    shutil.copytree(folder / "parts" / "runs" / "fsdp-2", tmp_path / "store" / "runs" / "fsdp-2")
    scratch = tmp_path / "run"
    plan = plans.train_plan(
        tmp_path / "store",
        folder / "tokens",
        strategy="fsdp",
        steps=HALF,
        run_id="fsdp-2",
        attempt=3,
        model=user("late", rank=1, until_file=str(scratch / "outcome-0.json"), seconds=10.0),
        hang_timeout_seconds=60.0,
        deterministic=False,
    )
    assert plans.launch(plan, scratch) == 0, plans.log_of(scratch)
    assert plans.losses(tmp_path / "store", plan) == []


@pytest.mark.combines("dp_replicate", "kill of a worker")
def test_n_steps_equal_half_then_kill_9_then_the_rest(folder, tmp_path):
    """With the real launcher. The kill strikes while the second half is under way."""
    world = 2
    slow = tmp_path / "slow"
    slow.touch()
    plan = plans.train_plan(
        tmp_path / "store",
        folder / "tokens",
        strategy="ddp",
        world_size=world,
        steps=STEPS,
        every=HALF,
        run_id=f"ddp-{world}",
        model=user("slow", seconds=2.0, while_file=str(slow)),
    )
    store = FolderStore(tmp_path / "store")
    process = plans.start(plan, tmp_path / "first")
    try:
        until(
            lambda: catalogue.latest(store, plan.stage_key) or process.poll() is not None,
            "the checkpoint at half",
        )
        assert process.poll() is None, plans.log_of(tmp_path / "first")
    finally:
        everything = processes.tree(process.pid)
        processes.kill(everything)
        process.wait(300)
    until(lambda: processes.gone(everything), "the workers' end")
    assert len(everything) == 4 + world  # launcher, torchrun, its fork server and that one's bookkeeper
    assert processes.steps_of_sound(store, plan) == [HALF]
    slow.unlink()
    assert plans.launch(second(plan), tmp_path / "second") == 0, plans.log_of(tmp_path / "second")
    whole = processes.digests(FolderStore(folder / "whole"), plan)
    found = processes.digests(store, plan)
    assert found[STEPS, 2] == whole[STEPS, 1]
    assert found[HALF, 1] == whole[HALF, 1]


def test_a_damaged_newest_checkpoint_is_passed_over_by_all_ranks(folder, tmp_path):
    """Only rank 1 reads what is damaged. The run goes on from the checkpoint before, and says so; with one
    checkpoint to keep, the damaged one does not push out those that the run makes."""
    shutil.copytree(folder / "parts" / "runs" / "fsdp-2", tmp_path / "store" / "runs" / "fsdp-2")
    store = FolderStore(tmp_path / "store")
    plan = plans.train_plan(
        tmp_path / "store",
        folder / "tokens",
        strategy="fsdp",
        steps=STEPS,
        run_id="fsdp-2",
        attempt=3,
        model=user("plain"),
    )
    plan = replace(plan, work=plan.work._replace(checkpoint=plan.work.checkpoint._replace(keep=1)))
    *_, before, newest = catalogue.list_checkpoints(store, plan.stage_key)
    assert newest.step == STEPS
    blob = tmp_path / "store" / newest.key / "model-00001"
    blob.write_bytes(blob.read_bytes()[:-1] + b"!")
    plans.run_together([plan], tmp_path / "run")

    start = next(record for record in plans.records(tmp_path / "store", plan) if record["kind"] == "start")
    assert (start["start_step"], start["resumed_from"]) == (before.step, before.key)
    (note,) = start["notes"]
    assert f"that of step {STEPS} is damaged ({newest.key}/model-00001: block 0 is corrupt" in note
    assert f"{STEPS - before.step} steps are computed again" in note
    event = json.loads(store.get(f"{plan.attempt_key}/events.jsonl"))
    assert (event["kind"], event["step"], event["given_up"]) == ("fallback", before.step, [newest.key])
    whole = processes.digests(FolderStore(folder / "whole"), plan)
    assert processes.digests(store, plan)[STEPS, 3] == whole[STEPS, 1]
    assert [item.attempt for item in catalogue.list_checkpoints(store, plan.stage_key)] == [2, 3]
