"""The planner's formula against torch's counter, and the counter for models that have no formula."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext

import pytest
import torch
from kit import plans
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mlpipe._core.presets import PRESETS
from mlpipe.plan.entry import Entry
from mlpipe.plan.model import ModelPlan
from mlpipe.plan.shapes.dense import Dense
from mlpipe.train import flops
from mlpipe.train.flops import count_flops_per_token, measure_peak, recomputed_flops_per_token
from mlpipe.train.model import build_model
from mlpipe.train.parallel.activation_checkpointing import checkpoint_activations

pytestmark = pytest.mark.torch

LLAMA = "mlpipe.train.models.llama:build_model"


def tokens(seq_len):
    ids = torch.zeros(2, seq_len, dtype=torch.int64)
    return {"inputs": ids, "targets": ids}


@pytest.mark.parametrize("name", ["llama-1m", "llama-8m", "llama-350m", "llama-1b", "llama-8b"])
@pytest.mark.parametrize("seq_len", [128, 1024])
def test_the_formula_is_what_the_counter_counts(name, seq_len):
    config = PRESETS[name]
    plan = ModelPlan(Entry(LLAMA, dataclasses.asdict(config)), name, seq_len, ())
    counted = count_flops_per_token(plan, tokens(seq_len))
    formula = Dense(config).flops_per_token(seq_len)
    norms = (2 * config.num_layers + 1) * config.dim  # the formula counts every parameter, also these
    assert counted + 6 * norms == formula
    assert counted == pytest.approx(formula, rel=1e-3)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_what_is_computed_again_is_what_the_counter_counts_more(tmp_path, mode):
    tokens_of = plans.write_tokens(tmp_path / "tokens")

    part = plans.train_plan(tmp_path, tokens_of, activation_checkpointing=mode).work

    def count(again: bool) -> float:
        built = build_model(part.model, seed=1, device_type="cpu")
        built.module.to_empty(device="cpu")
        if again:
            checkpoint_activations(built.blocks, mode)
        # `selective` keeps attention as the fused kernel that it is; `full` does it again, and not every
        # torch counts that kernel
        with (
            FlopCounterMode(display=False) as counter,
            sdpa_kernel(SDPBackend.MATH) if mode == "full" else nullcontext(),
        ):
            built.module(tokens(32))[0].backward()
        return counter.get_total_flops() / 64

    assert count(True) - count(False) == recomputed_flops_per_token(part)


class OwnLoss(torch.nn.Module):
    """Two matmuls over 30 features, 8 rows a sample, in a model that only has a loss."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(30, 50)
        self.second = torch.nn.Linear(50, 10)

    def loss(self, batch):
        return self.second(self.first(batch["x"])).sum(), torch.ones(())


class LooksAtNumbers(OwnLoss):
    def loss(self, batch):
        return super().loss({"x": batch["x"] * batch["x"].max().item()})


def test_a_users_own_model_is_counted():
    plan = ModelPlan(Entry(f"{__name__}:OwnLoss", {}), None, 8, ())
    first = 2 * (2 * 30 * 50)  # forward and its weights' gradient: the data needs none
    second = 3 * (2 * 50 * 10)
    assert count_flops_per_token(plan, {"x": torch.ones(4, 8, 30)}) == first + second


def test_a_model_that_cannot_run_on_meta_has_no_count():
    plan = ModelPlan(Entry(f"{__name__}:LooksAtNumbers", {}), None, 8, ())
    assert count_flops_per_token(plan, {"x": torch.ones(4, 8, 30)}) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_measured_peak_is_that_of_a_machine(dtype, monkeypatch):
    monkeypatch.setattr(flops, "PEAK_SECONDS", 0.05)
    assert 1e6 < measure_peak(torch.device("cpu"), dtype) < 1e15
