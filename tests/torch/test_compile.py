"""What `compile` compiles: dynamo falls back to eager without a word, so it is counted."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch
from kit import budget, plans

from mlpipe._core.presets import MoeConfig
from mlpipe.plan.mesh import Mesh
from mlpipe.train.loss import IGNORED
from mlpipe.train.model import BuiltModel, LossModule
from mlpipe.train.models import moe
from mlpipe.train.models.llama import build_model
from mlpipe.train.models.quantized_linear import quantize_layers
from mlpipe.train.parallel import float8
from mlpipe.train.parallel.activation_checkpointing import checkpoint_activations
from mlpipe.train.parallel.parallelized_model import ParallelizedModel
from mlpipe.train.world import World

pytestmark = pytest.mark.torch
BLOCKS = 10  # more than dynamo compiles of one function before it gives up (8)


def counting_backend():
    from torch._dynamo.testing import CompileCounterWithBackend  # here: it takes seconds, in each process

    return CompileCounterWithBackend("aot_eager")


@pytest.mark.parametrize("mode", ["none", "none, nf4", "none, float8", "selective", "full", "full, experts"])
def test_all_blocks_share_one_compiled_graph(mode):
    """Experts count their rows in it, once a forward pass; weights of few bits are spelled out in it."""
    mode, _, kind = mode.partition(", ")
    has_experts, base, low = kind == "experts", kind == "nf4", kind == "float8"
    if has_experts and torch.__version__.startswith("2.11."):
        pytest.xfail("it traces products of experts in bf16 alone, and here they are in fp32: see moe.py")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    config = replace(plans.CONFIG, num_layers=BLOCKS)
    gradients, counts_LE = [], torch.zeros(BLOCKS, 4, dtype=torch.int64)
    if has_experts:
        sizes = {**asdict(config), "dim": 32, "ffn_dim": 32}
        config = MoeConfig(
            **sizes, num_experts=4, experts_per_token=2, num_shared_experts=1, balance_rate=0.01
        )
    # the last two, in bf16 and fp32, say how far float8 is from what is exact
    runs = [(low, False, True), (low, True, True), *([(False, False, True), (False, False, False)] * low)]
    counter = counting_backend()
    for in_float8, compiled, in_bf16 in runs:
        torch.manual_seed(0)
        model = (moe.build_model if has_experts else build_model)(**asdict(config))
        model.init_weights()
        if base:
            names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
            quantize_layers(model, [name for name in names if name.startswith("layers.")], "nf4")
        if in_float8:
            built = BuiltModel(None, model, list(model.layers), False, None)
            float8.apply(ParallelizedModel(built, None), World(Mesh(), 0, torch.device("cpu")), None)
        if has_experts and compiled:
            for block, counts_E in zip(model.layers, counts_LE, strict=True):
                block.mlp.counted = counts_E
        if mode != "none" and compiled:
            checkpoint_activations(list(model.layers), mode)
        if compiled:
            for block in model.layers:
                block.compile(backend=counter)
        for _ in range(2):
            ids = torch.arange(64).reshape(2, 32)
            # a rounding to bf16 may be another expert
            with torch.autocast("cpu", torch.bfloat16, enabled=in_bf16 and not has_experts):
                logits = model(ids)
            logits.float().square().mean().backward()
        mlp = model.layers[0].mlp
        behind = model.embed_tokens if base else (mlp.shared_experts if has_experts else mlp).up_proj
        gradients.append(behind.weight.grad)
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    budget.within("a compiled step", {"graphs": counter.frame_count, "graph breaks": breaks})
    assert counter.frame_count  # something was compiled
    if low:
        # a block's own rounding to bf16 moves numbers into another of float8's steps, from block to block;
        # but compiled they are as far from what is exact, and a graph that drops float8 is as near as bf16
        *others, exact = gradients
        as_it_is, in_graph, without = (float((one - exact).norm() / exact.norm()) for one in others)
        assert in_graph == pytest.approx(as_it_is, rel=0.25)
        assert in_graph > 4 * without
    else:
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-2, atol=1e-6)
    assert set(counts_LE.sum(1).tolist()) == {2 * 2 * 64 if has_experts else 0}


def test_a_whole_model_and_its_loss_are_one_graph():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    ids = torch.arange(64).reshape(2, 32)
    batch = {"inputs": ids, "targets": torch.where(ids % 5 == 0, IGNORED, ids)}
    found = []
    counter = counting_backend()
    for compiled in (False, True):
        torch.manual_seed(0)
        model = build_model(**asdict(plans.CONFIG))
        model.init_weights()
        module = LossModule(model, "cpu", "bf16")
        if compiled:
            module.compile(backend=counter)
        loss, count = module(batch)
        loss.backward()
        found.append((loss.detach(), count, model.layers[0].mlp.up_proj.weight.grad))
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    budget.within("a compiled step", {"graphs": counter.frame_count, "graph breaks": breaks})
    assert counter.frame_count == 1
    torch.testing.assert_close(found[1], found[0], rtol=1e-2, atol=1e-5)


def test_a_block_keeps_a_forward_of_its_own_under_checkpointing():
    block = torch.nn.Linear(4, 4)
    block.forward = lambda x: x * 3  # as a library that patches instances does
    checkpoint_activations([block], "full")
    x = torch.ones(2, 4, requires_grad=True)
    block(x).sum().backward()
    assert torch.equal(x.grad, torch.full((2, 4), 3.0))
