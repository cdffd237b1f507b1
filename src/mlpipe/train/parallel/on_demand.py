"""Weights are read from their owners when they are needed, and gradients are added to what the owners have
(On-Demand Communication, arXiv 2601.19362): ranks meet at the ends of a step only, whatever the number of
their microbatches, also none. The sums are those of collectives, in another order.

FSDP2 is told to gather and to scatter by `SharedMemory` (on GPUs `PeerMemory`) instead of by collectives.
What it scatters is zero here; the sums of all ranks are added when the step is over.

The ranks of `dp_shard` are on one node. Those of `dp_replicate`, on others, have copies, of which FSDP2 knows
nothing: it would sum their gradients within the backward pass, which a rank without a microbatch has not.
Each owner sums those of its part with the owners of the same part, once, when its node is done.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from mlpipe._core.errors import TrainError
from mlpipe.train.parallel.parallelized_model import ParallelizedModel
from mlpipe.train.parallel.shared_memory import SharedMemory
from mlpipe.train.shards import local_part
from mlpipe.train.world import World


class OnDemand:
    """Of a model that FSDP2 has split over the ranks of `dp_shard`."""

    def __init__(self, module: nn.Module, world: World) -> None:
        self.world = world
        self.num_owners = world.mesh.dp_shard
        self.owners = world.group("dp_shard")
        self.copies = world.group("dp_replicate") if world.mesh.dp_replicate > 1 else None
        self.units = [part for part in module.modules() if isinstance(part, FSDPModule)]
        self.publishing = False
        self.memory: SharedMemory | None = None
        if not hasattr(FSDPModule, "set_custom_all_gather"):
            raise TrainError(
                f"torch {torch.__version__} cannot be told how to gather weights",
                hint="write communication: resident, or install a newer torch",
                kind="input",
            )
        for number, unit in enumerate(self.units):
            unit.set_custom_all_gather(_Gather(self, number))  # type: ignore[arg-type]
            unit.set_custom_reduce_scatter(_Scatter(self, number))  # type: ignore[arg-type]

    def begin(self) -> None:
        """Before the first pass of a step or of an evaluation: when nobody reads any more, every rank shows
        what its weights are now."""
        first = self.memory is None
        if self.memory is None:
            numels = [sum(map(self._numel, _trained(unit))) for unit in self.units]
            self.memory = self._memory(numels)
        else:
            self.memory.fence()
        self.publishing = True
        for unit in self.units:
            unit.reshard()
            unit.unshard()
            unit.reshard()
        self.publishing = False
        if first:
            self.memory.connect()
        else:
            self.memory.fence()

    def end(self) -> None:
        """After the last backward pass of a step: gradients are the mean over the ranks of all nodes."""
        assert self.memory is not None
        self.memory.fence()
        for number, unit in enumerate(self.units):
            pushed, at = self.memory.gradients(number), 0
            if pushed is None:
                continue
            if self.copies is not None:
                dist.all_reduce(pushed, group=self.copies)
            pushed /= self.world.size
            for parameter in _trained(unit):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                local = local_part(parameter.grad)
                local += pushed[at : at + local.numel()].view(local.shape)
                at += self._numel(parameter)
            pushed.zero_()

    def _memory(self, gradient_numels: list[int]) -> SharedMemory:
        place = self.world.place("dp_shard")
        if self.world.device.type == "cpu":
            return SharedMemory(*place, gradient_numels, self.owners)
        from mlpipe.train.parallel.peer_memory import PeerMemory  # torch's part of it takes a while

        return PeerMemory(*place, gradient_numels, self.owners, self.world.device)

    def _numel(self, parameter: nn.Parameter) -> int:
        """Of a rank's rows, padded to those of the first rank."""
        return -(-parameter.shape[0] // self.num_owners) * math.prod(parameter.shape[1:])


def _trained(unit: FSDPModule) -> list[nn.Parameter]:
    """In the order in which FSDP2 lays their gradients behind each other."""
    state: Any = unit._get_fsdp_state()
    [group] = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    parameters = [one.sharded_param for one in group.fsdp_params] if group is not None else []
    return [parameter for parameter in parameters if parameter.requires_grad]


class _Unit:
    """How FSDP2 knows one way to communicate; it has private classes for them, which nothing asks for."""

    def __init__(self, ranks: OnDemand, number: int) -> None:
        self.ranks, self.number = ranks, number

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Unit):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        memory = self.ranks.memory
        assert memory is not None
        if self.ranks.publishing:
            memory.publish(self.number, input_tensor)
        else:
            memory.read(self.number, output_tensor)


class _Scatter(_Unit):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        memory = self.ranks.memory
        assert memory is not None
        memory.push(self.number, input_tensor)
        output_tensor.zero_()


def meet_seldom(model: ParallelizedModel, world: World) -> None:
    """Behind `fully_shard`."""
    ranks = OnDemand(model.built.module, world)
    model.before_passes = model.waits.timed(ranks.begin)
    model.after_backward = model.waits.timed(ranks.end)
