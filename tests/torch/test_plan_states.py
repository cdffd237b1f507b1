"""Bytes of parameters, gradients and optimizer states a rank: the planner's numbers are the trainer's, to the
byte, on 1, 2 and 4 real ranks (8 with RANKS=8) and on 64 to 1,024 pretended ones, also of those that share
layers or stages."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
from kit import states
from kit.plans import CONFIG, mesh_of, run_ranks
from kit.shapes import rank_work

from mlpipe._core.meshes import Strategy
from mlpipe._core.optimizers import OPTIMIZERS
from mlpipe.plan.axes.axis import RankWork
from mlpipe.plan.memory import rank_tensors
from mlpipe.plan.optimizers import OptimizerCost
from mlpipe.plan.shapes.dense import Dense
from mlpipe.plan.shapes.frozen import Frozen
from mlpipe.plan.shapes.shape import Part
from mlpipe.plan.tensors import total

pytestmark = pytest.mark.torch
FREEZE = ("embed*", "layers.0.mlp.*", "layers.*.self_attn.k_proj.*")  # as in kit/states.py
RANKS = int(os.environ.get("RANKS", "4"))  # 8 pass too, and take twice as long


def states_of(name: str, work: RankWork) -> int:
    """Planned of this optimizer, with an average of the weights."""
    arguments = OPTIMIZERS[name].arguments.items()
    args = {key: argument.default for key, argument in arguments}
    cost = OptimizerCost(OPTIMIZERS[name].state_bytes_per_parameter(args), name, averages=True)
    return total(rank_tensors(work._replace(optimizer=cost)).optimizer)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With what `kit.states` found."""
    folder = tmp_path_factory.mktemp("states")
    output = folder / "output"
    code = run_ranks(RANKS, "kit.states", str(folder), output=output)
    assert code == 0, output.read_text()[-5000:]
    return folder


def test_states_of_1024_ranks_on_meshes(folder: Path) -> None:
    """Of every stage the first rank's, in fp32 with AdamW."""
    found = json.loads((folder / "meshes.json").read_text())
    whole = Dense(dataclasses.replace(CONFIG, **states.WIDE)).parameters
    assert {name for name, _, _ in found} == set(states.MESHES)
    for name, stage, measured in found:
        mesh = states.MESHES[name]
        part = Part(tp=mesh.tp, cp=mesh.cp)
        if mesh.pp > 1:
            ends = {"is_first": stage == 0, "is_last": stage == mesh.pp - 1}
            part = Part(tp=mesh.tp, cp=mesh.cp, num_blocks=states.STAGES[stage], **ends)
        strategy: Strategy = "fsdp" if mesh.dp_shard > 1 else "zero1"
        tensors = rank_tensors(rank_work(whole.of(part), strategy, mesh, overlap=False))
        assert {key: total(getattr(tensors, key)) for key in measured} == measured, (name, stage)


def test_states_are_the_trainers_to_the_byte(folder: Path) -> None:
    found = json.loads((folder / "states.json").read_text())
    config = dataclasses.replace(CONFIG, vocab_size=250, dim=72, ffn_dim=100)
    for kind, strategy, world_size, measured in found:
        mesh = mesh_of(strategy, world_size)
        shape = Frozen(Dense(config), FREEZE) if kind == "frozen" else Dense(config)
        work = rank_work(shape.parameters, strategy, mesh, overlap=False)
        by_name = measured.pop("by name")
        assert by_name == {name: states_of(name, work) for name in OPTIMIZERS}, (kind, strategy, world_size)
        tensors = rank_tensors(work)
        predicted = {key: total(getattr(tensors, key)) for key in measured}
        assert predicted == measured, (kind, strategy, world_size)
    seen = {(kind, strategy, world_size) for kind, strategy, world_size, _ in found}
    assert len(seen) == 1 + 4 + 5 * (RANKS // 4) + 5 + 3 * 5
    assert {world_size for _, _, world_size in seen} == {1, 2, 4, RANKS, 64, 256, 1024}
