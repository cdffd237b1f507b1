"""Bytes of parameters, gradients and optimizer states a rank: the planner's numbers are the trainer's, to the
byte, on 1, 2 and 4 real ranks (8 with RANKS=8) and on 64 to 1,024 pretended ones."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
from kit.plans import CONFIG, mesh_of, run_ranks
from kit.shapes import rank_work

from mlpipe.plan.memory import rank_tensors
from mlpipe.plan.shapes.dense import Dense
from mlpipe.plan.tensors import total

pytestmark = pytest.mark.torch
RANKS = int(os.environ.get("RANKS", "4"))  # 8 pass too, and take twice as long


def test_states_are_the_trainers_to_the_byte(tmp_path: Path) -> None:
    output = tmp_path / "output"
    code = run_ranks(RANKS, "kit.states", str(tmp_path), output=output)
    assert code == 0, output.read_text()[-5000:]
    found = json.loads((tmp_path / "states.json").read_text())
    config = dataclasses.replace(CONFIG, vocab_size=250, dim=72, ffn_dim=100)
    for kind, strategy, world_size, measured in found:
        mesh = mesh_of(strategy, world_size)
        tensors = rank_tensors(rank_work(Dense(config).parameters, strategy, mesh, overlap=False))
        predicted = {key: total(getattr(tensors, key)) for key in measured}
        assert predicted == measured, (kind, strategy, world_size)
    seen = {(kind, strategy, world_size) for kind, strategy, world_size, _ in found}
    assert len(seen) == 1 + 4 + 5 * (RANKS // 4) + 3 * 5
    assert {world_size for _, _, world_size in seen} == {1, 2, 4, RANKS, 64, 256, 1024}
