"""What recomputed blocks keep waits on the host: the input of each is copied there in the forward pass, and
comes back for its backward pass, one block ahead. The last block's stays, which is needed next.

On a GPU copies go to and from pinned memory in a stream of their own, beside computing (tested in the ring
`gpu`); on CPUs a copy is one more tensor of the same memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from mlpipe.plan.work import TrainPlan
from mlpipe.train.parallel.parallelized_model import ParallelizedModel
from mlpipe.train.world import World


def apply(model: ParallelizedModel, world: World, plan: TrainPlan) -> None:
    """Of all blocks but the last one, which are recomputed. Names of parameters do not change."""
    host = Host(world.device)
    offload(model.built.blocks, host)
    begin, told = model.before_passes, model.step_metrics

    def before_passes() -> None:
        begin()
        host.num_bytes = 0

    model.before_passes = before_passes
    model.step_metrics = lambda: told() | {"offloaded_bytes": host.num_bytes}


def offload(blocks: list[nn.Module], host: Host) -> None:
    """Changes the forward of each but the last one, in place."""
    # a later torch shows the hooks what `selective` keeps as well, which they leave where it is
    warnings.filterwarnings("ignore", "A saved_tensors_hooks context", FutureWarning)
    for number, block in enumerate(blocks[:-1]):
        block.forward = partial(_forward, host, block.forward, number == 0)  # type: ignore[method-assign]


def _forward(host: Host, inner: Callable[..., Any], is_first: bool, *args: Any, **kwargs: Any) -> Any:
    """Of what autograd keeps only the first argument goes: others, such as tables of rotations, all blocks
    share."""
    if not torch.is_grad_enabled() or not args:
        return inner(*args, **kwargs)
    if is_first:
        host.last = None
    wanted = [args[0]]
    try:
        with saved_tensors_hooks(partial(host.pack, wanted), host.unpack):
            return inner(*args, **kwargs)
    finally:
        wanted.clear()  # autograd keeps the hook, which would keep the tensor


class Copy:
    """A tensor on the host. `before`: that of the block before, which is needed next. `back`: on its way, or
    arrived; `arrived`: a CUDA event."""

    def __init__(self, tensor: Tensor, before: Copy | None) -> None:
        on_gpu = tensor.is_cuda
        self.device = tensor.device
        self.tensor = torch.empty_like(tensor, device="cpu", pin_memory=on_gpu, requires_grad=False)
        self.before = before
        self.back: Tensor | None = None
        self.arrived: Any = None


class Host:
    """Of one rank. `last`: what was copied last in this forward pass. `num_bytes`: copied in this step."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.last: Copy | None = None
        self.num_bytes = 0

    def pack(self, wanted: list[Any], tensor: Tensor) -> Tensor | Copy:
        """What autograd keeps instead of `tensor`: a copy here if it is the one that is `wanted`."""
        if not wanted or not _is_same(tensor, wanted[0]):
            return tensor
        self.last = copy = Copy(tensor, self.last)
        self.num_bytes += tensor.nbytes
        if self.stream is None:
            copy.tensor.copy_(tensor.detach())
            return copy
        self.stream.wait_stream(torch.cuda.current_stream(copy.device))
        with torch.cuda.stream(self.stream):
            copy.tensor.copy_(tensor.detach(), non_blocking=True)
        tensor.record_stream(self.stream)  # its memory is free when it has been read
        return copy

    def unpack(self, kept: Tensor | Copy) -> Tensor:
        """What `pack` was given, on its device."""
        if isinstance(kept, Tensor):
            return kept
        if self.last is kept:
            self.last = None
        if self.stream is None:
            return kept.tensor.clone()
        tensor = self._bring(kept)
        current = torch.cuda.current_stream(kept.device)
        current.wait_event(kept.arrived)
        tensor.record_stream(current)
        kept.back = None
        if kept.before is not None:
            self._bring(kept.before)
            kept.before = None
        return tensor

    def _bring(self, copy: Copy) -> Tensor:
        """Begins it, unless it has begun."""
        assert self.stream is not None
        if copy.back is None:
            with torch.cuda.stream(self.stream):
                copy.back = copy.tensor.to(copy.device, non_blocking=True)
                copy.arrived = self.stream.record_event()
        return copy.back


def _is_same(tensor: Tensor, wanted: Any) -> bool:
    """Whether autograd was given another name of it."""
    return (
        isinstance(wanted, Tensor)
        and tensor.data_ptr() == wanted.data_ptr()
        and tensor.shape == wanted.shape
        and not tensor.is_meta
    )
