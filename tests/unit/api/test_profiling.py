"""What `mlpipe profile` says of the gains of its remedies, by the planner's own figures."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from mlpipe._core.serial import to_json
from mlpipe.api.profiling import Expected, expected_gains, with_gains
from mlpipe.observe.profiles.measure import RankProfile
from mlpipe.observe.report import page_of, render_html
from mlpipe.observe.runview import view_run
from mlpipe.plan.build import Start, build_plan, stage_hardware
from mlpipe.plan.training import compare
from mlpipe.spec.load import load_pipeline_text
from mlpipe.store import runs
from mlpipe.store.base import Store
from mlpipe.store.open import open_store
from mlpipe.store.profiles import Profile, summary_key, write_profile
from mlpipe.store.runs import StageState

pytestmark = pytest.mark.unit
DATA = {"entry": "kit.models:numbers", "batch_size": 8}
PRESET = {"preset": "llama-4m", "seq_len": 64}


def gains(folder: str, workers: int = 2, **train: Any) -> dict[str, Expected]:
    body = {"model": PRESET, "data": DATA, "steps": 10, "precision": "fp32", **train}
    stage = {"name": "train", "train": body, "resources": {"workers_per_node": workers, "cpus": workers}}
    text = json.dumps({"version": 1, "name": "p", "stages": [stage]})
    spec, store = load_pipeline_text(text, "p"), open_store(folder)
    plan = build_plan(spec, "train", Start("r", 1, store.url), stage_hardware(spec, "train"))
    return of_run(store, text, plan.to_json())


def of_run(store: Store, text: str, plan: str) -> dict[str, Expected]:
    runs.create_run(store, "r", text, "0", ["train"], "local", {})
    store.put("runs/r/stages/train/attempt-1/plan.json", plan.encode())
    state = StageState("running", 1)
    run = runs.update_run(store, "r", lambda run: replace(run, stages={"train": state}))
    return expected_gains(store, run, run.attempt_key("train"))


def test_of_collectives_a_faster_strategy_is_named_with_the_planners_figure(tmp_path: Any) -> None:
    found = gains(str(tmp_path), strategy="fsdp")["collectives"]
    spec = load_pipeline_text(runs.read_pipeline(open_store(str(tmp_path)), "r"), "p")
    ways = compare(spec, "train", stage_hardware(spec, "train"))
    seconds = {
        c.strategy: c.step_seconds
        for c in reversed(ways)  # the fastest of each strategy stays
        if c.fits and c.precision == "fp32" and c.activation_checkpointing == "none"
    }
    (best,) = found.sets
    assert best == f"stages.train.train.strategy={min(seconds, key=lambda name: seconds[name])}"
    assert found.gain == pytest.approx(1 - min(seconds.values()) / seconds["fsdp"])
    assert found.gain > 0


def test_where_the_plan_is_the_fastest_nothing_is_promised(tmp_path: Any) -> None:
    found = gains(str(tmp_path))["collectives"]
    assert found == Expected(("strategy", "micro_batch"))


def test_of_a_pipeline_that_waits_a_schedule_is_named(tmp_path: Any) -> None:
    found = gains(str(tmp_path), mesh={"pp": 2}, pipeline={"schedule": "1f1b", "microbatches": 4})["stages"]
    assert found.sets == ("stages.train.train.pipeline.schedule=zero_bubble",)
    assert 0 < found.gain < 1


def test_a_schedule_that_the_file_cannot_name_is_not_suggested(tmp_path: Any) -> None:
    split = {"mesh": {"pp": 2, "dp_shard": 2}, "pipeline": {"schedule": "1f1b", "microbatches": 4}}
    found = gains(str(tmp_path), workers=4, **split)
    assert all("zero_bubble" not in one for expected in found.values() for one in expected.sets)


def test_what_the_planner_does_not_know_has_no_price(tmp_path: Any) -> None:
    assert (
        gains(str(tmp_path), model={"entry": "kit.models:slow", "args": {"seconds": 0}, "seq_len": 32}) == {}
    )
    other = open_store(str(tmp_path / "other"))
    assert of_run(other, "stages: []", "{}") == {}, "a run that is none"


def test_the_page_of_a_run_says_what_the_planner_expects(tmp_path: Any) -> None:
    found = gains(str(tmp_path), strategy="fsdp")["collectives"]
    store, key = open_store(str(tmp_path)), "runs/r/stages/train/attempt-1"
    asked = Profile("p", first_step=4, steps=2, ranks=(0,), memory=False, time=1.0)
    write_profile(store, key, asked)
    waits = {"collectives": 0.3}
    rank = RankProfile(
        0, "cpu", 4, 2, seconds=1.0, busy=0.4, idle={**waits, "python": 0.3}, parts={}, classes={}, layers={},
        operators=(), communication=0.5, hidden_communication=0.2, tiny_count=0.0, tiny_seconds=0.0, syncs=(),
        copies=(),
    )  # fmt: skip
    store.put(summary_key(key, 4, 0), to_json(rank).encode())
    html = render_html(page_of(with_gains(store, view_run(store, "r"))))
    saved = f"{1000 * 0.7 * found.gain:.1f} ms, {100 * found.gain:.1f} % of a step"
    row = f"<td>the planner expects to save {saved}, by --set {found.sets[0]}</td>"
    assert "By the planner" in html
    assert row in html
    assert "By the planner" not in render_html(page_of(view_run(store, "r"))), "nobody has asked it"
