"""What is compiled for a GPU gives what it gives as it is, in one graph, and float8 is float8 there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kit.on_gpu import GPU, Training, batch_of, distance, figure, needs_gpu, plan_of
from torch import nn

from mlpipe._core.presets import PRESETS
from mlpipe.plan.mesh import Mesh
from mlpipe.train.loss_scale import INITIAL, LossScale
from mlpipe.train.model import BuiltModel
from mlpipe.train.parallel import float8
from mlpipe.train.parallel.parallelized_model import ParallelizedModel
from mlpipe.train.world import World

pytestmark = needs_gpu
CONFIG = replace(PRESETS["llama-4m"], num_layers=10)  # more blocks than dynamo compiles of one function (8)
STEPS = 4
HOPPER = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
    reason="this GPU multiplies no float8: the test needs Ada, Hopper or later",
)


def losses_of(plan, num_steps, like=None, size=4, lr=1e-3):
    training = Training(plan, GPU, like)
    vocab_size, seq_len = plan.model.build.args["vocab_size"], plan.model.seq_len
    return training, [training.step(batch_of(vocab_size, size, seq_len, n), lr) for n in range(num_steps)]


@pytest.mark.parametrize(
    ("mode", "checkpointing", "kind"),
    [
        ("block", "none", "llama"),
        ("block", "selective", "llama"),
        ("block", "full", "moe"),
        ("model", "none", "llama"),
    ],
)
def test_a_compiled_training_has_the_losses_of_one_as_it_is(mode, checkpointing, kind, monkeypatch, tmp_path):
    from torch._dynamo.utils import counters

    for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):  # as render/pod.py has them on a cache
        monkeypatch.setenv(variable, str(tmp_path / variable))
    torch._dynamo.reset()
    counters.clear()
    config = CONFIG if kind == "llama" else PRESETS["moe-8m"]
    given = {"precision": "bf16", "activation_checkpointing": checkpointing}
    plain, losses = losses_of(plan_of(config, **given), STEPS)
    assert not counters["stats"]
    compiled = Training(plan_of(config, compile=mode, **given), GPU)
    found, graphs = [], []
    for number in range(STEPS):
        found.append(compiled.step(batch_of(config.vocab_size, 4, 256, number)))
        graphs.append(counters["stats"]["unique_graphs"])
    breaks = sum(counters["graph_break"].values())
    moved = distance(compiled.weights(), plain.weights())
    name = f"compile: {mode}, recomputation {checkpointing}, {kind}"
    apart = max(abs(one / other - 1) for one, other in zip(found, losses, strict=True))
    figure(f"{name}: losses beside those without", apart, "ratio")
    figure(f"{name}: weights beside those without", moved, "ratio")
    figure(f"{name}: graphs after each step", " ".join(map(str, graphs)))
    figure(f"{name}: graph breaks", breaks)
    files = [path for path in Path(tmp_path).rglob("*") if path.is_file()]
    figure(f"{name}: files in the caches", len(files))
    assert breaks == 0, dict(counters["graph_break"])
    assert graphs[0] > 0
    assert len(set(graphs[1:])) == 1, "compiled again after the second step"
    assert apart < (5e-3 if kind == "llama" else 1e-2)
    assert moved < 2e-2
    assert files, "nothing was compiled where the caches are"


def test_fp16_skips_what_overflows_and_learns():
    """A planted overflow: the scale begins where gradients are infinite, and is halved until they are not."""
    plan = plan_of(PRESETS["llama-1m"], 64, precision="fp16")
    training = Training(plan, GPU)
    module = training.model.built.module
    scale = training.loss_scale = LossScale(module, 8 * 64)
    assert scale.scale == INITIAL
    scale.load({"loss_scale": {"scale": 2.0**40, "good_steps": 0, "num_skipped": 0}})
    before, losses, skipped = training.weights(), [], []
    for number in range(60):
        held = training.weights() if number < 2 else None
        losses.append(training.step(batch_of(2048, 8, 64, number), 3e-3))
        skipped.append(scale.num_skipped)
        if held is not None:
            assert distance(training.weights(), held) == 0, "a step that overflowed has updated"
    figure("fp16: steps skipped", skipped[-1])
    figure("fp16: scale at the end", scale.scale)
    figure("fp16: first and last loss", f"{losses[0]:.4f} {losses[-1]:.4f}", "nats")
    assert skipped[1] == 2
    assert scale.scale == 2.0 ** (40 - skipped[-1])
    assert 8 < skipped[-1] < 40
    assert losses[-1] < losses[0] - 0.5
    assert distance(training.weights(), before) > 0


@HOPPER
@pytest.mark.parametrize("compiled", [False, True])
def test_products_are_in_float8_and_no_worse(compiled):
    """What bf16 differs from fp32 by is measured beside it: a graph that drops float8 is as near as bf16."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(512, 1024, bias=False) for _ in range(3)).to(GPU)
    for layer in layers[1:]:
        layer.load_state_dict(layers[0].state_dict())
    exact, half, low = layers
    float8.apply(
        ParallelizedModel(BuiltModel(None, low, [low], False, None), None), World(Mesh(), 0, GPU), None
    )
    if compiled:
        low.compile()
    x = torch.randn(2, 1024, 512, device=GPU)
    upstream = torch.randn(2, 1024, 1024, device=GPU)
    found = []
    for layer, lowers in ((exact, False), (half, True), (low, True)):
        own = x.clone().requires_grad_()
        with torch.autocast(GPU.type, torch.bfloat16, enabled=lowers):
            y = layer(own)
        y.backward(upstream.to(y.dtype))
        tensors = {"y": y, "x": own.grad, "weight": layer.weight.grad}
        found.append({key: tensor.detach().float().cpu() for key, tensor in tensors.items()})
    for key in ("y", "x", "weight"):
        bf16, fp8 = ({key: one[key]} for one in found[1:])
        of_bf16, of_float8 = (distance(one, {key: found[0][key]}) for one in (bf16, fp8))
        name = f"float8{', compiled' if compiled else ''}, {key}"
        figure(f"{name}: beside fp32", of_float8, "ratio")
        figure(f"{name}: bf16 beside fp32", of_bf16, "ratio")
        assert of_float8 > 4 * of_bf16, f"{key}: as near as bf16: it was not computed in float8"
        assert of_float8 < 0.1, key


@HOPPER
def test_a_training_in_float8_learns_as_in_bf16():
    """Compiled, 30 steps; as far from bf16 as a few times what bf16 is from fp32."""
    torch._dynamo.reset()
    config = replace(PRESETS["llama-25m"], num_layers=4)
    plan = plan_of(config, precision="fp32")
    exact, fp32 = losses_of(plan, 30, size=8)
    del exact
    half = plan._replace(precision="bf16")
    begin = Training(plan, GPU)
    bf16 = losses_of(half, 30, begin, size=8)[1]
    low = losses_of(half._replace(float8=True), 30, begin, size=8)[1]
    compiled = losses_of(half._replace(float8=True, compile="block"), 30, begin, size=8)[1]

    def last(losses: list[float]) -> float:
        return sum(losses[-5:]) / 5

    noise, fallen = abs(last(bf16) - last(fp32)), fp32[0] - last(fp32)
    figure("float8: loss of the last five steps, fp32", last(fp32), "nats")
    figure("float8: loss of the last five steps, bf16", last(bf16), "nats")
    figure("float8: loss of the last five steps, float8", last(low), "nats")
    figure("float8: loss of the last five steps, float8 compiled", last(compiled), "nats")
    figure("float8: loss fell in fp32 by", fallen, "nats")
    assert low != bf16
    assert compiled != bf16
    for losses in (low, compiled):
        assert abs(last(losses) - last(bf16)) < max(5 * noise, 0.03 * fallen)
