"""Where the stages of a user's own module begin if nobody says: such that the longest stage has as few FLOPs
as can be. Counted on one sample, so that every rank, and `mlpipe plan --trace`, finds the same."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from mlpipe._core.pipelines import stages_per_rank
from mlpipe.plan.mesh import PipelinePlan
from mlpipe.plan.shapes.traced import Child
from mlpipe.plan.stages import even_cut
from mlpipe.plan.work import TrainPlan
from mlpipe.train.contract import broken
from mlpipe.train.model import Batch
from mlpipe.train.parallel.sequence import check_sequence, sequence_of


def with_cut(plan: TrainPlan, model: nn.Module, sample: Batch) -> PipelinePlan:
    """The plan's pipeline, which says where the stages of a user's own model begin. `sample`: a batch of one
    or more. Raises TrainError (input) for a model that is no sequence, or of fewer children than stages."""
    pipeline = plan.pipeline
    assert pipeline is not None
    entry = plan.model.build.entry
    check_sequence(model, sample, entry)
    if pipeline.cut:
        return pipeline
    found = children(model, sample, plan.model.seq_len)
    cut = even(found, plan.mesh.pp * stages_per_rank(pipeline.schedule), entry)
    return pipeline._replace(cut=cut)


def even(found: tuple[Child, ...], num_stages: int, entry: str) -> tuple[str, ...]:
    """The names of the children with which stages begin, but for the first. Raises TrainError (input)."""
    try:
        return tuple(found[begin].name for begin in even_cut([one.flops for one in found], num_stages))
    except ValueError as error:
        raise broken(entry, str(error), "make pp smaller, or take a schedule of fewer stages") from None


@torch.no_grad()
def children(model: nn.Module, batch: Batch, seq_len: int) -> tuple[Child, ...]:
    """Those that a pipeline is cut between, in their order, each with what a sample takes of it alone: on the
    device of the model, be it `meta`. `batch`: of one sample or more."""
    ends: list[float] = [0.0]
    widths: list[int] = []

    def after(module: nn.Module, args: Any, output: Any) -> None:
        ends.append(float(counter.get_total_flops()))
        widths.append(sum(one.numel() for one in tree_leaves(output) if isinstance(one, Tensor)) // seq_len)

    named = sequence_of(model)
    hooks = [child.register_forward_hook(after) for child in named.values()]
    inputs = batch["inputs"][:1].to(next(model.parameters()).device)
    try:  # the fused attention of a CPU is not counted
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            model(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    flops = (end - begin for begin, end in pairwise(ends))
    return tuple(Child(*one) for one in zip(named, flops, widths, strict=True))
