"""FLOPs a user's model does, and FLOP/s a device can do, where no table knows them."""

from __future__ import annotations

import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from mlpipe._core.errors import TrainError
from mlpipe.plan.model import ModelPlan
from mlpipe.plan.shapes import presets
from mlpipe.plan.work import TrainPlan
from mlpipe.train.data.microbatch import num_tokens
from mlpipe.train.debugger import no_breakpoints
from mlpipe.train.model import Batch, LossModule, construct, load_entry

PEAK_SECONDS = 0.3  # for which a rank measures its peak
_SIDE_CPU, _SIDE = 1024, 8192  # of the matrices: a few, and about 1.5, milliseconds each


@no_breakpoints()
def count_flops_per_token(plan: ModelPlan, collated: Batch) -> float | None:
    """Of matmuls, convolutions and attention in one forward and backward over the microbatch `collated`, on
    the meta device, divided by its tokens. None: the model cannot run there. Raises
    TrainError (input) when what it returns is no loss.

    The counter's convention is torchtitan's: no causal discount. Attention goes by its plain formula, since
    the fused CPU kernel is not counted (torch 2.11 to 2.14).
    """
    # with triton it takes 0.1 CPU seconds, of a rank that counts nothing, too
    from torch.utils.flop_counter import FlopCounterMode

    try:
        model = construct(load_entry(plan.build), plan.build, torch.device("meta"))
        module = LossModule(model.to("meta"), "cpu", entry=plan.build.entry)
        batch = {name: tensor.to("meta") for name, tensor in collated.items()}
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            loss, _ = module(batch)
            loss.backward()
    except TrainError:
        raise
    except Exception:  # a model may well do what meta tensors cannot, and only a number is lost
        return None
    return float(counter.get_total_flops()) / num_tokens(collated, plan.seq_len)


def recomputed_flops_per_token(plan: TrainPlan) -> float | None:
    """What activation checkpointing does again in the backward pass (`plan/recomputation.py`). None: not a
    preset of ours."""
    if plan.activation_checkpointing == "none":
        return 0.0
    shape = presets.planned(plan.model)
    if shape is None:
        return None
    return shape.recomputed_flops_per_token(plan.activation_checkpointing, plan.model.seq_len)


def measure_peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of this process' best square matmul within about PEAK_SECONDS: what its threads, or its GPU, can
    reach with everything that runs beside it. Not a datasheet's peak; say so where it is printed."""
    side = _SIDE_CPU if device.type == "cpu" else _SIDE
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    out = torch.mm(left, right)
    best = float("inf")
    deadline = time.perf_counter() + PEAK_SECONDS
    while best == float("inf") or time.perf_counter() < deadline:
        _wait(device)
        start = time.perf_counter()
        torch.mm(left, right, out=out)
        _wait(device)
        best = min(best, time.perf_counter() - start)
    return 2 * side**3 / best


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
