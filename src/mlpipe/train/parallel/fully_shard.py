"""The axis `dp_shard`, with `dp_replicate` around it: PyTorch's `fully_shard` (FSDP2) over the blocks, then
over the rest. Each rank keeps its part of weights, gradients and optimizer states. Ranks of a `cp` group have
the same weights: they share in the sharding.

`reshard_after_forward` of the plan gives a block's weights up after its forward (ZeRO-3); else they stay
until the last backward of the step (ZeRO-2). With a `dp_replicate` above 1, parts lie within `dp_shard` and
copies of them along `dp_replicate` (HSDP).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
import torch._dynamo  # as its first operation on a DTensor does, a second in each rank: here once a node
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from mlpipe._core.errors import TrainError
from mlpipe.plan.work import TrainPlan
from mlpipe.train.parallel.buffers import reading
from mlpipe.train.parallel.parallelized_model import ParallelizedModel
from mlpipe.train.parallel.rank_group import send_together
from mlpipe.train.parallel.waits import Waits
from mlpipe.train.precision import DTYPES
from mlpipe.train.slices import places
from mlpipe.train.world import World


def apply(model: ParallelizedModel, world: World, plan: TrainPlan) -> None:
    """Shards in place; parameters may still be on the meta device.

    Under bf16 or fp16 only the blocks' parameters travel in it and their gradients are reduced in fp32; the
    rest (embedding, head, all norms and routers) stays fp32 and computes under autocast, so that the residual
    stream has the same dtype as under DDP. A user's blocks on a CPU are like the rest.
    """
    module = model.built.module
    _refuse_scalars(module)
    if not model.built.on_meta:
        module.to(world.device)
    exact = MixedPrecisionPolicy(cast_forward_inputs=False)
    low = MixedPrecisionPolicy(
        param_dtype=DTYPES[plan.precision], reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    # On a CPU torch's norms refuse fp32 inputs with weights of fewer bits; mlpipe's own models see to that
    expects = plan.model.preset is not None or world.device.type != "cpu"
    of_blocks = low if plan.precision != "fp32" and expects else exact
    axes = ("dp_replicate", "dp_shard+cp") if _sums_over_copies(plan) else ("dp_shard",)
    mesh, reshard = world.device_mesh(*axes), plan.reshard_after_forward
    whole = _shard_experts(module, world, of_blocks, reshard) if plan.mesh.ep > 1 else set()
    with _refusing_codes():
        # The rest first: it takes along what of the blocks stays in fp32.
        apart = (
            [one for block in model.built.blocks for one in _exact_parts(block)] if of_blocks is low else []
        )
        inside = {parameter for block in model.built.blocks for parameter in block.parameters()}
        inside -= _own_parameters(apart)
        fully_shard(
            module, mesh=mesh, mp_policy=exact, reshard_after_forward=reshard, ignored_params=whole | inside
        )
        whole |= _own_parameters(apart)  # they are others since they are sharded
        for block in model.built.blocks:
            fully_shard(
                block, mesh=mesh, mp_policy=of_blocks, reshard_after_forward=reshard, ignored_params=whole
            )
    model.waits.time_end_of_backward(module)
    time_collectives(module, model.waits)
    sync = _GradientSync(model, plan)
    model.gradient_sync = sync.around
    if plan.communication == "on_demand":
        from mlpipe.train.parallel import on_demand

        on_demand.meet_seldom(model, world)
        begin = model.before_passes

        def before_passes() -> None:
            begin()
            sync.send_buffers()

        model.before_passes = before_passes
    model.after_evaluation = lambda: _forget_forwards(module)


def _exact_parts(block: nn.Module) -> list[nn.Module]:
    """Modules that compute in fp32 whatever the precision: to round their weights would undo that."""
    return [module for module in block.modules() if getattr(module, "computes_in_fp32", False)]


def _own_parameters(modules: list[nn.Module]) -> set[nn.Parameter]:
    return {parameter for module in modules for parameter in module.parameters(recurse=False)}


def _sums_over_copies(plan: TrainPlan) -> bool:
    """Whether FSDP2 does: islands agree otherwise, and on demand it is done when a step's passes are over."""
    return plan.islands is None and plan.communication != "on_demand"


def _shard_experts(
    module: nn.Module, world: World, policy: MixedPrecisionPolicy, reshard: bool
) -> set[nn.Parameter]:
    """Over the ranks that have the same ones, with copies along `dp_replicate`; those that nobody else has
    are given back."""
    mine = [(owner, name) for owner, name, cuts in places(module) if any(cut.axis == "ep" for cut in cuts)]
    if world.expert_shards is None:
        return {parameter for owner, name in mine if (parameter := owner._parameters[name]) is not None}
    for owner in {owner: None for owner, _ in mine}:
        fully_shard(owner, mesh=world.expert_shards, mp_policy=policy, reshard_after_forward=reshard)
    return set()


def _refuse_scalars(module: nn.Module) -> None:
    scalars = [name for name, parameter in module.named_parameters() if parameter.dim() == 0]
    if scalars:
        raise TrainError(
            f"a parameter without a dim cannot be split over ranks: {', '.join(scalars)}",
            hint="give it the shape (1,), or use strategy ddp or zero1",
            kind="input",
        )


@contextmanager
def _refusing_codes() -> Iterator[None]:
    """FSDP2 of torch 2.11 takes whatever it splits for a parameter with a gradient."""
    try:
        yield
    except RuntimeError as error:
        if "can require gradients" not in str(error):
            raise
        raise TrainError(
            f"torch {torch.__version__} cannot split parameters that are no floats, as weights of few bits "
            "are",
            where="train.adapter.base",
            hint="install torch 2.15, or use strategy ddp or zero1",
            kind="input",
        ) from None


class _GradientSync:
    """When FSDP2 reduces and reshards, a microbatch at a time. `told`: what it was told last; unasked it
    reduces, and reshards behind the backward."""

    def __init__(self, model: ParallelizedModel, plan: TrainPlan) -> None:
        self.model = model
        self.root = cast(FSDPModule, model.built.module)
        self.reduces_each = plan.reduce_gradients == "every"
        self.reshards = plan.reshard_after_forward
        self.has_copies = plan.mesh.dp_replicate > 1 and _sums_over_copies(plan)
        self.meets = plan.communication != "on_demand"
        self.told = True
        self.first = True
        self.buffers: list[torch.Tensor] | None = None
        self.reads_buffers = reading(model.built.module)

    @contextmanager
    def around(self, last: bool) -> Iterator[None]:
        """Around the forward and backward of a microbatch."""
        if self.first and self.meets:
            self.send_buffers()
        self.first = last
        if last != self.told:  # each of these calls walks all modules
            # copies are reduced once in any case: until then the sums of each lie in its parts
            self.root.set_requires_gradient_sync(last or self.reduces_each)
            if self.has_copies:
                self.root.set_requires_all_reduce(last)
            if not self.reshards:  # weights stay gathered until the last microbatch, too
                self.root.set_reshard_after_backward(last)
            self.told = last
        yield
        self.model.waits.end()

    def send_buffers(self) -> None:
        """As DDP's, which sends them at the same moment: rank 0's to all, in place, before the first
        microbatch of a step."""
        if self.buffers is None:  # not before the weights are real
            stored = any(item.is_buffer for item in self.model.shards)
            self.buffers = list(self.model.built.module.buffers()) if stored else []
        if self.buffers and self.reads_buffers():
            self.model.waits.timed(send_together)(self.buffers)


def _forget_forwards(module: nn.Module) -> None:
    """Gives up the weights that a forward pass without a backward leaves gathered, and the order of its
    blocks: the next backward would gather them once more, after that order. The lists are private; all of
    torch 2.11 to 2.15 have them."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
            state = part._get_fsdp_state()
            for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
                if group is not None:
                    getattr(group, "_post_forward_indices", []).clear()
                    getattr(group.comm_ctx, "post_forward_order", []).clear()


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
