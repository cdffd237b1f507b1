"""Every rank of this axis has the whole model, or the same shards of it; gradients are averaged (DDP). With
`shard_optimizer` each of them keeps the optimizer states of, and updates, one slice of each parameter;
updated slices are gathered (ZeRO-1)."""

from __future__ import annotations

from mlpipe.plan.axes.axis import Exchanged, Layout, Passes, RankWork
from mlpipe.plan.kernels import copy_seconds
from mlpipe.plan.sizes import DDP_BUCKET_BYTES, GATHER_BUCKET_BYTES
from mlpipe.plan.tensors import GRADIENT_BYTES, WEIGHT_BYTES, Moment, RankTensors, total
from mlpipe.plan.wire import Wire

_CODING_PASSES = 12  # over the gradients in fp32, read or written


def divide(tensors: RankTensors, work: RankWork) -> RankTensors:
    """Gradients are views of the communication buckets (`gradient_as_bucket_view`), so the buckets cost
    nothing more; but they live from the first step on, so gradients take no other's place. Updated slices are
    gathered through buffers that hold the model once more, and a slice, when the activations are gone."""
    more = work.exchange_bytes if work.layout.exchanged_here is not None else 0
    if work.layout.mesh.dp_shard > 1:  # FSDP reduces over the replicas what it has scattered, in place
        return tensors._replace(buffers=tensors.buffers + more)
    if work.step.accumulation == 1:  # else they do already
        tensors = tensors.keeping_gradients()
    optimizer, updating = tensors.optimizer, []
    if work.layout.shard_optimizer:
        num_ranks = work.layout.num_updating_ranks
        share = WEIGHT_BYTES * work.parameters.trained.share(num_ranks)
        gathered = share * num_ranks
        more += gathered + share
        optimizer = work.optimizer_states(num_ranks)
        alive = total(tensors.gradients) + tensors.buffers + more
        updating = [Moment(alive, all_gathered=min(gathered, GATHER_BUCKET_BYTES))]
    moments = (*updating, *(one._replace(alive=one.alive + more) for one in tensors.moments))
    return tensors._replace(optimizer=optimizer, buffers=tensors.buffers + more, moments=moments)


def exposed_seconds(passes: Passes, wire: Wire, layout: Layout) -> float:
    """The gradients' buckets are reduced beside the last backward pass; the last bucket has nothing left to
    hide behind (Li et al., PyTorch Distributed, 2020). Nothing hides the gathering of updated slices: packed,
    sent and unpacked."""
    exchanged, is_sharded = layout.exchanged_here, layout.mesh.dp_shard > 1
    if is_sharded and exchanged is None:  # travels with what FSDP reduces
        return 0.0
    num_ranks, stride = layout.num_replicas, layout.replica_stride
    wire = wire.over(layout.replicas_over(wire.hardware.devices_per_node))
    if is_sharded and exchanged is not None:
        return _exchange_seconds(exchanged, passes, wire, layout)
    exposed = wire.all_reduce(GRADIENT_BYTES * passes.num_trained_params, num_ranks, stride)
    if exchanged is not None:
        exposed = _exchange_seconds(exchanged, passes, wire, layout)
    elif passes.overlap and layout.mesh.pp == 1:  # a pipeline's are reduced when all its passes are done
        last = wire.all_reduce(
            min(DDP_BUCKET_BYTES, GRADIENT_BYTES * passes.num_trained_params), num_ranks, stride
        )
        left, slower = wire.beside(exposed, passes.backward)
        exposed = max(last, left) + slower
    if layout.shard_optimizer:
        num_bytes = WEIGHT_BYTES * passes.num_trained_params
        exposed += wire.all_gather(num_bytes, layout.num_updating_ranks, stride * layout.mesh.cp)
        if not wire.hardware.speed.gather_bytes_per_second:  # else measured with it
            exposed += copy_seconds(2 * num_bytes, wire.hardware.speed)
    return exposed


def _exchange_seconds(exchanged: Exchanged, passes: Passes, wire: Wire, layout: Layout) -> float:
    """Behind the backward pass, and making it: adding up, coding, decoding twice, and what is left over. Of a
    rank's shards. What travels beside computing is of islands, over links that are slow enough to leave a
    CPU its cores."""
    num_ranks, stride = layout.num_replicas, layout.replica_stride
    coding = copy_seconds(_CODING_PASSES * GRADIENT_BYTES * exchanged.coded_params, wire.hardware.speed)
    seconds = wire.all_reduce(exchanged.reduced_bytes, num_ranks, stride)
    if exchanged.gathered_bytes:
        seconds += wire.gather_activations(exchanged.gathered_bytes * num_ranks, num_ranks, stride)
    hidden = exchanged.hidden_ratio * passes.accumulation * (passes.forward + passes.backward)
    return max(0.0, seconds / layout.num_shards - hidden) + coding / layout.num_shards
