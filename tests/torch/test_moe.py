"""A mixture of experts computes what a plain loop does, and trains the same under every strategy."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import plans

from mlpipe._core.presets import MOE, MoeConfig
from mlpipe.plan.entry import Entry
from mlpipe.plan.mesh import Mesh
from mlpipe.plan.model import ModelPlan
from mlpipe.train.model import BuiltModel
from mlpipe.train.models.moe import MoE, build_model
from mlpipe.train.parallel import balance_experts
from mlpipe.train.parallel.parallelized_model import ParallelizedModel
from mlpipe.train.world import World

pytestmark = pytest.mark.torch

CONFIG = MoeConfig(
    **{**vars(plans.CONFIG), "dim": 32, "ffn_dim": 32},
    num_experts=4,
    experts_per_token=2,
    num_shared_experts=1,
    balance_rate=0.01,
)
MODEL = ModelPlan(Entry(MOE, dataclasses.asdict(CONFIG)), "test", 32, ())
NARROW = ModelPlan(Entry(MOE, {**dataclasses.asdict(CONFIG), "capacity_factor": 1.0}), "test", 32, ())


def filled(moe: MoE, seed: int) -> MoE:
    torch.manual_seed(seed)
    with torch.no_grad():
        for tensor in [*moe.parameters(), *moe.buffers()]:
            tensor.normal_(std=0.5)
    return moe


def plain(moe: MoE, x_D: torch.Tensor) -> torch.Tensor:
    """One token, as the paper has it."""
    affinity = [torch.sigmoid(weight @ x_D) for weight in moe.gate.weight]
    bias = moe.gate.e_score_correction_bias.tolist()
    best = sorted(range(len(bias)), key=lambda e: -(affinity[e].item() + bias[e]))[: moe.experts_per_token]
    whole = sum(affinity[e] for e in best)
    width, dim = moe.experts.ffn_dim, len(x_D)

    def swiglu(gate, up, down):
        return down @ (torch.nn.functional.silu(gate @ x_D) * (up @ x_D))

    result = torch.zeros_like(x_D)
    for e in best:
        of, out = slice(e * width, (e + 1) * width), slice(e * dim, (e + 1) * dim)
        own = moe.experts
        result = result + affinity[e] / whole * swiglu(own.gate_proj[of], own.up_proj[of], own.down_proj[out])
    if (shared := moe.shared_experts) is not None:
        result = result + swiglu(shared.gate_proj.weight, shared.up_proj.weight, shared.down_proj.weight)
    return result


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 2), st.integers(0, 2**20))
def test_routing_is_that_of_a_plain_loop_over_tokens(num_experts, k, num_shared, seed):
    config = replace(
        CONFIG, dim=4, num_heads=2, num_kv_heads=1, ffn_dim=3, num_experts=num_experts,
        experts_per_token=min(k, num_experts), num_shared_experts=num_shared,
    )  # fmt: skip
    moe = filled(MoE(config).double(), seed)
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    expected = torch.stack([plain(moe, x_D) for x_D in x.flatten(0, 1)]).view_as(x)
    weight = torch.randn_like(x)
    wanted = torch.autograd.grad((expected * weight).sum(), [x, *moe.parameters()], allow_unused=True)
    found_y = moe(x)
    found = torch.autograd.grad((found_y * weight).sum(), [x, *moe.parameters()])
    torch.testing.assert_close(found_y, expected)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, torch.zeros_like(mine) if theirs is None else theirs)


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 5), st.integers(1, 3), st.floats(0.1, 4.0), st.integers(0, 2**20))
def test_who_finds_no_place_is_not_computed(num_experts, k, factor, seed):
    """An expert's places go to the tokens that like it best; an evaluation drops nobody."""
    k = min(k, num_experts)
    config = replace(
        CONFIG, dim=4, num_heads=2, num_kv_heads=1, ffn_dim=3, num_experts=num_experts,
        experts_per_token=k, num_shared_experts=1,
    )  # fmt: skip
    moe = filled(MoE(replace(config, capacity_factor=factor)).double(), seed)
    dropless = filled(MoE(config).double(), seed)
    x = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)
    share, experts = dropless.gate(x.flatten(0, 1))
    capacity = min(10, math.ceil(factor * 10 * k / num_experts))
    kept = torch.zeros(10, k, 1, dtype=torch.float64)
    for expert in range(num_experts):
        rows = sorted((-share[n, i].item(), n, i) for n, i in (experts == expert).nonzero().tolist())
        for _, n, i in rows[:capacity]:
            kept[n, i] = 1
    experts_of = dropless._all(x.flatten(0, 1), share, experts).unflatten(0, share.shape)
    expected = (experts_of * share.unsqueeze(-1) * kept).sum(1).view_as(x) + dropless.shared_experts(x)
    moe.counted = torch.zeros(num_experts + 1, dtype=torch.int64)
    found, weight = moe(x), torch.randn_like(x)
    torch.testing.assert_close(found, expected)
    assert moe.counted[-1] == 10 * k - int(kept.sum())
    assert moe.counted[:-1].tolist() == experts.flatten().bincount(minlength=num_experts).tolist()
    wanted = torch.autograd.grad((expected * weight).sum(), [x, *dropless.parameters()])
    gradients = torch.autograd.grad((found * weight).sum(), [x, *moe.parameters()])
    for mine, theirs in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(moe.eval()(x), dropless(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_grouped_kernel_is_the_loop(dtype, monkeypatch):
    moe = filled(MoE(CONFIG), 3).to(dtype)
    x = torch.randn(2, 16, 32).to(dtype)
    grouped = moe(x)
    grouped.float().square().sum().backward()
    gradients = [parameter.grad.clone() for parameter in moe.parameters()]
    moe.zero_grad()
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", None)
    monkeypatch.setattr("mlpipe.train.models.moe._has_kernel", lambda *_: False)
    looped = moe(x)
    looped.float().square().sum().backward()
    tolerance = {"rtol": 2e-2, "atol": 0.5} if dtype is torch.bfloat16 else {}
    torch.testing.assert_close(grouped, looped, **tolerance)
    for mine, other in zip(gradients, moe.parameters(), strict=True):
        torch.testing.assert_close(mine, other.grad, **tolerance)


def test_parameters_are_those_of_the_formula():
    with torch.device("meta"):
        model = build_model(**vars(CONFIG))
    assert sum(parameter.numel() for parameter in model.parameters()) == CONFIG.num_params()
    assert sum(rows * columns * number for rows, columns, number in CONFIG.tensors()) == CONFIG.num_params()
    idle = 2 * 3 * 32 * 32 * CONFIG.num_layers  # two experts of a block
    assert CONFIG.num_active_params() == CONFIG.num_params() - idle


VARIANTS = {
    1: {
        "single": {},
        "accumulated": {"micro_batch": 4, "accumulation": 4},
        "full": {"activation_checkpointing": "full"},
        "selective": {"activation_checkpointing": "selective"},
        "bf16": {"precision": "bf16"},
        "capacity": {"micro_batch": 8, "accumulation": 2, "model": NARROW},
        "capacity-full": {
            "micro_batch": 8,
            "accumulation": 2,
            "model": NARROW,
            "activation_checkpointing": "full",
        },
    },
    2: {
        "ddp": {"strategy": "ddp"},
        "zero1": {"strategy": "zero1"},
        "fsdp": {"strategy": "fsdp"},
        "bf16-fsdp": {"strategy": "fsdp", "precision": "bf16"},
        "compiled-fsdp": {"strategy": "fsdp", "compile": "block", "activation_checkpointing": "full"},
        "capacity-ep": {"mesh": Mesh(dp_shard=2, ep=2), "micro_batch": 8, "model": NARROW},
        "capacity-tp": {"mesh": Mesh(tp=2), "micro_batch": 8, "accumulation": 2, "model": NARROW},
    },
}


@pytest.mark.parametrize(("rate", "most"), [(0.02, 1.4), (0.0, 4.0)])
def test_biases_take_tokens_from_the_experts_that_have_most(rate, most):
    """Gates that like the first two experts best: in a hundred steps without any learning the loads come
    close, and without a rate they stay."""
    config = replace(CONFIG, num_experts=8, experts_per_token=2, num_shared_experts=0, balance_rate=rate)
    torch.manual_seed(0)
    moe = filled(MoE(config), 1)
    with torch.no_grad():
        moe.gate.e_score_correction_bias.zero_()
        moe.gate.weight.mul_(0.1)
        moe.gate.weight[:2] += 2.0 / config.dim  # of tokens whose mean is 1
    model = ParallelizedModel(BuiltModel(None, torch.nn.ModuleList([moe]), [], False, None), None)
    args = {**vars(config), "balance_rate": rate}
    plan = SimpleNamespace(model=SimpleNamespace(build=SimpleNamespace(args=args)))
    balance_experts.apply(model, World(Mesh(), 0, torch.device("cpu")), plan)
    x_BTD = 1 + torch.randn(1, 128, config.dim)
    loads = []
    for _ in range(100):
        with torch.no_grad():
            model.before_forward(True)
            moe(x_BTD)
            model.before_forward(False)  # of a microbatch that only keeps ranks in step
            moe(-x_BTD)
        model.after_backward()
        told = model.step_metrics()
        loads.append(told["expert_max_load_ratio"]["0"])
    assert loads[0] > 3.5
    assert (loads[-1] < most) == (rate > 0)
    if not rate:  # the same tokens in each step
        assert told["expert_max_average_load_ratio"]["0"] == pytest.approx(loads[0])
    if rate:
        biases = moe.gate.e_score_correction_bias
        assert biases[:2].max() < 0 < biases[2:].max()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("moe")
    plans.write_tokens(made / "tokens")
    return made


def planned(folder, name, world_size, **changes):
    given = {"strategy": "single" if world_size == 1 else "fsdp", "steps": 4, "every": 4, "model": MODEL}
    return plans.train_plan(
        folder / "store", folder / "tokens", world_size=world_size, run_id=name, **{**given, **changes}
    )


@pytest.fixture(scope="module")
def runs(folder):
    found = {}
    for world_size, variants in VARIANTS.items():
        made = [planned(folder, name, world_size, **changes) for name, changes in variants.items()]
        # experts' kernels, which inductor makes: the ring of GPUs
        plans.run_together(made, folder / f"world-{world_size}", compiler="aot_eager")
        for plan in made:
            found[plan.run_id] = [r for r in plans.records(folder / "store", plan) if r["kind"] == "step"]
    return found


def of(steps, field):
    return [step[field] for step in steps]


@pytest.mark.combines("compile", "dp_shard", "model with experts", "activation_checkpointing full")
@pytest.mark.parametrize(
    "name", ["accumulated", "full", "selective", "ddp", "zero1", "fsdp", "compiled-fsdp"]
)
def test_the_same_losses_and_loads_whatever_splits_the_work(runs, name):
    """The loads say that no token is counted twice, nor on one rank only."""
    assert of(runs[name], "loss") == pytest.approx(of(runs["single"], "loss"), rel=1e-5)
    assert of(runs[name], "grad_norm") == pytest.approx(of(runs["single"], "grad_norm"), rel=1e-3)
    assert of(runs[name], "expert_max_load_ratio") == of(runs["single"], "expert_max_load_ratio")


@pytest.mark.parametrize("name", ["capacity-full", "capacity-ep", "capacity-tp"])
def test_the_same_tokens_find_no_place_whatever_splits_the_work(runs, name):
    """As long as micro-batches are the same; recomputed blocks count nobody again."""
    assert of(runs[name], "loss") == pytest.approx(of(runs["capacity"], "loss"), rel=1e-5)
    assert of(runs[name], "expert_dropped_ratio") == of(runs["capacity"], "expert_dropped_ratio")
    assert all(0.01 < ratio < 0.5 for ratio in of(runs[name], "expert_dropped_ratio"))
    assert "expert_dropped_ratio" not in runs["single"][0]


def test_bf16_is_near(runs):
    assert of(runs["bf16"], "loss") == pytest.approx(of(runs["single"], "loss"), rel=1e-2)
    assert of(runs["bf16-fsdp"], "loss") == pytest.approx(of(runs["single"], "loss"), rel=1e-2)
