"""An elastic training: replicas are killed, come back and join, and the losses are those of one that nobody
disturbed."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit import plans, processes
from kit.command_runs import until
from kit.warm import Popen

from mlpipe._core.errors import TrainError
from mlpipe.plan.entry import Entry
from mlpipe.plan.model import ModelPlan
from mlpipe.plan.plan import Replicas
from mlpipe.plan.updates import CompressPlan
from mlpipe.store import catalogue, replicas
from mlpipe.store.folder import FolderStore
from mlpipe.train.data.loader import MicrobatchLoader
from mlpipe.train.loop import Loop
from mlpipe.train.replicas import elastic_loop
from mlpipe.train.replicas.elastic_loop import ElasticLoop
from mlpipe.train.replicas.exchange import MembershipChanged
from mlpipe.train.resuming import Position
from mlpipe.train.schedules import LossSum
from mlpipe.train.slow_nodes import SLOW_FILE

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]
STEPS = 20
SHORTENED = {
    "mlpipe.store.replicas:SEAT_SECONDS": 10.0,
    "mlpipe.train.replicas.coordinator:ALONE_SECONDS": 1.0,
}


class Numbers:
    """Sample i is the number i."""

    def __len__(self) -> int:
        return 1000

    def order_at(self, seed, positions):
        return positions


@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=8),
    batch=st.integers(1, 20),
    micro=st.integers(1, 4),
)
def test_under_any_membership_each_sample_is_computed_once(sizes, batch, micro):
    """`sizes`: how many data ranks there are in each step. Whoever pads, pads what does not count."""
    world = SimpleNamespace(num_data_ranks=1, data_rank=0, mesh=SimpleNamespace(cp=1))
    loader = MicrobatchLoader(Numbers(), world, seed=0, global_batch=batch, micro_batch=micro, seq_len=1)
    loader._order = lambda start, count: np.arange(start, start + count)
    loader._microbatch = lambda indices: SimpleNamespace(samples=list(indices), counts=True)
    import mlpipe.train.data.loader as data

    seen = []
    original, data.uncounted = data.uncounted, lambda one: SimpleNamespace(samples=[], counts=False)
    try:
        for step, size in enumerate(sizes):
            counts = set()
            for rank in range(size):
                loader.share = (rank, size)
                dealt = loader.step(step * batch)
                counts.add(len(dealt))
                seen += [sample for one in dealt if one.counts for sample in one.samples]
            assert len(counts) == 1
    finally:
        data.uncounted = original
    assert sorted(seen) == list(range(len(sizes) * batch))


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return plans.write_tokens(tmp_path_factory.mktemp("elastic") / "tokens")


def members(store: FolderStore, plan) -> list[list[int]]:
    lines, _ = store.read_log(f"{plan.attempt_key}/events.jsonl")
    return [one["members"] for one in map(json.loads, lines.splitlines()) if one["kind"] == "membership"]


def test_killed_and_joined_while_the_others_go_on(tmp_path, tokens):
    """Replica 1 is killed and comes back, replica 2 joins. Replica 0 never begins again, nothing is lost, and
    losses are those of a gang of two that nobody disturbed: to the bit as long as two take part, healed ones
    as well."""
    slow = tmp_path / "slow"
    slow.touch()
    model = ModelPlan(
        Entry("kit.models:slow", {"seconds": 6.0, "while_file": str(slow), "dropout": 0.0}), None, 32, ()
    )
    common = {
        "strategy": "single",
        "world_size": 1,
        "steps": STEPS,
        "every": 1000,
        "model": model,
        "micro_batch": 16,
    }
    launch = {"replicas": Replicas(2, 3), "max_restarts": 3}
    plan = plans.train_plan(tmp_path / "store", tokens, launch=launch, **common)
    store, scratch = FolderStore(tmp_path / "store"), tmp_path / "scratch"
    process = plans.start(plan, scratch)

    def step() -> int:
        assert process.poll() is None, plans.log_of(scratch)
        found = plans.records(tmp_path / "store", plan)
        return max((one["step"] for one in found if one["kind"] == "step"), default=0)

    try:
        until(lambda: step() >= 3, "step 3")
        killed = step()
        processes.kill([processes.worker_of(scratch / "replica-1", 0)])
        until(lambda: len(members(store, plan)) > 1 and members(store, plan)[-1] == [0, 1], "its return")
        replicas.want(store, plan.attempt_key, 3)
        until(lambda: members(store, plan)[-1] == [0, 1, 2], "the third")
        slow.unlink()
        assert process.wait(600) == 0, plans.log_of(scratch)
    finally:
        processes.kill(processes.tree(process.pid))
        process.wait(300)
    starts = {
        rank: [one for one in plans.records(tmp_path / "store", plan, rank) if one["kind"] == "start"]
        for rank in range(3)
    }
    assert [len(starts[rank]) for rank in range(3)] == [1, 2, 1]
    assert min(starts[1][1]["start_step"], starts[2][0]["start_step"]) >= killed
    assert not starts[1][1]["resumed_from"], "healed by a peer, not by the store"
    steps = [one["step"] for one in plans.records(tmp_path / "store", plan) if one["kind"] == "step"]
    assert steps == list(range(1, STEPS + 1)), "no step lost, none twice"
    of_steps = [one for one in plans.records(tmp_path / "store", plan) if one["kind"] == "step"]
    assert {one["replicas"] for one in of_steps} >= {2, 3}
    costs = [one["membership_seconds"] for one in of_steps if one.get("membership_seconds") is not None]
    assert 2 <= len(costs) <= 4, "a death and a return, perhaps before one step, and a third one"
    assert all(seconds > 0 for seconds in costs)

    gang = plans.train_plan(
        tmp_path / "gang", tokens, **(common | {"strategy": "ddp", "world_size": 2, "micro_batch": 8})
    )
    plans.run_together([gang], tmp_path / "run")
    expected, got = plans.losses(tmp_path / "gang", gang), plans.losses(tmp_path / "store", plan)
    assert got == pytest.approx(expected, rel=1e-5)
    third = starts[2][0]["start_step"]
    assert third > killed
    assert got[:third] == expected[:third]
    assert catalogue.latest(store, plan.stage_key).step == STEPS


def test_a_replica_of_several_ranks_is_healed_by_another_and_computes_the_same(tmp_path, tokens):
    """Weights and states that are split among the ranks of a replica, and have copies there."""
    slow = tmp_path / "slow"
    slow.touch()
    entry = Entry("kit.models:slow", {"seconds": 8.0, "while_file": str(slow), "dropout": 0.0})
    common = {"strategy": "hsdp", "world_size": 4, "steps": STEPS, "every": 1000}
    common["model"] = ModelPlan(entry, None, 32, ())
    plan = plans.train_plan(tmp_path / "store", tokens, launch={"replicas": Replicas(1, 2)}, **common)
    store, scratch = FolderStore(tmp_path / "store"), tmp_path / "scratch"
    process = plans.start(plan, scratch)
    try:
        until(lambda: members(store, plan) == [[0]] and plans.records(tmp_path / "store", plan), "one")
        replicas.want(store, plan.attempt_key, 2)
        until(lambda: members(store, plan)[-1] == [0, 1], "the second")
        slow.unlink()
        assert process.wait(600) == 0, plans.log_of(scratch)
    finally:
        processes.kill(processes.tree(process.pid))
        process.wait(300)
    alone = plans.train_plan(tmp_path / "alone", tokens, **common)
    plans.run_together([alone], tmp_path / "run")
    expected, got = plans.losses(tmp_path / "alone", alone), plans.losses(tmp_path / "store", plan)
    assert got == pytest.approx(expected, rel=1e-5)
    assert set(plans.by_step(tmp_path / "store", plan, "replicas")) == {1, 2}


def test_a_coordinator_is_killed_or_told_to_end_and_another_one_takes_over(tmp_path, tokens):
    """As the pods of a cluster: a process for the coordinator, a launcher for each replica, and nobody above.
    No replica begins again, and no step is lost. One that is told to end while ranks go on gives up its seat:
    the next one need not wait until nobody has renewed it. Then one is slow, and says so itself. What they
    send is compressed."""
    slow, steps = tmp_path / "slow", 60
    slow.touch()
    args = {"seconds": 1.0, "while_file": str(slow), "dropout": 0.0, "lame": "1", "lame_seconds": 0.1}
    model = ModelPlan(Entry("kit.models:slow", args), None, 32, ())
    plan = plans.train_plan(
        tmp_path / "store",
        tokens,
        strategy="single",
        world_size=1,
        steps=steps,
        every=1000,
        model=model,
        compress=CompressPlan("int8"),
        launch={"replicas": Replicas(2, 3)},
    )
    store = FolderStore(tmp_path / "store")
    replicas.want(store, plan.attempt_key, 2)
    env = {**plans.environment(), "KIT_SHORTENED": json.dumps(SHORTENED)}
    started = []

    def begin(name: str, module: str, **more: str):
        (folder := tmp_path / name).mkdir()
        (folder / "plan.json").write_text(plan.to_json())
        argv = [sys.executable, "-m", module, "--plan", str(folder / "plan.json"), "--scratch", str(folder)]
        with (folder / "launcher.log").open("wb") as log:
            streams = {"stdout": log, "stderr": log, "start_new_session": True}
            started.append(Popen("torchrun", argv, env={"OMP_NUM_THREADS": "1", **env, **more}, **streams))
        return started[-1]

    def step() -> int:
        assert all(one.poll() in (None, 0) for one in replicas_of), plans.log_of(tmp_path / "replica-0")
        found = plans.records(tmp_path / "store", plan)
        return max((one["step"] for one in found if one["kind"] == "step"), default=0)

    try:
        first = begin("coordinator-1", "mlpipe.train.coordinate")
        replicas_of = [
            begin(
                f"replica-{number}",
                "mlpipe.train.launcher",
                MLPIPE_REPLICA=str(number),
                MLPIPE_NODE_NAME=f"here-{number}",
            )
            for number in range(2)
        ]
        until(lambda: step() >= 3, "step 3")
        processes.kill([first.pid])
        killed = step()
        second = begin("coordinator-2", "mlpipe.train.coordinate")
        until(lambda: step() > killed + 1, "steps after it")
        third = begin("coordinator-3", "mlpipe.train.coordinate")
        second.terminate()
        assert second.wait(300) == 5, plans.log_of(tmp_path / "coordinator-2")
        told = step()
        until(lambda: step() > told, "steps after it")
        slow.unlink()
        assert [one.wait(600) for one in replicas_of] == [0, 0], plans.log_of(tmp_path / "replica-0")
        assert third.wait(300) == 0, plans.log_of(tmp_path / "coordinator-3")
    finally:
        for one in started:
            processes.kill(processes.tree(one.pid))
    for rank in range(2):
        found = plans.records(tmp_path / "store", plan, rank)
        assert len([one for one in found if one["kind"] == "start"]) == 1
        assert [one["step"] for one in found if one["kind"] == "step"] == list(range(1, steps + 1))
        last = found[max(place for place, one in enumerate(found) if one["kind"] == "step")]
        assert (last["slowness_ratio"] > 1.2) == (rank == 1)
        assert list(last["stragglers"]) == ["1"]
    told = {n: json.loads((tmp_path / f"replica-{n}" / SLOW_FILE).read_text()) for n in range(2)}
    assert told == {0: {}, 1: {"here-1": pytest.approx(last["stragglers"]["1"], abs=0.06)}}
    assert last["exchanged_plain_bytes"] / 4.1 < last["exchanged_bytes"] < last["exchanged_plain_bytes"] / 3
    assert members(store, plan) == 3 * [[0, 1]], "the same, told by each coordinator"
    assert "gives up its seat" in plans.log_of(tmp_path / "coordinator-2")
    assert catalogue.latest(store, plan.stage_key).step == steps


@pytest.mark.parametrize(
    ("buffer", "refused"), [(torch.zeros(2), True), (torch.zeros(2, dtype=torch.int64), False)]
)
def test_running_averages_of_each_replica_are_refused(buffer, refused):
    def forward_backward(batches):
        buffer.add_(1)
        return LossSum(torch.tensor(1.0), torch.tensor(1), 1)

    loop = object.__new__(ElasticLoop)
    loop.model = SimpleNamespace(shards=[SimpleNamespace(name="norm.mean", is_buffer=True, local=buffer)])
    loop.plan = SimpleNamespace(model=SimpleNamespace(build=SimpleNamespace(entry="mine:build")))
    loop.schedule = SimpleNamespace(forward_backward=forward_backward)
    committed = []
    loop.replicas = SimpleNamespace(commit=lambda number, sums: committed.append(number), islands=None)
    if refused:
        with pytest.raises(TrainError, match=r"norm\.mean") as caught:
            loop.gradients(1, [])
        assert caught.value.kind == "input"
    else:
        loop.gradients(1, [])
    assert committed == ([] if refused else [1])


@pytest.mark.parametrize("is_saved", [True, False])
@pytest.mark.parametrize("lost", ["nobody", "in the last step", "at the last meeting"])
def test_who_is_lost_in_the_last_step_takes_no_checkpoint_with_it(lost, is_saved, monkeypatch):
    """If it was to write the last one, another replica does; what it had written nobody writes again."""

    def meet(where):
        assert lost != "in the last step", "nobody comes"
        if lost == "at the last meeting":
            raise MembershipChanged

    said = []
    monkeypatch.setattr(Loop, "save", lambda self: said.append("saves"))
    monkeypatch.setattr(Loop, "finish_saving", lambda self: said.append("waits for it"))
    loop = object.__new__(ElasticLoop)
    loop.released, loop.is_saved = False, lambda: is_saved
    loop.replicas = SimpleNamespace(
        void=lost == "in the last step", leaves=False, meet=meet, agreed=lambda met: met
    )
    loop.finish_saving()
    again = lost != "nobody" and not is_saved
    assert said == ["waits for it"] + (["saves", "waits for it"] if again else [])


def test_islands_that_come_and_go_all_the_time_are_given_up(monkeypatch):
    def changes(*_):
        raise MembershipChanged

    monkeypatch.setattr(elastic_loop, "_TOGETHER_SECONDS", 0.0)
    loop = object.__new__(ElasticLoop)
    loop.session, loop.position = SimpleNamespace(num_replicas=2), Position(step=4)
    loop.recording = SimpleNamespace(of_replicas={"membership_seconds": None})
    loop.replicas = SimpleNamespace(void=False, waiting=nullcontext, together=changes, agreed=lambda met: met)
    with pytest.raises(TrainError, match="did not agree within 0 s") as given_up:
        loop.together(list)
    assert (given_up.value.kind, given_up.value.where) == ("infrastructure", "step 5")
