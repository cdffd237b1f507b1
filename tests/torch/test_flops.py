"""The planner's formula against torch's counter, and the counter for models that have no formula."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mlpipe.plan.flops import num_flops_per_token
from mlpipe.plan.plan import Entry, ModelPlan
from mlpipe.plan.presets import PRESETS
from mlpipe.train.flops import count_flops_per_token, measure_peak

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
    formula = num_flops_per_token(config, seq_len)
    norms = (2 * config.num_layers + 1) * config.dim  # the formula counts every parameter, also these
    assert counted + 6 * norms == formula
    assert counted == pytest.approx(formula, rel=1e-3)


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
def test_the_measured_peak_is_that_of_a_machine(dtype):
    assert 1e8 < measure_peak(torch.device("cpu"), dtype, seconds=0.05) < 1e15
