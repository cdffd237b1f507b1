"""zero2, fsdp and hsdp: PyTorch's `fully_shard` (FSDP2) over the blocks, then over the rest.

fsdp reshards parameters after the forward (ZeRO-3), zero2 keeps them until the last backward of the step,
hsdp shards inside `dp_shard` and replicates over `dp_replicate`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from mlpipe._core.errors import TrainError
from mlpipe.plan.plan import TrainPlan
from mlpipe.train.parallel.parallel import Owned, Parallel, nothing, persistent_buffers
from mlpipe.train.parallel.waits import Waits


def device_mesh(plan: TrainPlan, device: torch.device) -> DeviceMesh:
    if plan.mesh.dp_replicate > 1:
        sizes = (plan.mesh.dp_replicate, plan.mesh.dp_shard)
        return init_device_mesh(device.type, sizes, mesh_dim_names=("dp_replicate", "dp_shard"))
    return init_device_mesh(device.type, (plan.mesh.dp_shard,), mesh_dim_names=("dp_shard",))


def shard(module: nn.Module, blocks: list[nn.Module], mesh: DeviceMesh, plan: TrainPlan) -> None:
    """Shards in place; parameters may still be on the meta device.

    Under bf16 only the blocks' parameters travel in bf16 and their gradients are reduced in fp32; the
    rest (embedding, last norm, head) stays fp32 and computes under autocast, so that the residual stream
    has the same dtype as under ddp. A user's blocks on a CPU are like the rest.
    """
    scalars = [name for name, parameter in module.named_parameters() if parameter.dim() == 0]
    if scalars:
        raise TrainError(
            f"a parameter without a dim cannot be split over ranks: {', '.join(scalars)}",
            hint="give it the shape (1,), or use strategy ddp or zero1",
            kind="input",
        )
    exact = MixedPrecisionPolicy(cast_forward_inputs=False)
    low = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    # On a CPU torch's norms refuse fp32 inputs with bf16 weights; mlpipe's own models see to that
    expects = plan.model.preset is not None or mesh.device_type != "cpu"
    for block in blocks:
        fully_shard(
            block,
            mesh=mesh,
            mp_policy=low if plan.precision == "bf16" and expects else exact,
            reshard_after_forward=plan.reshard_after_forward,
        )
    fully_shard(module, mesh=mesh, mp_policy=exact, reshard_after_forward=plan.reshard_after_forward)


def finish(module: nn.Module, mesh: DeviceMesh, plan: TrainPlan, device: torch.device) -> Parallel:
    """After the weights are real: the local views for the optimizer and the checkpoint."""
    num_copies = mesh.size(0) if mesh.ndim == 2 else 1
    copy = mesh.get_local_rank(0) if mesh.ndim == 2 else 0
    owned = []
    for name, parameter in module.named_parameters():
        tensor = cast(DTensor, parameter)
        _, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
        local = tensor.to_local().detach()
        # a rank without a row of this parameter: the offset of nothing is 0
        offset = tuple(offset) if local.numel() else (0,) * tensor.dim()
        owned.append(Owned(name, local, tuple(tensor.shape), offset, num_copies, copy, parameter))
    world_size = mesh.size()
    owned += persistent_buffers(module, dist.get_rank(), world_size)
    root = cast(FSDPModule, module)
    waits = Waits(device)
    waits.time_end_of_backward(module)
    time_collectives(module, waits)

    # As DDP's, which sends them at the same moment: rank 0's, before the first microbatch of a step
    buffers = list(module.buffers()) if any(item.is_buffer for item in owned) else []
    send_buffers = waits.timed(partial(_broadcast, buffers)) if buffers else nothing
    told = True  # what FSDP2 does unasked: reduce, and reshard behind the backward
    first = True

    @contextmanager
    def communicate(last: bool) -> Iterator[None]:
        nonlocal told, first
        if first:
            send_buffers()
        first = last
        if last != told:  # each of these calls walks all modules
            # under hsdp copies are reduced once in any case: until then the sums of each lie in its shards
            root.set_requires_gradient_sync(last or plan.reduce_gradients == "every")
            if mesh.ndim == 2:
                root.set_requires_all_reduce(last)
            if not plan.reshard_after_forward:  # weights stay gathered until the last microbatch, too
                root.set_reshard_after_backward(last)
            told = last
        yield
        waits.end()

    def gradients() -> list[torch.Tensor]:
        return [cast(Any, p.grad).to_local() for p in module.parameters() if p.grad is not None]

    return Parallel(module, owned, communicate, gradients, num_copies, nothing, waits)


def _broadcast(buffers: list[torch.Tensor]) -> None:
    """Rank 0's to all, in place: the call and the bucket's bytes of DDP."""
    group = dist.distributed_c10d._get_default_group()
    dist._broadcast_coalesced(group, buffers, 250 * 2**20, 0)  # type: ignore[attr-defined]


def time_collectives(module: nn.Module, waits: Waits) -> None:
    """Where FSDP2 waits, besides the end of the backward: for a block's parameters, and for the gradients of
    the block before (with gloo, in the collectives themselves). These methods are private; all of torch 2.11
    to 2.15 have them, and what a later one lacks is not counted."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            state = part._get_fsdp_state()
            for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
                for name in ("unshard", "wait_for_unshard", "post_backward"):
                    if hasattr(group, name):
                        setattr(group, name, waits.timed(getattr(group, name)))
