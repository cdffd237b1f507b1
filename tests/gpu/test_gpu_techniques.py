"""Models, attention, experts, weights of few bits and optimizers on CUDA are those of a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from kit.on_gpu import (
    CPU,
    GPU,
    Training,
    batch_of,
    distance,
    figure,
    milliseconds,
    needs_gpu,
    plan_of,
    relative,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

from mlpipe._core.optimizers import OPTIMIZERS
from mlpipe._core.presets import PRESETS
from mlpipe.plan.model import AdapterPlan
from mlpipe.plan.updates import EmaPlan
from mlpipe.train.models import moe
from mlpipe.train.models.attention import causal_attention
from mlpipe.train.models.quantized_linear import dequantize, quantize, quantized_layers
from mlpipe.train.optim.clipping import clip_values, squared_norm
from mlpipe.train.optim.sender import Sender
from mlpipe.train.optim.update import averages_of
from mlpipe.train.parallel.attention_blocks import attend, attend_backward, merge

pytestmark = needs_gpu
CONFIGS = {
    "llama-4m": PRESETS["llama-4m"],
    "llama-25m": PRESETS["llama-25m"],
    "moe-8m": PRESETS["moe-8m"],
    "moe-8m, capacity": replace(PRESETS["moe-8m"], capacity_factor=1.25),
}


def passes(config, device, precision="fp32", like=None, batch=None):
    training = Training(plan_of(config, precision=precision), device, like)
    loss, count = training.forward_backward(batch or batch_of(config.vocab_size, 2, 256))
    return training, loss / count, training.gradients()


@pytest.mark.parametrize("name", CONFIGS)
def test_losses_and_gradients_are_the_cpus(name):
    config = CONFIGS[name]
    reference, loss, gradients = passes(config, CPU)
    _, on_gpu, gpu_gradients = passes(config, GPU, like=reference)
    _, cpu_bf16, cpu_bf16_gradients = passes(config, CPU, "bf16", reference)
    _, gpu_bf16, gpu_bf16_gradients = passes(config, GPU, "bf16", reference)
    apart = distance(gpu_gradients, gradients)
    noise, own = distance(cpu_bf16_gradients, gradients), distance(gpu_bf16_gradients, gradients)
    figure(f"{name}: loss of CUDA beside the CPU's, fp32", abs(on_gpu / loss - 1), "ratio")
    figure(f"{name}: gradients of CUDA beside the CPU's, fp32", apart, "ratio")
    figure(f"{name}: loss in bf16 beside fp32, CPU", abs(cpu_bf16 / loss - 1), "ratio")
    figure(f"{name}: loss in bf16 beside fp32, CUDA", abs(gpu_bf16 / loss - 1), "ratio")
    figure(f"{name}: gradients in bf16 beside fp32, CPU", noise, "ratio")
    figure(f"{name}: gradients in bf16 beside fp32, CUDA", own, "ratio")
    assert on_gpu == pytest.approx(loss, rel=1e-5)
    assert apart < 1e-4
    assert gpu_bf16 == pytest.approx(loss, rel=2e-3)
    assert own < 2 * noise + 1e-3


@pytest.mark.parametrize("name", ["llama-4m", "llama-4m, packed", "moe-8m", "moe-8m, capacity"])
def test_steps_are_the_same_to_the_bit_where_they_are_deterministic(name):
    """As a plan with `deterministic` sets it (plan/launch.py, session.py)."""
    config, found = CONFIGS[name.removesuffix(", packed")], []
    size, more = 4, dict[str, torch.Tensor]()
    if name.endswith("packed"):
        size, more = 1, {"document_lengths": torch.tensor([100, 37, 119])}
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error")
    try:
        for _ in range(2):
            training = Training(plan_of(config, precision="bf16"), GPU)
            losses = [training.step(batch_of(config.vocab_size, size, 256, n) | more) for n in range(3)]
            found.append((losses, training.weights()))
    finally:
        torch.set_deterministic_debug_mode(before)
    (losses, weights), (again, others) = found
    figure(f"{name}: deterministic losses", " ".join(f"{loss:.9g}" for loss in losses))
    assert losses == again
    assert all(torch.equal(weights[key], others[key]) for key in weights)


BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


@pytest.mark.parametrize("kv_heads", [8, 2])
def test_every_attention_kernel_gives_the_same(kv_heads):
    torch.manual_seed(0)
    shape, kv_shape = (2, 8, 512, 64), (2, kv_heads, 512, 64)
    wide = [torch.randn(one, device=GPU) for one in (shape, kv_shape, kv_shape, shape)]
    low = [one.bfloat16() for one in wide]

    def run(tensors, backends):
        q, k, v = (one.clone().requires_grad_() for one in tensors[:3])
        with sdpa_kernel(backends):
            y = causal_attention(q, k, v)
        y.backward(tensors[3].to(y.dtype))
        names = ("y", "q", "k", "v")
        return {n: t.detach().cpu() for n, t in zip(names, (y, q.grad, k.grad, v.grad), strict=True)}

    expected = run([one.double() for one in low], [SDPBackend.MATH])
    refused = []
    for name, backend in BACKENDS.items():
        try:
            found = run(low, [backend])
        except RuntimeError as error:
            if "No available kernel" not in str(error):
                raise
            refused.append(name)
            continue
        apart = distance(found, expected)
        figure(f"attention of {kv_heads} of 8 heads, {name}, bf16 beside fp64", apart, "ratio")
        assert apart < 1e-2, name
    figure(f"attention of {kv_heads} of 8 heads, refused by", " ".join(refused) or "nobody")
    assert not {"flash", "math"} & set(refused)
    if kv_heads == 8:
        assert not refused
    unasked = run(low, list(BACKENDS.values()))
    assert distance(unasked, expected) < 1e-2
    plain = run([one.float() for one in low], list(BACKENDS.values()))
    figure(f"attention of {kv_heads} of 8 heads, unasked, fp32 beside fp64", distance(plain, expected))
    assert distance(plain, expected) < 1e-4


def test_attention_put_together_of_blocks_is_that_of_the_whole():
    """As a rank of `cp` computes it: late queries see early keys, and their own; two query heads share one of
    keys and values."""
    torch.manual_seed(0)
    q, k, v, upstream = (torch.randn(2, heads, 512, 64, device=GPU).bfloat16() for heads in (8, 4, 4, 8))
    whole = [one.clone().requires_grad_() for one in (q, k, v)]
    y = causal_attention(*whole)
    y.backward(upstream)
    (q0, q1), (k0, k1), (v0, v1), (grad0, grad1) = (one.chunk(2, dim=2) for one in (q, k, v, upstream))
    (out0, sums0), (out1, sums1) = (attend(*one, causal=True) for one in ((q0, k0, v0), (q1, k1, v1)))
    out1 = out1.float()
    merge(out1, sums1, *attend(q1, k0, v0, causal=False))
    out1 = out1.bfloat16()
    early = attend_backward(grad0, q0, k0, v0, out0, sums0, causal=True)
    late = attend_backward(grad1, q1, k1, v1, out1, sums1, causal=True)
    across = attend_backward(grad1, q1, k0, v0, out1, sums1, causal=False)
    found = {
        "y": (out0, out1),
        "q": (early[0], late[0] + across[0]),
        "k": (early[1] + across[1], late[1]),
        "v": (early[2] + across[2], late[2]),
    }
    wanted = dict(zip(found, (y.detach(), *(one.grad for one in whole)), strict=True))
    apart = distance({name: torch.cat(parts, dim=2) for name, parts in found.items()}, wanted)
    figure("attention of blocks beside that of the whole, bf16", apart, "ratio")
    assert apart < 1e-2


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name", ["llama-4m", "llama-125m"])
def test_packed_samples_learn_as_each_by_itself(name, precision, monkeypatch):
    """Several samples in one row: by one kernel, but in fp32; in bf16 recomputed, but for what it gives."""
    from torch.nn.attention import varlen

    config = replace(PRESETS[name], num_layers=2, vocab_size=4096)
    lengths = [100, 37, 200, 175]
    batch = batch_of(config.vocab_size, 1, sum(lengths))
    calls, kernel = [], varlen.varlen_attn

    def counted(*args, **kwargs):
        calls.append(kwargs)
        return kernel(*args, **kwargs)

    counted.__kwdefaults__ = kernel.__kwdefaults__
    monkeypatch.setattr(varlen, "varlen_attn", counted)
    starts = [sum(lengths[:n]) for n in range(len(lengths))]
    parts = [
        {key: own[:, start : start + length].contiguous() for key, own in batch.items()}
        for start, length in zip(starts, lengths, strict=True)
    ]
    apart = Training(plan_of(config, precision=precision), GPU)
    losses = [apart.forward_backward(part) for part in parts]
    assert not calls
    again = precision == "bf16"
    mode = "selective" if again else "none"
    together = Training(plan_of(config, precision=precision, activation_checkpointing=mode), GPU, apart)
    loss, count = together.forward_backward({**batch, "document_lengths": torch.tensor(lengths)})
    gradients = distance(together.gradients(), apart.gradients())
    total = sum(one for one, _ in losses)
    figure(f"{name}, {precision}: packed loss beside that of each", abs(loss / total - 1), "ratio")
    figure(f"{name}, {precision}: packed gradients beside those of each", gradients, "ratio")
    assert count == sum(lengths)
    assert len(calls) == (0 if precision == "fp32" else (1 + again) * config.num_layers)
    assert loss == pytest.approx(total, rel=1e-5 if precision == "fp32" else 1e-3)
    assert gradients < (1e-4 if precision == "fp32" else 2e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_the_grouped_product_is_that_of_each_expert(dtype, monkeypatch):
    """Of 8 experts one has no row, and one has a single one."""
    torch.manual_seed(0)
    ends_E = torch.tensor([300, 300, 301, 700, 1000, 1500, 1999, 2048], dtype=torch.int32, device=GPU)
    rows, stacked = torch.randn(2048, 256, device=GPU), torch.randn(8 * 384, 256, device=GPU) / 16
    upstream = torch.randn(2048, 384, device=GPU)
    found = []
    for has_kernel in (True, False):
        if not has_kernel:
            monkeypatch.setattr(moe, "_has_kernel", lambda *_: False)
        x, weight = rows.to(dtype).requires_grad_(), stacked.clone().requires_grad_()
        y = moe.matmul_by_expert(x, weight, ends_E)
        y.backward(upstream.to(dtype))
        found.append({"y": y.detach().cpu(), "x": x.grad.cpu(), "weight": weight.grad.cpu()})
    grouped, looped = found
    apart = distance(grouped, looped)
    figure(f"grouped product beside a loop over experts, {dtype}", apart, "ratio")
    assert apart < (1e-5 if dtype == torch.float32 else 1e-2)
    assert not grouped["weight"][384:768].any(), "of an expert without a row"


def test_how_fast_the_grouped_product_is(monkeypatch):
    torch.manual_seed(0)
    num_experts, rows, dim, ffn = 64, 16_384, 2_048, 1_024
    ends_E = torch.arange(1, num_experts + 1, dtype=torch.int32, device=GPU) * (rows // num_experts)
    x = torch.randn(rows, dim, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(num_experts * ffn, dim, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.randn(rows, ffn, device=GPU, dtype=torch.bfloat16)

    def both() -> torch.Tensor:
        y = moe.matmul_by_expert(x, weight, ends_E)
        y.backward(upstream)
        x.grad = weight.grad = None
        return y

    together, grouped = both(), milliseconds(both)
    monkeypatch.setattr(moe, "_has_kernel", lambda *_: False)
    apart, looped = both(), milliseconds(both)
    flops = 3 * 2 * rows * dim * ffn
    figure("64 experts, forward and backward, grouped", grouped, "ms")
    figure("64 experts, forward and backward, one by one", looped, "ms")
    figure("64 experts, grouped", flops / grouped / 1e9, "TFLOPS")
    assert relative(together, apart) < 1e-2


@pytest.mark.parametrize("base", ["int8", "nf4"])
def test_weights_of_few_bits_are_those_of_a_cpu_and_adapters_learn_beside_them(base):
    torch.manual_seed(0)
    weights = torch.randn(96, 200)
    codes = quantize(weights, base)
    assert torch.equal(quantize(weights.to(GPU), base).cpu(), codes)
    spelled = dequantize(codes.to(GPU), 200, base).cpu()
    torch.testing.assert_close(spelled, dequantize(codes, 200, base), rtol=1e-6, atol=0)
    config = PRESETS["llama-4m"]
    plan = plan_of(config, adapter=AdapterPlan(rank=8, alpha=16.0, base=base), precision="bf16")
    plain = plan._replace(adapter=plan.adapter._replace(base=None))
    low, wide = Training(plan, GPU), Training(plain, GPU)
    layers = dict(quantized_layers(low.model.built.model))
    assert len(layers) == 7 * config.num_layers
    ours, theirs = low.model.built.model, wide.model.built.model
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            owner, _, last = name.rpartition(".")
            if owner in layers and last == "weight":
                parameter.copy_(layers[owner].weight)
            else:
                parameter.copy_(ours.get_parameter(name))
            if name.endswith("lora_B"):  # which begin as 0: nothing would flow through them
                parameter.normal_(std=0.02)
                ours.get_parameter(name).copy_(parameter)
    batch = batch_of(config.vocab_size, 2, 256)
    (loss, _), (expected, _) = low.forward_backward(batch), wide.forward_backward(batch)
    apart = distance(low.gradients(), wide.gradients())
    figure(f"{base}: loss beside that of weights spelled out", abs(loss / expected - 1), "ratio")
    figure(f"{base}: gradients of adapters beside those of weights spelled out", apart, "ratio")
    assert loss == pytest.approx(expected, rel=1e-4)
    assert apart < 1e-2


FAR = {"muon": 3e-2, "adamw8bit": 1e-2, "adamw4bit": 3e-2}  # products in bf16; borders between codes


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_updates_as_on_a_cpu(name):
    """Three updates by given gradients, with an average of the weights and both ways of clipping."""
    arguments = {
        key: list(a.default) if isinstance(a.default, tuple) else a.default
        for key, a in OPTIMIZERS[name].arguments.items()
    }
    config = replace(PRESETS["llama-4m"], num_layers=2, vocab_size=512)
    plan = plan_of(config, ema=EmaPlan(0.9))
    plan = plan._replace(optimizer=plan.optimizer._replace(name=name, args=arguments))
    on_cpu = Training(plan, CPU)
    on_gpu = Training(plan, GPU, on_cpu)
    pair = (on_cpu, on_gpu)
    before = on_cpu.weights()
    for number in range(3):
        draw = torch.Generator().manual_seed(number)
        own = [dict(one.model.built.model.named_parameters()) for one in pair]
        for key, parameter in own[0].items():
            parameter.grad = torch.randn(parameter.shape, generator=draw) * 10.0 ** -(number + 1)
            own[1][key].grad = parameter.grad.to(GPU, copy=True)
        norms = [float(squared_norm(one.model.shards)) for one in pair]
        assert norms[1] == pytest.approx(norms[0], rel=1e-5)
        for one in pair:
            clip_values(one.model.shards, 2.0 * 10.0 ** -(number + 1))
            one.update.step(lr=1e-2, scale=0.5)
    moved, expected = (
        {key: after - before[key] for key, after in one.weights().items()} for one in reversed(pair)
    )
    averages = [{s.name: own.cpu() for s, own in averages_of(one.update)} for one in pair]
    apart, of_averages = distance(moved, expected), distance(averages[1], averages[0])
    figure(f"{name}: updates of CUDA beside the CPU's", apart, "ratio")
    figure(f"{name}: averages of weights of CUDA beside the CPU's", of_averages, "ratio")
    assert apart < FAR.get(name, 1e-4)
    assert of_averages < 1e-3


def test_a_thread_that_sends_waits_for_the_device_and_the_device_for_it():
    """What goes to it is still being computed when it is given, and what it gives when it is used."""
    sender = Sender(GPU)
    big = torch.randn(4096, 4096, device=GPU)
    for number in range(5):
        x = big
        for _ in range(4):
            x = (x @ big).div_(64)
        given = x * number
        answer = sender.send(lambda given=given: F.relu(given @ big).sum(0))
        expected = F.relu(given @ big).sum(0)
        found = answer.wait() + 1
        assert relative(found.cpu(), (expected + 1).cpu()) < 1e-5
