"""The ranks of this axis have one stage of the model each, or several: `shapes/shape.py`'s `Part` says which
blocks. Microbatches go from rank to rank, and a rank holds those that have not come back; until the first one
comes, and when the last one is gone, it is idle."""

from __future__ import annotations

from dataclasses import replace

from mlpipe.plan.axes import by_name
from mlpipe.plan.axes.axis import Layout, Passes, RankWork
from mlpipe.plan.pipelining import bubble_passes, num_held, num_transfers
from mlpipe.plan.sizes import GATHER_BUCKET_BYTES
from mlpipe.plan.tensors import COMPUTE_BYTES, WEIGHT_BYTES, RankTensors, Tensors, total
from mlpipe.plan.wire import Wire


def divide(tensors: RankTensors, work: RankWork) -> RankTensors:
    """Of each further microbatch that is held what autograd saved, on the last rank the gradient of its
    logits, and autocast's copies of the weights. Gradients of replicas are averaged when all passes are done,
    through one bucket."""
    layout, step = work.layout, work.step
    rank = 0 if step.part.is_first else layout.mesh.pp - 1 if step.part.is_last else 1
    held = num_held(layout.schedule, rank, layout.mesh.pp, step.accumulation)
    each = total(tensors.saved) + work.activations.logit_bytes / 2 + _cast_bytes(work)
    more = int((held - 1) * each)
    bucket = 0
    if layout.num_replicas > 1 and layout.mesh.dp_shard == 1:
        bucket = min(GATHER_BUCKET_BYTES, total(tensors.gradients))
    moments = tuple(replace(moment, alive=moment.alive + more + bucket) for moment in tensors.moments)
    return replace(
        tensors,
        saved=tuple(Tensors(int(held * one.num_bytes), int(held * one.number)) for one in tensors.saved),
        activation_bytes=tensors.activation_bytes + more,
        buffers=tensors.buffers + bucket,
        moments=moments,
    )


def _cast_bytes(work: RankWork) -> int:
    """Of the weights that autocast casts anew for each microbatch, which autograd keeps with it: of the head,
    and of blocks that neither FSDP casts nor recomputation casts again."""
    parameters, step = work.parameters, work.step
    if step.precision == "fp32":
        return 0
    num_params = parameters.outside if step.part.is_last else 0
    if work.layout.mesh.dp_shard == 1 and step.checkpointing == "none":
        num_params += parameters.total - parameters.outside
    return COMPUTE_BYTES[step.precision] * num_params


def exposed_seconds(passes: Passes, wire: Wire, layout: Layout) -> float:
    """What a rank is idle, with the transfers that stand before the first microbatch and behind the last: on
    a CPU all of the rank that has most, as there they take the cores that compute. The residual stream
    travels in fp32, of `tp` each rank's share. A pass of a stage that several ranks share has their
    collectives in it, as many forward as backward."""
    num_ranks, schedule = layout.mesh.pp, layout.schedule
    forward, backward = bubble_passes(schedule, num_ranks)
    shared: float = sum(
        by_name(axis).exposed_seconds(passes, wire, layout) / passes.accumulation / 2
        for axis in ("tp", "cp", "ep")
        if getattr(layout.mesh, axis) > 1
    )
    idle = forward * (passes.forward + shared) + backward * (passes.backward + shared)
    num_bytes = passes.stream_bytes * WEIGHT_BYTES // passes.width // layout.mesh.tp
    each = wire.send(num_bytes, layout.mesh.world_size // num_ranks)
    if passes.overlap:
        return idle + 2 * (num_ranks - 1) * each
    busiest = min(1, num_ranks - 2)  # one between two others, if there is one
    return idle + num_transfers(schedule, busiest, num_ranks, passes.accumulation) * each
