"""Profiles of real trainings: what stands in the traces, and that planted faults are named."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit import plans
from kit.command_runs import until

from mlpipe.observe.profiles.findings import findings
from mlpipe.observe.profiles.stored import profiles_of_stage
from mlpipe.observe.profiles.text import profile_text
from mlpipe.plan.data import DataPlan
from mlpipe.plan.entry import Entry
from mlpipe.plan.model import ModelPlan
from mlpipe.plan.work import ProfilePlan
from mlpipe.store import profiles
from mlpipe.store.open import open_store
from mlpipe.store.profiles import Profile, ProfileRequest
from mlpipe.train import profiler
from mlpipe.train.profiler import Profiler

pytestmark = pytest.mark.torch
FIRST, NUM = 3, 2


def wasteful(wastes: str) -> dict[str, Any]:
    return {"model": ModelPlan(Entry("kit.profiled:build", {"wastes": wastes}), None, 32, ())}


SOUND = {"ddp": {"strategy": "ddp"}, "fsdp": {"strategy": "fsdp"}}
RECOMPUTED: dict[str, Any] = {"full": {"strategy": "ddp", "activation_checkpointing": "full"}}
FAULTY: dict[str, dict[str, Any]] = {
    "synchronisation": wasteful("syncs"),
    "tiny operators": wasteful("tiny"),
    "copies": wasteful("copies"),
    "straggler": wasteful("lags"),
    "data": {**wasteful(""), "data": DataPlan(None, Entry("kit.profiled:starved", {}), None)},
    # the last: the ranks keep their threads
    "threads": {"model": ModelPlan(Entry("kit.profiled:crowded", {}), None, 32, ())},
}
WORKS = SOUND | RECOMPUTED | FAULTY


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two ranks, all plans in the same processes; and one that is not profiled."""
    folder = tmp_path_factory.mktemp("profiled")
    tokens = plans.write_tokens(folder / "tokens")
    made = {}
    for at, (name, work) in enumerate(WORKS.items()):
        # of the sound alone it is asked which steps stand in a trace: others have none behind it
        first = FIRST if name in SOUND else 2
        profile, steps = ProfilePlan(first, NUM), first + NUM - (name not in SOUND)
        made[name] = plans.train_plan(
            folder / "store", tokens, steps=steps, every=100, run_id=f"run-{at}", profile=profile,
            deterministic=name in SOUND, **work,
        )  # fmt: skip
    plain = replace(made["fsdp"], run_id="plain", work=made["fsdp"].work._replace(profile=None))
    plans.run_together([plain, *made.values()], folder / "runs")
    return SimpleNamespace(store=open_store(str(folder / "store")), folder=folder, plans=made, plain=plain)


def stored_of(trained, name):
    (stored,) = profiles_of_stage(trained.store, trained.plans[name].stage_key)
    return stored


@pytest.mark.parametrize("name", SOUND)
def test_a_trace_is_chromes_and_has_steps_layers_and_collectives(trained, name):
    """As Perfetto reads it: its own trace processor is a program that PyPI does not have."""
    stored = stored_of(trained, name)
    assert (stored.profile.first_step, stored.profile.steps, stored.profile.ranks) == (FIRST, NUM, (0, 1))
    for key, rank in zip(stored.trace_keys(), stored.ranks, strict=True):
        document = json.loads(gzip.decompress(trained.store.get(key)))
        spans = [one for one in document["traceEvents"] if one["ph"] == "X"]
        assert all(one["dur"] >= 0 and {"ts", "pid", "tid", "name"} <= one.keys() for one in spans)
        names = {one["name"] for one in spans}
        assert {f"ProfilerStep#{FIRST}", f"ProfilerStep#{FIRST + 1}"} <= names  # HTA's and TensorBoard's
        assert f"ProfilerStep#{FIRST + NUM}" not in names
        blocks = {f"layers.{at}.{part}" for at in range(2) for part in ("self_attn", "mlp", "mlp.up_proj")}
        assert {f"layer: {one}" for one in {*blocks, "embed_tokens", "norm"}} <= names
        wanted = {
            "ddp": {"gloo:all_reduce"},
            "fsdp": {"c10d::_allgather_base_", "c10d::_reduce_scatter_base_"},
        }
        assert wanted[name] <= names
        assert document["distributedInfo"]["rank"] == rank.rank
        for block in blocks:  # a backward pass has no span of its layer
            assert rank.layers[block].backward > 0, block
        assert sum(rank.idle.values()) + rank.busy == pytest.approx(rank.seconds)
        assert rank.communication > 0


def test_layers_that_are_recomputed_have_their_time_too(trained):
    (first, _) = stored_of(trained, "full").ranks
    for at in range(2):
        assert first.layers[f"layers.{at}.mlp.up_proj"].backward > 0
        assert first.layers[f"layers.{at}.mlp.up_proj"].forward > 0


@pytest.mark.parametrize("fault", FAULTY)
def test_a_planted_fault_is_named(trained, fault):
    stored = stored_of(trained, fault)
    found = {one.cause: one for one in findings(stored.ranks)}
    assert fault in found, profile_text(stored.ranks)
    words = found[fault].what
    if fault in ("synchronisation", "copies"):
        assert words.startswith("blocks.1 "), words
    if fault == "tiny operators":
        assert words.startswith("blocks.* "), words
    if fault == "straggler":
        assert "rank 1 " in words, words
        assert "in blocks.1" in words, words
    assert found[fault].remedy


def test_what_is_profiled_trains_alike_and_is_whole_again(trained):
    """The same losses, bit for bit; and no hook, span or wrapper stays."""
    losses = plans.losses(trained.folder / "store", trained.plain)
    assert len(losses) == trained.plain.work.training.steps
    assert plans.losses(trained.folder / "store", trained.plans["fsdp"]) == losses


def test_a_training_hears_while_it_runs(tmp_path):
    """Asked through the store, under the real launcher; and the request is gone."""
    tokens = plans.write_tokens(tmp_path / "tokens")
    model = ModelPlan(Entry("kit.profiled:build", {"wastes": "lags"}), None, 32, ())
    plan = plans.train_plan(tmp_path / "store", tokens, steps=2000, every=5000, model=model)
    store = open_store(str(tmp_path / "store"))
    process = plans.start(plan, tmp_path / "scratch")
    try:
        until(lambda: plans.records(tmp_path / "store", plan), "the first record")
        profiles.ask(store, plan.attempt_key, ProfileRequest("abc", 2, (1, 7)))
        (begun,) = until(lambda: profiles.list_profiles(store, plan.attempt_key), "a profile")
        assert (begun.id, begun.steps, begun.ranks) == ("abc", 2, (1,))
        until(lambda: profiles.finished_ranks(store, plan.attempt_key, begun), "its traces")
        assert not profiles.is_asked(store, plan.attempt_key)
    finally:
        process.terminate()
        assert process.wait(300) == 5  # saved
    ((rank,),) = [one.ranks for one in profiles_of_stage(store, plan.stage_key)]
    assert (rank.rank, rank.first_step, rank.num_steps) == (1, begun.first_step, 2)


@pytest.fixture
def finished(tmp_path, caplog):
    """What stands in the store, and is told, of a profile of one step whose trace was `written`."""

    def finish(written, memory=False):
        store, nothing = open_store(str(tmp_path / "store")), lambda *args: None
        process = SimpleNamespace(local_world_size=1)
        session = SimpleNamespace(
            rank=0,
            device=torch.device("cpu"),
            process=process,
            plan=SimpleNamespace(attempt_key="a"),
            store=store,
        )
        loop = SimpleNamespace(
            plan=SimpleNamespace(compile="off"), model=SimpleNamespace(module=torch.nn.Linear(2, 2)),
            reader=SimpleNamespace(take=nothing, read=nothing),
            schedule=SimpleNamespace(forward_backward=nothing), update=SimpleNamespace(step=nothing),
        )  # fmt: skip
        made = Profiler(session, loop, Profile("abc", 5, 1, (0,), memory, 0.0))
        made._cuda = memory
        made.step_begins(5)
        loop.model.module(torch.ones(1, 2))
        made.step_ends()
        export = made._profiler.export_chrome_trace

        def exported(path):
            export(path)
            Path(path).write_bytes(written(Path(path).read_bytes()))

        made._profiler.export_chrome_trace = exported
        made.finish()
        return [one.key.partition(".")[2] for one in store.list("a/profiles")], caplog.text

    return finish


def test_a_trace_that_is_cut_behind_an_event_is_lost(finished):
    found, told = finished(lambda text: text[: text.rstrip()[:-1].rindex(b"}") + 1])
    assert found == []
    assert "the profile of step 5 is lost: the trace is cut short" in told


def test_a_trace_is_kept_whatever_its_summary_meets(finished, monkeypatch):
    monkeypatch.setattr(profiler, "measure", lambda trace: 1 / 0)
    found, told = finished(lambda text: text)
    assert found == ["json.gz"]
    assert "the profile of step 5 has a trace, but no summary: division by zero" in told
    assert "lost" not in told
    monkeypatch.undo()
    assert sorted(finished(lambda text: text)[0]) == ["json.gz", "summary.json"]


def test_without_a_snapshot_there_is_the_rest_and_its_recording_ends(finished, monkeypatch):
    recorded = []
    cuda = SimpleNamespace(
        _dump_snapshot=lambda path: 1 / 0, _record_memory_history=lambda enabled: recorded.append(enabled)
    )
    monkeypatch.setattr(torch.cuda, "memory", cuda)
    found, told = finished(lambda text: text, memory=True)
    assert sorted(found) == ["json.gz", "summary.json"]
    assert "the profile of step 5 has no snapshot of memory: division by zero" in told
    finished(lambda text: b"", memory=True)
    assert recorded == [None, None]
