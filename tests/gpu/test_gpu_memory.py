"""Peaks of memory on CUDA are those of the plan; what waits on the host changes no loss, and losses that
never have all logits are those that have."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from kit.on_gpu import GPU, Training, batch_of, distance, figure, forget_memory, needs_gpu, plan_of

from mlpipe._core.presets import PRESETS, LlamaConfig
from mlpipe.plan import memory
from mlpipe.plan.allocators.cuda import reserve
from mlpipe.plan.axes.axis import RankWork
from mlpipe.plan.mesh import Mesh
from mlpipe.plan.optimizers import optimizer_cost
from mlpipe.plan.pricing import layout_of
from mlpipe.plan.shapes.dense import Dense
from mlpipe.plan.shapes.shape import StepShape
from mlpipe.plan.work import TrainPlan
from mlpipe.train.loss import IGNORED, cross_entropy_sum
from mlpipe.train.parallel.fused_head import head_cross_entropy_sum

pytestmark = needs_gpu
GIB = 2**30


def work_of(plan: TrainPlan, config: LlamaConfig) -> RankWork:
    """As `plan/pricing.py` has it of one rank."""
    step = StepShape(
        plan.model.seq_len,
        plan.micro_batch,
        1,
        plan.precision,
        plan.activation_checkpointing,
        compiled=plan.compile != "off",
        offloads=plan.offload in ("activations", "all"),
        fused_head=plan.loss == "fused",
    )
    shape = Dense(config)
    optimizer = optimizer_cost(plan)
    activations = shape.activations(step, "cuda")
    return RankWork(shape.parameters, activations, step, layout_of("single", Mesh()), optimizer, overlap=True)


def peaks(plan: TrainPlan, config: LlamaConfig, num_steps: int = 3) -> tuple[int, int, list[float]]:
    """Bytes of tensors and bytes reserved at the peak of these steps, and losses. Batches are on the device
    already, and what is measured begins before the model is built."""
    forget_memory()
    held = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    training = Training(plan, GPU)
    batch = batch_of(config.vocab_size, plan.micro_batch, plan.model.seq_len)
    losses = [training.step(batch) for _ in range(num_steps)]
    found = (
        torch.cuda.max_memory_allocated() - held[0],
        torch.cuda.max_memory_reserved() - held[1],
        losses,
    )
    del training
    gc.collect()
    return found


# preset, precision, recomputation, micro-batch, tokens of a sample, loss
CASES = [
    ("llama-25m", "fp32", "none", 8, 1024, "logits"),
    ("llama-25m", "bf16", "none", 16, 1024, "logits"),
    ("llama-125m", "bf16", "none", 8, 1024, "logits"),
    ("llama-125m", "bf16", "selective", 8, 1024, "logits"),
    ("llama-125m", "bf16", "full", 8, 1024, "logits"),
    ("llama-125m", "fp32", "none", 4, 1024, "logits"),
    ("llama-350m", "bf16", "full", 4, 1024, "logits"),
    ("llama-125m", "bf16", "none", 8, 1024, "fused"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case)))
def test_the_peak_is_the_plans(case):
    preset, precision, checkpointing, micro_batch, seq_len, loss = case
    config = PRESETS[preset]
    plan = plan_of(
        config, seq_len, precision=precision, activation_checkpointing=checkpointing,
        micro_batch=micro_batch, loss=loss,
    )  # fmt: skip
    work = work_of(plan, config)
    expected = memory.estimate(work, "cuda")
    tensors, reserved, _ = peaks(plan, config)
    name = " ".join(map(str, case))
    figure(f"memory of {name}: tensors, measured", tensors / GIB, "GiB")
    figure(f"memory of {name}: tensors, of the plan", expected.tensors / GIB, "GiB")
    figure(f"memory of {name}: reserved, measured", reserved / GIB, "GiB")
    figure(f"memory of {name}: reserved, of the plan", (expected.total - expected.context) / GIB, "GiB")
    figure(f"memory of {name}: tensors, plan by measured", expected.tensors / tensors, "ratio")
    ratio = (expected.total - expected.context) / reserved
    figure(f"memory of {name}: reserved, plan by measured", ratio, "ratio")
    assert reserve(memory.rank_tensors(work), 1).context == expected.context
    if reserved > 2 * GIB:
        assert ratio == pytest.approx(1, abs=0.1), expected
        assert expected.tensors / tensors == pytest.approx(1, abs=0.1), expected


WIDE = replace(PRESETS["llama-25m"], dim=1024, num_heads=16, num_kv_heads=8, ffn_dim=2816)
# of which a block's input is many times its gradients, so that the peak is at the loss
NARROW = PRESETS["llama-25m"]


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_activations_on_the_host_change_no_bit_and_leave_the_device(checkpointing):
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error")  # else attention adds gradients in any order
    try:
        given = {"precision": "bf16", "activation_checkpointing": checkpointing, "micro_batch": 32}
        plan = plan_of(NARROW, 1024, **given)
        away = plan._replace(offload="activations")
        (most, _, losses), (less, _, others) = peaks(plan, NARROW), peaks(away, NARROW)
    finally:
        torch.set_deterministic_debug_mode(before)
    of_plan = work_of(plan, NARROW).held_bytes - work_of(away, NARROW).held_bytes
    figure(f"offload: activations, {checkpointing}: less at the peak", (most - less) / GIB, "GiB")
    figure(f"offload: activations, {checkpointing}: less by the plan", of_plan / GIB, "GiB")
    assert losses == others
    assert most - less == pytest.approx(of_plan, rel=0.25)


def test_an_optimizer_on_the_host_updates_as_on_the_device_and_has_left_it():
    plan = plan_of(WIDE, 256, precision="bf16", micro_batch=2)
    away = plan._replace(offload="optimizer")
    (most, _, losses), (less, _, others) = peaks(plan, WIDE), peaks(away, WIDE)
    tensors = [memory.estimate(work_of(one, WIDE), "cuda").tensors for one in (plan, away)]
    figure("offload: optimizer: less at the peak", (most - less) / GIB, "GiB")
    figure("offload: optimizer: less by the plan", (tensors[0] - tensors[1]) / GIB, "GiB")
    apart = max(abs(one / other - 1) for one, other in zip(losses, others, strict=True))
    figure("offload: optimizer: losses beside those on the device", apart, "ratio")
    assert losses == pytest.approx(others, rel=1e-3)
    assert most - less == pytest.approx(tensors[0] - tensors[1], rel=0.15)
    exact = plan._replace(precision="fp32")
    here = Training(exact, GPU)
    there = Training(exact._replace(offload="optimizer"), GPU, here)
    begun = here.weights()
    for number in range(3):
        for one in (here, there):
            one.step(batch_of(WIDE.vocab_size, 2, 256, number))
    moved = [{n: own - begun[n] for n, own in one.weights().items()} for one in (there, here)]
    figure("offload: optimizer: updates beside those on the device, fp32", distance(*moved), "ratio")
    assert distance(*moved) < 2e-2  # AdamW's first steps have the size of lr, however small a gradient is


def test_losses_without_all_logits_are_those_of_all():
    """By chunks of rows, by a compiled kernel, and with the head in one."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    tokens, dim, vocab_size = 12_288, 512, 32_768
    config = replace(PRESETS["llama-25m"], vocab_size=vocab_size, dim=dim)
    hidden = torch.randn(1, tokens, dim, device=GPU, dtype=torch.bfloat16)
    weight = torch.randn(vocab_size, dim, device=GPU) / dim**0.5
    targets = torch.randint(vocab_size, (1, tokens), device=GPU)
    targets[0, ::7] = IGNORED

    def of_logits(fused):
        def loss(h, w):
            return cross_entropy_sum(h @ w.to(h.dtype).T, targets, fused=fused)[0]

        return loss

    def plain(h, w):
        return F.cross_entropy(
            (h @ w.to(h.dtype).T).float().flatten(0, 1), targets.flatten(), reduction="sum"
        )

    found = {}
    for name, loss in {
        "plain": plain,
        "chunks": of_logits(fused=False),
        "compiled": of_logits(fused=True),
        "head": lambda h, w: head_cross_entropy_sum(h, w, targets)[0],
    }.items():
        for _ in range(2 if name == "compiled" else 1):  # the first time it is compiled
            h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
            forget_memory()
            held = torch.cuda.memory_allocated()
            total = loss(h, w)
            total.backward()
            peak = torch.cuda.max_memory_allocated() - held
        found[name] = float(total), {"h": h.grad.cpu(), "w": w.grad.cpu()}
        figure(f"loss, {name}: memory at the peak", peak / GIB, "GiB")
        if name in ("chunks", "head"):
            step = StepShape(tokens, 1, 1, "bf16", "none", compiled=False, fused_head=name == "head")
            of_plan = Dense(config).activations(step, "cuda").logit_bytes
            figure(f"loss, {name}: logits of the plan", of_plan / GIB, "GiB")
            found[f"{name}, ratio"] = of_plan / peak
        del h, w, total
    total, gradients = found["plain"]
    for name in ("chunks", "compiled", "head"):
        own, own_gradients = found[name]
        figure(f"loss, {name}: beside that of all logits", abs(own / total - 1), "ratio")
        figure(
            f"loss, {name}: gradients beside those of all logits", distance(own_gradients, gradients), "ratio"
        )
        assert own == pytest.approx(total, rel=1e-4), name
        assert distance(own_gradients, gradients) < 2e-2, name
    # besides there are the gradients of the head's weights, and its weights in bf16
    for name in ("chunks, ratio", "head, ratio"):
        assert 0.8 < found[name] < 1.1, (name, found[name])
