"""Neighbours along `dp_shard` have different experts and send each other tokens, as
`train/parallel/experts.py` has it. How states are split follows from `dp_shard`, of which this is a part."""

from __future__ import annotations

from mlpipe.plan.axes.axis import Layout, Passes, RankWork
from mlpipe.plan.tensors import COMPUTE_BYTES, RankTensors
from mlpipe.plan.wire import Wire


def divide(tensors: RankTensors, work: RankWork) -> RankTensors:
    """What a rank gathers says `dp_shard`. Where nobody has the same experts FSDP casts none: autocast does,
    and its copies stay until the backward pass of their block; with recomputation there is one at a time.
    Tokens are taken to be spread evenly."""
    mesh, step = work.layout.mesh, work.step
    if step.precision == "fp32" or mesh.ep < work.layout.num_shards * mesh.dp_replicate:
        return tensors
    num_blocks = work.parameters.num_blocks if step.checkpointing == "none" else 1
    more = COMPUTE_BYTES[step.precision] * num_blocks * work.expert_params // mesh.ep
    moments = tuple(moment._replace(alive=moment.alive + more) for moment in tensors.moments)
    return tensors._replace(buffers=tensors.buffers + more, moments=moments)


def exposed_seconds(passes: Passes, wire: Wire, layout: Layout) -> float:
    """Experts wait for their rows, so nothing hides them. Which weights are gathered says `dp_shard`."""
    ep, number = layout.mesh.ep, passes.accumulation * passes.num_blocks
    stride = layout.mesh.tp * layout.mesh.cp
    rows = 4 + (2 if passes.recomputes else 0)
    each = wire.all_to_all(ep * passes.routed_bytes, ep, stride)
    return number * (rows * each + (2 if passes.recomputes else 1) * wire.all_to_all(0, ep, stride))
