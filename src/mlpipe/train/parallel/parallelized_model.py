"""What the techniques make of a model, so that loop, optimizer and checkpoint know none of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import nn

from mlpipe.train.model import BuiltModel
from mlpipe.train.parallel.waits import Waits
from mlpipe.train.shards import LocalShard, Split, local_part
from mlpipe.train.slices import Slice, slices_of
from mlpipe.train.world import EXPERT_SHARD, World


def no_gradient_sync(last: bool) -> AbstractContextManager[None]:
    """For one rank, which has nobody to send gradients to."""
    return nullcontext()


def nothing_before(counts: bool) -> None:
    """For models that need not hear of a forward pass."""


def nothing() -> None:
    """For techniques whose parameters are where they belong after the step, and who need not hear."""


class Kept(Protocol):
    """What a technique keeps between steps and a checkpoint has: as of an `Update`."""

    def state(self) -> list[LocalShard]: ...

    def scalars(self) -> dict[str, Any]: ...

    def load_scalars(self, scalars: dict[str, Any]) -> None:
        """Empty: the checkpoint has none of it."""

    def after_load(self) -> None: ...


@dataclass
class ParallelizedModel:
    """A model with the techniques applied to it.

    `module(batch)` gives (loss sum, target count) of this rank's microbatch; it is `built.module`, or what a
    technique wrapped around it. `before_forward(counts)` is called before the forward pass of a microbatch,
    which may not count (see `Microbatch`). `before_passes()` is called on all ranks before the first pass of
    a step or an evaluation, also of a rank without a microbatch. `gradient_sync(last)` is entered around each
    microbatch; after the backward of the last one the gradients are the mean over `World.num_gradient_ranks`;
    where `after_backward()` does something, after that, once all passes of the step are done and what they
    send. `after_step()` brings the updated parameters to every rank that computes with them,
    `after_evaluation()` gives up what forward passes without a backward leave. `waits` counts the time that
    all of these spend waiting for other ranks. `shards`: what this rank updates and stores. `step_metrics()`
    ends a step, and gives fields of its record that only this model knows, of rank 0. `partial`: modules and
    names of parameters whose gradients a rank has of its own tokens only, for `sum_partial_gradients`.
    `base`: names of parameters that have adapters beside them: no checkpoint has these. `kept`: of a
    technique that keeps something between steps. `set_buckets(num_bytes)`: from now on so
    many gradients are averaged together, None: as DDP does unasked; where a technique can. `bucket_choice`:
    what was measured for it, as a checkpoint has it.
    """

    built: BuiltModel
    module: nn.Module
    waits: Waits = field(default_factory=Waits)
    shards: list[LocalShard] = field(default_factory=list)
    partial: list[tuple[nn.Module, str]] = field(default_factory=list)
    base: frozenset[str] = frozenset()
    before_forward: Callable[[bool], None] = nothing_before
    before_passes: Callable[[], None] = nothing
    gradient_sync: Callable[[bool], AbstractContextManager[None]] = no_gradient_sync
    after_backward: Callable[[], None] = nothing
    after_step: Callable[[], None] = nothing
    after_evaluation: Callable[[], None] = nothing
    step_metrics: Callable[[], dict[str, Any]] = dict
    kept: Kept | None = None
    set_buckets: Callable[[int | None], None] | None = None
    bucket_choice: dict[str, Any] | None = None

    def stored(self) -> list[LocalShard]:
        """Of the shards those that a checkpoint has."""
        return [shard for shard in self.shards if shard.name not in self.base]

    def tied(self) -> dict[str, str]:
        """Further names of tied parameters, and the one under which each is stored."""
        stored = {id(item.parameter): item.name for item in self.shards if item.parameter is not None}
        parameters = self.built.module.named_parameters(remove_duplicate=False)
        return {
            name: stored[id(parameter)]
            for name, parameter in parameters
            if stored.get(id(parameter), name) != name
        }


def local_shards(
    module: nn.Module, world: World, blocks: Iterable[nn.Module] = (), waits: Waits | None = None
) -> list[LocalShard]:
    """Every parameter, whole or the part that slices and DTensor leave this rank, and every persistent
    buffer."""
    timed = (waits or Waits()).timed
    split_by_axis: dict[str, Split] = {}

    def split_over(axis: str, ranks: Any) -> Split:
        if axis not in split_by_axis:
            if EXPERT_SHARD in axis:
                place = ranks.get_local_rank(axis), ranks[axis].size()
                split_by_axis[axis] = Split(*place, ranks.get_group(axis), timed)
            else:
                split_by_axis[axis] = Split(*world.place(axis), world.group(axis), timed)
        return split_by_axis[axis]

    sliced = slices_of(module)
    stacked: dict[int, Any] = {
        id(parameter): owner.stacked_matrices
        for owner in module.modules()
        if hasattr(owner, "stacked_matrices")
        for parameter in owner.parameters(recurse=False)
    }
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    parameters = [
        replace(
            _parameter(name, parameter, sliced.get(id(parameter), ()), world, split_over),
            in_block=id(parameter) in inside,
            num_matrices=stacked.get(id(parameter), 1),
        )
        for name, parameter in module.named_parameters()
    ]
    return parameters + persistent_buffers(module, world)


def _parameter(
    name: str,
    parameter: nn.Parameter,
    cuts: tuple[Slice, ...],
    world: World,
    split_over: Callable[[str, Any], Split],
) -> LocalShard:
    """What DTensor says of it is of the slice that is left after `cuts`."""
    shape, offset, split = list(parameter.shape), [0] * parameter.dim(), []
    local = local_part(parameter).detach()
    if hasattr(parameter, "placements"):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        axes = zip(parameter.device_mesh.mesh_dim_names, parameter.placements, strict=True)
        split = [axis for axis, placement in axes if placement.is_shard()]
        if local.numel():  # else the offset of nothing, which is 0
            _, global_offset = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )
            offset = list(global_offset)
    for cut in reversed(cuts):
        offset[cut.dim] += cut.rank * shape[cut.dim]
        shape[cut.dim] *= cut.num_ranks
    replica_id, num_replicas = world.replica(*split, *(cut.axis for cut in cuts))
    return LocalShard(
        name,
        local,
        tuple(shape),
        tuple(offset),
        replica_id,
        num_replicas,
        parameter,
        split=split_over(split[0], parameter.device_mesh) if split else None,
        slices=cuts,
    )


def persistent_buffers(module: nn.Module, world: World) -> list[LocalShard]:
    """Buffers that belong to a checkpoint. No technique here shards them."""
    stored = module.state_dict(keep_vars=True)
    replica_id, num_replicas = world.replica()
    return [
        LocalShard(
            name,
            buffer,
            tuple(buffer.shape),
            (0,) * buffer.dim(),
            replica_id,
            num_replicas,
            is_buffer=not _is_updated(module, name),
        )
        for name, buffer in module.named_buffers()
        if name in stored
    ]


def _is_updated(module: nn.Module, name: str) -> bool:
    """Whether no forward writes this buffer, only the end of a step, and on all ranks alike: nobody needs to
    send it."""
    owner, _, buffer = name.rpartition(".")
    return buffer in getattr(module.get_submodule(owner), "updated_buffers", ())
