"""All tensors of a step on a GPU are there, and the host waits for none of them: followed without a GPU, by
tensors without values (`kit/fake_gpu.py`)."""

from __future__ import annotations

from dataclasses import replace
from itertools import starmap
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from kit.fake_gpu import GPU, model_of, pretend
from kit.on_gpu import plan_of

from mlpipe._core.optimizers import OPTIMIZERS
from mlpipe._core.presets import PRESETS
from mlpipe.plan.mesh import Mesh
from mlpipe.plan.model import AdapterPlan
from mlpipe.plan.updates import EmaPlan, IslandsPlan
from mlpipe.train.data.microbatch import Microbatch
from mlpipe.train.loss_scale import LossScale
from mlpipe.train.optim import adamw4bit
from mlpipe.train.optim.clipping import clip_values, squared_norm
from mlpipe.train.optim.islands import local_updates
from mlpipe.train.optim.make import make_update
from mlpipe.train.optim.quantized import dynamic_numbers, middles
from mlpipe.train.optim.update import averages_of
from mlpipe.train.parallel.waits import Waits
from mlpipe.train.schedules.accumulate import Sums
from mlpipe.train.world import World

pytestmark = pytest.mark.torch
WORLD = World(Mesh(), 0, GPU)
LLAMA = replace(PRESETS["llama-1m"], num_layers=1)
EXPERTS = replace(PRESETS["moe-2m"], num_layers=1)
LENGTHS = [20, 5, 39]
VARLEN = "torch_attn::_varlen_attn"


def batch_of(packed: bool) -> dict[str, torch.Tensor]:
    """On the GPU."""
    tokens = torch.zeros(1 if packed else 2, sum(LENGTHS), dtype=torch.int64, device=GPU)
    lengths = {"document_lengths": torch.tensor(LENGTHS).to(GPU)} if packed else {}
    return {"inputs": tokens, "targets": tokens, **lengths}


def passes(plan, mode, packed=False):
    """Two microbatches forward and backward, and what a step makes of their gradients, as `train/loop.py`."""
    model = model_of(plan, mode)
    with mode:
        if plan.precision == "fp16":
            LossScale(model.built.module, 64)
        sums, batch = Sums(WORLD), batch_of(packed)
        model.before_passes()
        for _ in range(2):
            model.before_forward(True)
            loss, count = model.module(batch)
            loss.backward()
            sums.add(Microbatch(batch, 64), loss.detach(), count)
        model.after_backward()
        told = torch.stack([sums.loss, sums.num_targets, squared_norm(model.shards)])
        clip_values(model.shards, 1.0)
        everything = [told, *model.module.parameters(), *model.module.buffers()]
        gradients = [one.grad for one in model.module.parameters() if one.requires_grad]
    assert {one.device for one in everything + gradients} == {GPU}
    return model


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (LLAMA, {"precision": "fp32"}),
        (LLAMA, {"precision": "fp16", "activation_checkpointing": "full"}),
        (LLAMA, {"precision": "bf16", "float8": True}),
        (LLAMA, {"precision": "bf16", "loss": "fused", "adapter": AdapterPlan(4, 8.0, base="nf4")}),
        (EXPERTS, {"precision": "bf16", "activation_checkpointing": "selective"}),
        (replace(EXPERTS, capacity_factor=1.25), {"precision": "bf16"}),
    ],
    ids=["fp32", "fp16 recomputed", "float8", "nf4 with the loss in the head", "experts", "with capacity"],
)
def test_all_of_the_passes_is_on_the_gpu_and_nobody_waits_for_it(config, changes, monkeypatch):
    passes(plan_of(config, 64, **changes), pretend(monkeypatch))


def test_packed_samples_are_one_kernel_whose_result_selective_recomputation_keeps(monkeypatch):
    mode = pretend(monkeypatch)
    passes(plan_of(LLAMA, 64, precision="bf16", activation_checkpointing="selective"), mode, packed=True)
    assert len(mode.calls[VARLEN]) == 2 * LLAMA.num_layers  # of two microbatches, and of none twice


def test_deterministic_packed_samples_take_the_kernel_that_is(monkeypatch):
    """torch 2.15 would take cuDNN's. Its number is the last argument, which torch 2.11 has not."""
    mode, before = pretend(monkeypatch), torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error")
    try:
        passes(plan_of(LLAMA, 64, precision="bf16"), mode, packed=True)
    finally:
        torch.set_deterministic_debug_mode(before)
    taken = {args[14] for args in mode.calls[VARLEN] if len(args) > 14}
    assert taken <= {torch.nn.attention.SDPBackend.FLASH_ATTENTION.value}


def test_updates_are_on_the_gpu_and_nobody_waits_for_it(monkeypatch):
    """Of all optimizers, with an average of the weights."""
    tables = [adamw4bit._LINEAR, *starmap(dynamic_numbers, ((8, True), (8, False), (4, True)))]
    for numbers in tables:  # of the process, made on the host
        middles(numbers)
    plan = plan_of(LLAMA, 64, ema=EmaPlan(0.9))
    mode = pretend(monkeypatch)
    model = model_of(plan, mode)
    for name, optimizer in OPTIMIZERS.items():
        arguments = {
            key: list(a.default) if isinstance(a.default, tuple) else a.default
            for key, a in optimizer.arguments.items()
        }
        with mode:
            update = make_update(plan.optimizer._replace(name=name, args=arguments), model.shards, plan.ema)
            for parameter in model.module.parameters():
                parameter.grad = torch.empty_like(parameter)
            update.step(lr=1e-3, scale=0.5)
            kept = [shard.local for shard in update.state()] + [own for _, own in averages_of(update)]
        assert {one.device for one in kept} == {GPU}, name


def test_what_islands_send_beside_computing_is_on_the_host(monkeypatch):
    """Of a thread beside the one that has NCCL's collectives; who waits for it sends from the GPU."""
    sent: list[str] = []

    def collective(*tensors, group):
        sent.extend(one.device.type for one in tensors)

    for name in ("all_reduce", "all_to_all_single", "all_gather_into_tensor"):
        monkeypatch.setattr(dist, name, collective)
    world = SimpleNamespace(
        place=lambda axis: (0, 2), group=lambda axis: None, group_of_its_own=lambda axis: None
    )
    mode = pretend(monkeypatch)
    for staleness, where in ((1, "cpu"), (0, "cuda")):
        model = SimpleNamespace(shards=[], waits=Waits())
        link = local_updates(IslandsPlan(4, staleness=staleness), None, model, world).link
        with mode:
            rows = torch.empty(2, 8, device=GPU)
            back = [link.all_reduce(rows), link.all_to_all(rows), link.all_gather(rows[:1])]
        assert {one.device for one in back} == {GPU}
        assert set(sent) == {where}
        sent.clear()
