"""How long workers wait for each other, as the lengths of conversations tell."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks import uneven as benchmark
from mlpipe.cli.app import app
from mlpipe.kinds.train.spec import Train
from mlpipe.plan import uneven as module
from mlpipe.plan.build import Start, build_plan
from mlpipe.plan.candidates import priced, uneven_of
from mlpipe.plan.choose import Candidate
from mlpipe.plan.dealing import cost_of_samples
from mlpipe.plan.hardware import GIB, Hardware
from mlpipe.plan.mesh import Mesh
from mlpipe.plan.optimizers import OptimizerCost
from mlpipe.plan.pricing import Choices, Pricer, Training
from mlpipe.plan.shapes import presets
from mlpipe.plan.uneven import Uneven, lengths_of
from mlpipe.spec.load import load_pipeline_text

pytestmark = pytest.mark.unit
CPU = Hardware("cpu", 1, 4, 8 * GIB, "CPU worker", {}, 4)
TEXT = """version: 1
name: uneven
stages:
  - name: train
    train:
      model: {preset: llama-25m, seq_len: 1024, vocab_size: 4096}
      data: {chat: train.jsonl, tokenizer: ./model, batch_size: 32, micro_batch: 1}
      steps: 10
      strategy: fsdp
    resources: {workers_per_node: 4}
"""


def write(path: Path, lengths: list[int]) -> None:
    """Lines of about so many tokens each."""
    lines = [{"prompt": "", "completion": "x" * 4 * max(1, length - 10)} for length in lengths]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("name", benchmark.MIXES)
def test_the_gain_of_the_planner_is_that_of_the_benchmark(name):
    """Of lengths drawn anew, within 10 %: packed and dealt by the trainer's own functions."""
    length, capacity = benchmark.MIXES[name]
    draw = random.Random(11)
    lengths = [length(draw) for _ in range(2000)]
    uneven = Uneven(lengths, benchmark.cost, 8 * 4, "balanced")
    mesh = Mesh(dp_shard=4)
    often, seldom = (uneven.idle(mesh, capacity, way, "cpu") for way in ("collective", "on_demand"))
    equal, free, _ = benchmark.mixed(name, 8, 4, 24)
    assert (1 - seldom) / (1 - often) == pytest.approx(benchmark.expected(equal, free, "on_demand"), rel=0.1)
    assert seldom < uneven.idle(mesh, capacity, "resident", "cuda")
    # copies of whole weights meet behind the last pass alone
    assert uneven.idle(Mesh(dp_replicate=4), capacity, "resident", "cpu") == seldom


def test_what_meetings_take_is_expected_as_well():
    works = [[[8.0, 1.0], [1.0, 8.0]]]
    assert benchmark.expected(works, works, "on_demand") == 16 / 9
    meetings = {"collective": 4.0, "resident": 2.0, "on_demand": 1.0}
    assert benchmark.expected(works, works, "on_demand", meetings) == 2.0


def test_files_that_are_mixed_are_drawn_by_their_weights(tmp_path, monkeypatch):
    """And not by their lines: one file is ten times as long."""
    monkeypatch.chdir(tmp_path)
    write(Path("short.jsonl"), [100] * 200)
    write(Path("long.jsonl"), [500] * 20)
    mixed = "[{path: short.jsonl, weight: 3}, {path: long.jsonl}]"
    [train] = load_pipeline_text(TEXT.replace("chat: train.jsonl", f"chat: {mixed}"), "a.yaml").stages
    shape = presets.preset("llama-25m", {"vocab_size": 4096})
    uneven = uneven_of(train.part(Train), shape)
    drawn = [length for step in uneven._steps for length in step]
    assert sum(length > 300 for length in drawn) / len(drawn) == pytest.approx(0.25, abs=0.07)
    Path("long.jsonl").unlink()  # nobody knows yet
    assert uneven_of(train.part(Train), shape) is None


def test_lengths_are_read_off_the_text(tmp_path, monkeypatch):
    turns = [{"role": "user", "content": [{"type": "text", "text": "a" * 36}]}]
    lines: list[Any] = [
        {"messages": [*turns, {"role": "assistant", "content": "ä" * 20}]},
        {"text": "b" * 400},
        {"prompt": None, "completion": "c" * 40},
        {"messages": []},
        ["no object"],
    ]
    (path := tmp_path / "a.jsonl").write_text(
        "\n".join([*map(json.dumps, lines), "{no json", "", "[" * 9999])
    )
    assert lengths_of(str(path), 50) == [19 + 10, 50, 10 + 10]
    assert lengths_of(str(tmp_path / "none"), 50) == lengths_of(str(tmp_path), 50) == []
    monkeypatch.setattr(module, "_SMALL_BYTES", 0)
    write(path, [20] * 500 + [40] * 500)
    found = lengths_of(str(path), 50)
    assert 0.6 < found.count(40) / len(found) < 0.75  # places are even in bytes, not in lines
    path.unlink()
    path.mkdir()
    assert lengths_of(str(path), 50) == []


def test_a_step_of_packed_samples_is_as_long_as_they_are():
    """Samples that fill a quarter of a row each, four in a row: as much is sent as for a quarter of as many
    that fill one, and little less computed, since attention looks at less. When each fills a row, packing
    makes no difference."""
    shape = presets.preset("llama-25m", {"vocab_size": 4096})
    choices = Choices(1, "none", "fp32", "collective")

    def candidate(batch: int, lengths: list[int] | None) -> Candidate:
        training = Training(batch, 1024, 10, False, OptimizerCost(8), 1000, None)
        uneven = None if lengths is None else Uneven(lengths, cost_of_samples(shape), batch, "balanced")
        return Pricer(shape, training, CPU, uneven).candidate("fsdp", Mesh(dp_shard=4), choices, asked=True)

    packed, few, many = candidate(32, [256]), candidate(8, None), candidate(32, None)
    assert packed.seconds is not None
    assert few.seconds is not None
    assert packed.seconds.communication == few.seconds.communication
    assert 0.8 * few.seconds.compute < packed.seconds.compute < few.seconds.compute
    assert packed.num_tokens == pytest.approx(32 * 256)
    assert packed.memory == many.memory
    full = candidate(32, [1024])
    assert full.step_seconds == pytest.approx(many.step_seconds)
    assert full.tokens_per_second == pytest.approx(many.tokens_per_second)
    # one that is longer than the others is waited for
    assert candidate(32, [64] * 31 + [1024]).step_seconds > candidate(32, [94]).step_seconds


def test_a_plan_is_priced_again_by_the_lengths_that_it_was_made_for(tmp_path, monkeypatch):
    """As what runs teach about this machine needs it."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "train.jsonl", [100, 300, 900] * 30)
    plan = build_plan(load_pipeline_text(TEXT, "p.yaml"), "train", Start("r", 1, "./runs"), CPU).work.training
    assert priced(plan, CPU).step_seconds == pytest.approx(plan.predicted.step_seconds, rel=1e-4)


def test_auto_gathers_once_a_step_where_that_saves_time(tmp_path, monkeypatch):
    """And the plan says how much. Samples of one length leave no waits to save, but gathers where these are
    slow."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.yaml").write_text(TEXT)
    draw = random.Random(3)
    uneven = [min(1000, int(draw.lognormvariate(math.log(100), 1.2))) for _ in range(300)]
    for lengths, rate, way in (
        (uneven, 1e13, "resident"),
        ([512] * 300, 1e13, "collective"),
        ([512] * 300, 1e8, "resident"),
    ):
        write(tmp_path / "train.jsonl", lengths)
        pipeline = load_pipeline_text(TEXT, "p.yaml")
        speed = CPU.speed._replace(link_bytes_per_second=rate, gather_bytes_per_second=rate)
        hardware = CPU._replace(speed=speed)
        plan = build_plan(pipeline, "train", Start("r", 1, "./runs"), hardware).work.training
        assert plan.communication == way
        assert plan.predicted is not None
        told = plan.predicted.idle_ratios
        assert list(told) == ["collective", "resident", "on_demand"]
        assert (told["collective"] > 0.05) == (lengths is uneven)
        shown = CliRunner().invoke(app, ["plan", "p.yaml"]).output
        assert (
            f"workers wait, since samples differ in length: collective {100 * told['collective']:.1f} %"
            in shown
        )
    apart = build_plan(pipeline, "train", Start("r", 1, "./runs"), CPU._replace(num_nodes=2)).work.training
    assert list(apart.predicted.idle_ratios) == ["collective", "resident"]  # weights lie over both nodes
    within = load_pipeline_text(TEXT.replace("strategy: fsdp", "strategy: hsdp"), "p.yaml")
    told = build_plan(within, "train", Start("r", 1, "./runs"), CPU._replace(num_nodes=2)).work.training
    assert list(told.predicted.idle_ratios) == ["collective", "resident", "on_demand"]
