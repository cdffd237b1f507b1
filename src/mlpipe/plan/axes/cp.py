"""The ranks of this axis share each sequence: `shapes/shape.py`'s `Part` divides activations, logits and
computing. Keys and values of the whole sequence come together in every block; weights are the same, so they
are sharded over these ranks too, and gradients reduced (`Layout.num_shards`)."""

from __future__ import annotations

from dataclasses import replace

from mlpipe.plan.axes.axis import Layout, Passes, RankWork
from mlpipe.plan.tensors import RankTensors
from mlpipe.plan.wire import Wire


def divide(tensors: RankTensors, work: RankWork) -> RankTensors:
    """Besides, a block's keys and values of whole sequences, in a backward pass their gradients, and those of
    one chunk's queries, or on their way: alive while the activations of that block are."""
    gathered = 3 * work.kv_bytes
    moments = tuple(replace(moment, alive=moment.alive + gathered) for moment in tensors.moments)
    return replace(tensors, buffers=tensors.buffers + gathered, moments=moments)


def exposed_seconds(passes: Passes, wire: Wire, layout: Layout) -> float:
    """Keys and values are gathered in each forward pass of attention and in its backward pass, whose
    gradients of them go to their owners (Llama 3, 2024, section 3.3.2). As if computing hid none of it: only
    the diagonal blocks of attention are computed meanwhile."""
    num_ranks, stride = layout.mesh.cp, layout.mesh.tp
    gathers = 3 if passes.recomputes and not passes.keeps_attention else 2
    gathering = gathers * wire.gather_activations(passes.kv_bytes, num_ranks, stride)
    to_owners = wire.all_to_all(num_ranks * passes.kv_bytes, num_ranks, stride)
    return passes.accumulation * passes.num_blocks * (gathering + to_owners)
