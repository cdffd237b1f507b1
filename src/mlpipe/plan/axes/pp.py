"""The ranks of this axis have one stage of the model each, or several: `shapes/shape.py`'s `Part` says which
blocks. Microbatches go from rank to rank, and a rank holds those that have not come back; until the first one
comes, and when the last one is gone, it is idle."""

from __future__ import annotations

from dataclasses import replace

from mlpipe._core.pipelines import stages_per_rank
from mlpipe.plan.axes.axis import Layout, Passes, RankWork
from mlpipe.plan.pipelining import bubble_passes, num_held
from mlpipe.plan.sizes import GATHER_BUCKET_BYTES
from mlpipe.plan.tensors import WEIGHT_BYTES, RankTensors, Tensors, total
from mlpipe.plan.wire import Wire


def divide(tensors: RankTensors, work: RankWork) -> RankTensors:
    """Of each further microbatch that is held what autograd saved, and on the last rank the gradient of its
    logits. Gradients of replicas are averaged when all passes are done, through one bucket."""
    layout, step = work.layout, work.step
    rank = 0 if step.part.is_first else layout.mesh.pp - 1 if step.part.is_last else 1
    held = num_held(layout.schedule, rank, layout.mesh.pp, step.accumulation)
    more = int((held - 1) * (total(tensors.saved) + work.activations.logit_bytes / 2))
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


def exposed_seconds(passes: Passes, wire: Wire, layout: Layout) -> float:
    """What a rank is idle, with the transfers that stand before the first microbatch and behind the last: on
    a CPU all of them, as there they take the cores that compute. The residual stream travels in fp32."""
    num_ranks, schedule = layout.mesh.pp, layout.schedule
    forward, backward = bubble_passes(schedule, num_ranks)
    idle = forward * passes.forward + backward * passes.backward
    num_bytes = passes.stream_bytes * WEIGHT_BYTES // passes.width
    each = wire.send(num_bytes, layout.mesh.world_size // num_ranks)
    number = num_ranks - 1 if passes.overlap else passes.accumulation * stages_per_rank(schedule)
    return idle + 2 * number * each
