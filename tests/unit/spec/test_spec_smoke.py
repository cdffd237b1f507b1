"""A smoke test of any pipeline is made of overrides that make a pipeline which one small machine runs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

import mlpipe
from mlpipe.plan.work import TrainPlan
from mlpipe.spec.load import load_pipeline
from mlpipe.spec.smoke import Smoke, overrides

pytestmark = pytest.mark.unit
ROOT = Path(__file__).resolve().parents[3]
QWEN = {
    "model_type": "qwen3", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "head_dim": 16,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}  # fmt: skip
FILES = [*(ROOT / "pipelines").rglob("*.yaml"), *(ROOT / "tests/unit/spec/good").glob("*.yaml")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_pipeline_shrinks_and_can_be_planned(path, ranks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen3-0.6b").mkdir()  # of chat.yaml
    (tmp_path / "qwen3-0.6b" / "config.json").write_text(json.dumps(QWEN))
    small = mlpipe.load(path).smoke(ranks=ranks, steps=3, tiny=True)
    for name, planned in mlpipe.plan(small, store="runs").items():
        plan = planned.plan
        assert plan.launch.num_nodes == 1, name
        training = plan.part(TrainPlan)
        if training is None:
            continue
        assert (training.mesh.world_size, training.steps) == (ranks, 3)
        assert training.global_batch in {2 * ranks, 2 * math.lcm(ranks, 4)}  # mix.yaml has 4 splits
        if training.model.preset is not None and path.name != "start.yaml":  # whose weights are others'
            assert training.model.build.args["dim"] == 32
            assert training.model.seq_len <= 64
        assert training.optimizer.warmup_steps <= 3
        assert training.checkpoint.every_steps == 2


def changes(path: Path, smoke: Smoke, num_gpus: int = 0) -> list[str]:
    return overrides(load_pipeline(path), smoke, num_gpus=num_gpus)


def test_each_option_changes_its_own():
    quickstart = ROOT / "pipelines/quickstart.yaml"
    registered = "stages.promote.promote.dry_run=true"
    assert changes(quickstart, Smoke(steps=30)) == [
        "stages.train.train.steps=30", registered,
    ]  # fmt: skip
    assert changes(quickstart, Smoke(steps=3)) == [
        "stages.train.train.steps=3", "stages.train.train.optimizer.warmup_steps=3", registered,
    ]  # fmt: skip
    assert changes(quickstart, Smoke(ranks=1)) == [
        'stages.train.resources={"workers_per_node": 1}', registered,
    ]  # fmt: skip
    tiny = changes(quickstart, Smoke(tiny=True))
    assert tiny[0].endswith('"--max-bytes", "8 MiB", "--max-bytes", "256 KiB", "--vocab-size", "512"]')
    assert "stages.train.train.data.batch_size=4" in tiny  # two workers
    assert not any(".steps=" in one or "resources" in one for one in tiny)
    assert "stages.evaluate.evaluate.gate=null" in tiny
    assert "stages.evaluate.evaluate.max_tokens=256" in tiny


def test_gpus_are_used_where_there_are_enough():
    llm = ROOT / "pipelines/llm.yaml"
    (resources, *_) = changes(llm, Smoke(ranks=2), num_gpus=2)
    assert resources == 'stages.train.resources={"gpus_per_node": 2, "gpu": "H100-80GB"}'
    (resources, *_) = changes(llm, Smoke(ranks=2), num_gpus=1)
    assert resources == 'stages.train.resources={"workers_per_node": 2}'


def test_weights_from_outside_keep_the_shape_that_they_fit(tmp_path):
    tune = ROOT / "pipelines/finetune.yaml"
    assert "stages.tune.train.model.dim=32" in changes(tune, Smoke(tiny=True))  # of a stage that shrinks, too
    outside = load_pipeline(tune, overrides=["tune.init_from={path: w.safetensors}"])
    tiny = overrides(outside, Smoke(tiny=True), num_gpus=0)
    assert [one for one in tiny if one.startswith("stages.tune.train.model.")] == [
        "stages.tune.train.model.seq_len=64"
    ]


def test_what_is_the_users_own_stays():
    own = ROOT / "pipelines/custom/pipeline.yaml"
    tiny = changes(own, Smoke(tiny=True, ranks=1))
    assert not any(".model." in one for one in tiny)
    assert [one for one in tiny if ".data." in one] == [
        "stages.train.train.data.batch_size=2", "stages.train.train.data.micro_batch=null",
    ]  # fmt: skip


def test_the_best_trial_of_a_smoke_test_is_not_registered():
    swept = mlpipe.load(
        ROOT / "tests/unit/spec/good/sweep.yaml", overrides=["sweep.promote={as: big, alias: best}"]
    )
    small = swept.smoke(tiny=True)
    assert small.spec.sweep is not None
    assert small.spec.sweep.promote is None
    assert swept.override(["sweep=null"]).smoke(tiny=True).spec.sweep is None


def test_the_smallest_shape_is_one_that_its_mesh_can_split():
    """On as many workers as it has; on fewer the mesh goes."""
    llm, mesh = ROOT / "pipelines/llm.yaml", "train.mesh={dp_shard: fill, tp: 4}"
    pipeline = load_pipeline(llm, overrides=[mesh])
    for ranks, tp in ((None, 4), (2, None)):
        small = overrides(pipeline, Smoke(ranks=ranks, tiny=True), num_gpus=0)
        train = load_pipeline(llm, overrides=[mesh, *small]).stage("train").work
        assert (train.mesh.tp if train.mesh else None) == tp


@pytest.mark.parametrize(
    ("mesh", "more"),
    [
        ("{pp: 2}", "{schedule: interleaved, microbatches: 3}"),
        ("{cp: 5}", None),
        ("{tp: 8}", None),
    ],
)
def test_what_shrinks_can_be_planned_under_its_mesh(mesh, more):
    size = int(mesh.strip("{}").split()[1])
    changed = [f"train.resources.workers_per_node={size}", f"train.mesh={mesh}", "train.data.batch_size=6"]
    changed += ["train.model={preset: llama-1b, seq_len: 240}"]
    changed += [f"train.pipeline={more}"] if more else []
    pipeline = mlpipe.load(ROOT / "pipelines/quickstart.yaml", overrides=changed)
    train = mlpipe.plan(pipeline.smoke(tiny=True), store="runs")["train"].plan.part(TrainPlan)
    assert train.mesh.world_size == size
    assert train.model.seq_len <= 64
    assert "as the mesh says; needs " in train.reason
    named = pipeline.override(["train.strategy=single"]) if more else pipeline
    few = mlpipe.plan(named.smoke(ranks=1, tiny=True), store="runs")["train"].plan.part(TrainPlan)
    assert few.mesh.world_size == 1


@pytest.mark.parametrize(
    ("asked", "ranks", "num_gpus", "expected"),
    [
        ("nodes: 8", 1, 0, {"nodes": 2}),
        ("nodes: 8", 3, 0, {"nodes": 3}),
        ("nodes: 2", 4, 0, None),
        ("nodes: 2, gpus_per_node: 8, gpu: H100-80GB, memory: 1 TiB", 1, 0, {"nodes": 2}),
        ("nodes: 4, gpus_per_node: 8, gpu: L4", 2, 3, {"nodes": 2, "gpus_per_node": 1, "gpu": "L4"}),
        ("gpus_per_node: 8, gpu: L4", 1, 2, {"nodes": 1, "gpus_per_node": 2, "gpu": "L4"}),
        ("gpus_per_node: 1, gpu: L4", 1, 2, None),
    ],
)
def test_a_gang_of_commands_comes_down_to_what_fits(tmp_path, asked, ranks, num_gpus, expected):
    """And stays a gang: how its processes meet is what a smoke test is for."""
    path = tmp_path / "p.yaml"
    path.write_text(
        f"version: 1\nname: p\nstages:\n  - {{name: a, command: [x], resources: {{{asked}}}}}\n"
        "  - {name: b, command: [x]}\n"
    )
    made = changes(path, Smoke(ranks=ranks), num_gpus)
    assert made == ([] if expected is None else [f"stages.a.resources={json.dumps(expected)}"])
    load_pipeline(path, overrides=made)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_shares_weights_within_nodes_shrinks_to_one(ranks, tmp_path):
    """Nobody named a mesh; on demand each copy needs two workers, where there are two."""
    stage = {
        "name": "train",
        "train": {
            "model": {"preset": "llama-1m", "seq_len": 64, "vocab_size": 512},
            "data": {"tokens": "tokens", "batch_size": 8},
            "strategy": "hsdp",
            "communication": "on_demand",
            "steps": 4,
        },
        "resources": {"nodes": 2, "workers_per_node": 4, "cpus": 4, "memory": "8 GiB"},
    }
    path = tmp_path / "p.yaml"
    path.write_text(json.dumps({"version": 1, "name": "p", "store": "./runs", "stages": [stage]}))
    small = mlpipe.load(path).smoke(ranks=ranks, steps=3, tiny=True)
    mesh = mlpipe.plan(small, store=str(tmp_path / "runs"))["train"].plan.part(TrainPlan).mesh
    assert (mesh.world_size, mesh.dp_shard) == (ranks, min(ranks, 2))
