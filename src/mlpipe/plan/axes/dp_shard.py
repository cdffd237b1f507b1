"""Weights, gradients and optimizer states are split over the ranks of this axis; each block is gathered when
it is needed (FSDP2, ZeRO-3). Without `reshard_after_forward` gathered weights stay until the backward pass
has used them, so they are gathered once a step."""

from __future__ import annotations

from mlpipe.plan.axes.axis import Layout, Passes, RankWork
from mlpipe.plan.kernels import copy_seconds
from mlpipe.plan.shapes.shape import ParameterCounts
from mlpipe.plan.tensors import (
    COMPUTE_BYTES,
    GRADIENT_BYTES,
    WEIGHT_BYTES,
    Group,
    Moment,
    RankTensors,
    Tensors,
    total,
)
from mlpipe.plan.wire import Wire


def _absent_experts(work: RankWork) -> tuple[int, int]:
    """Parameters of a block's experts that never come together on a rank under `ep`, and of these the trained
    ones: those of others, and its own if nobody else has them, which FSDP need not gather."""
    mesh, experts = work.layout.mesh, work.expert_params
    if mesh.ep == 1:
        return 0, 0
    is_shared = work.layout.num_shards * mesh.dp_replicate > mesh.ep
    absent = experts - (experts // mesh.ep if is_shared else 0)
    frozen = work.parameters.block - work.parameters.trained.block
    return absent, max(0, absent - frozen)


def divide(tensors: RankTensors, work: RankWork) -> RankTensors:
    """All states are split; besides, whole: the parameters of all blocks in the compute dtype, with
    resharding of the current and the prefetched one, what is outside the blocks in fp32 with its gradients,
    and the larger of what reductions hold: a block's gradients with their fp32 input, or the fp32 input of
    what is outside. Accumulation keeps the gradients of all micro-batches whole, in fp32, until the last one
    sends them, unless each does. Under `ep` whole means without the experts of others."""
    layout, parameters = work.layout, work.parameters
    width, num_ranks = COMPUTE_BYTES[work.step.precision], layout.num_shards
    outside, trained = parameters.outside, parameters.trained
    absent, absent_trained = _absent_experts(work)
    block, absent_everywhere = parameters.block - absent, parameters.num_blocks * absent
    inside = parameters.total - outside - absent_everywhere
    sends_late = work.step.accumulation > 1 and layout.reduce_gradients == "last"
    spared = parameters.spared_bytes(width)
    gathered = width * inside - parameters.num_blocks * spared
    if layout.reshard_after_forward:
        gathered = 2 * (width * block - spared)
    gathered += WEIGHT_BYTES * outside + GRADIENT_BYTES * trained.outside
    reducing = max(
        (width + GRADIENT_BYTES) * (trained.block - absent_trained), GRADIENT_BYTES * trained.outside
    )
    unsent_ratio = 1 - parameters.num_blocks * absent_trained / max(1, trained.total)
    divided = tensors._replace(
        parameters=parameters.held(num_ranks, WEIGHT_BYTES) + _shown(work),
        gradients=trained.sharded(num_ranks, GRADIENT_BYTES),
        unsent=_scaled(trained.sharded(1, GRADIENT_BYTES), unsent_ratio) if sends_late else (),
        optimizer=work.optimizer_states(num_ranks),
        copies=_scaled(parameters.held(1, width), 1 - absent_everywhere / max(1, parameters.total)),
        buffers=gathered + reducing,
    )
    at_once = total(divided.gradients) + total(divided.unsent) + work.held_bytes + divided.buffers
    moments = (Moment(at_once),) if work.overlap else _one_after_another(divided, work)
    return divided._replace(moments=moments)


def shown_bytes(parameters: ParameterCounts, width: int) -> int:
    """What ranks show each other, of all of them: weights as they travel, and sums of gradients."""
    inside = parameters.total - parameters.outside
    return width * inside + WEIGHT_BYTES * parameters.outside + GRADIENT_BYTES * parameters.trained.total


def _shown(work: RankWork) -> Group:
    """A rank's own part of that. Each maps the others' parts as well, which are in memory once."""
    if work.layout.communication != "on_demand":
        return ()
    width = COMPUTE_BYTES[work.step.precision]
    return (Tensors(shown_bytes(work.parameters, width) // work.layout.num_shards, 1),)


def _scaled(group: Group, ratio: float) -> Group:
    return group if ratio == 1 else tuple(Tensors(int(ratio * one.num_bytes), one.number) for one in group)


def _one_after_another(tensors: RankTensors, work: RankWork) -> tuple[Moment, ...]:
    """Where nothing runs ahead the peak is that of one of five moments: the loss, with the buffer of the last
    gathering; the backward pass of the last block; the reduction of its gradients; the sum of those of a head
    that is the embedding; and the reduction of those that are outside the blocks."""
    parameters, unsent, saved = work.parameters, total(tensors.unsent), total(tensors.saved)
    absent, absent_trained = _absent_experts(work)
    width, block, outside = COMPUTE_BYTES[work.step.precision], parameters.block - absent, parameters.outside
    num_blocks = max(1, parameters.num_blocks)
    inside = parameters.total - outside - parameters.num_blocks * absent
    block_bytes = width * block - parameters.spared_bytes(width)
    whole_blocks = width * inside - parameters.num_blocks * parameters.spared_bytes(width)
    stays = 0 if work.layout.reshard_after_forward else whole_blocks
    reduced, reduced_outside = parameters.trained.block - absent_trained, parameters.trained.outside
    whole = WEIGHT_BYTES * outside + GRADIENT_BYTES * reduced_outside
    current = stays or block_bytes
    loss = saved + work.activations.logit_bytes + WEIGHT_BYTES * outside + stays + block_bytes
    backward = saved + work.rebuilt_bytes + whole + current + (0 if stays else block_bytes)
    earlier = saved * (num_blocks - 1) // num_blocks
    return (
        Moment(unsent + loss),
        Moment(unsent + backward),
        Moment(
            unsent + earlier + whole + current + 2 * GRADIENT_BYTES * reduced,
            reduce_scattered=GRADIENT_BYTES * reduced,
        ),
        Moment(unsent + total(tensors.gradients) + whole + work.activations.tied_bytes),
        Moment(
            unsent + total(tensors.gradients) + whole + GRADIENT_BYTES * reduced_outside,
            reduce_scattered=GRADIENT_BYTES * reduced_outside,
        ),
    )


def exposed_seconds(passes: Passes, wire: Wire, layout: Layout) -> float:
    """Each block is gathered before its forward pass, with resharding again before its backward pass and in
    every micro-batch. In the last micro-batch, or in every one, its gradients are scattered; in the last they
    are reduced over the replicas. One block's transfers run beside the computing of its neighbour (Zhao et
    al., PyTorch FSDP, 2023); the first gathering and the last reduction have no neighbour. What was gathered
    is copied out of its buffer, and what will be scattered into one, in the stream that computes (torch,
    _fsdp_collectives.py); a calibration of a CPU has measured these copies with the transfers. Under `ep` a
    rank has its experts only, which it shares with those that have the same ones, if there are any."""
    speed, reshard = wire.hardware.speed, layout.reshard_after_forward
    num_ranks, stride = layout.num_shards, layout.shard_stride
    num_replicas = layout.num_replicas if layout.exchanged_here is None else 1  # islands agree otherwise
    block, outside = passes.block_params, passes.outside_params
    reduces_each = layout.reduce_gradients == "every"
    ep = layout.mesh.ep
    experts = passes.expert_params if ep > 1 else 0
    trained_experts = max(0, experts - passes.frozen_block_params)
    elsewhere = 1 - 1 / ep if ep < num_ranks else 1  # share of the experts that is not copied here

    def reduction(num_params: int, number: int, experts: int = 0) -> float:
        last, scattered, summed = number == passes.accumulation - 1, 0.0, 0.0
        if last or reduces_each:
            scattered = wire.reduce_scatter(GRADIENT_BYTES * (num_params - experts), num_ranks, stride)
            if experts:
                own = GRADIENT_BYTES * experts / ep
                scattered += wire.reduce_scatter(own, num_ranks // ep, stride * ep)
        if last:
            share = GRADIENT_BYTES * num_params / num_ranks
            far = wire.over(layout.replicas_over(wire.hardware.devices_per_node))
            summed = far.all_reduce(share, num_replicas, layout.replica_stride)
        return scattered + summed

    def copies_of(num_bytes: float, measured: float) -> float:
        return 0.0 if measured else copy_seconds(2 * num_bytes, speed)

    num_gathers = 2 * passes.accumulation if reshard else 1
    gathered = passes.width * passes.num_blocks * (block - elsewhere * experts) + WEIGHT_BYTES * outside
    gathered -= passes.num_blocks * passes.spared_block_bytes
    exposed = num_gathers * copies_of(gathered, speed.gather_bytes_per_second)
    num_reductions = passes.accumulation if reduces_each else 1
    num_scattered = passes.num_trained_params - passes.num_blocks * elsewhere * trained_experts
    exposed += num_reductions * copies_of(GRADIENT_BYTES * num_scattered, speed.scatter_bytes_per_second)
    gather = wire.all_gather(passes.width * (block - experts) - passes.spared_block_bytes, num_ranks, stride)
    if experts:
        gather += wire.all_gather(passes.width * experts / ep, num_ranks // ep, stride * ep)
    first = wire.all_gather(WEIGHT_BYTES * outside, num_ranks, stride)
    last = passes.accumulation - 1
    alike = {0: 1, 1: last - 1, last: 1} if last > 1 else {0: 1, last: 1}  # micro-batches like this one
    for number, times in alike.items():
        shown = 0.0
        if number and not reshard:
            gather = first = 0.0
        backward = reduction(passes.trained_block_params, number, trained_experts)
        backward += gather if reshard else 0.0
        if passes.overlap:
            shown += first + gather
            shown += (passes.num_blocks - 1) * sum(wire.beside(gather, passes.forward_block))
            shown += passes.num_blocks * sum(wire.beside(backward, passes.backward_block))
        else:
            shown += first + passes.num_blocks * (gather + backward)
        shown += (first if reshard else 0.0) + reduction(passes.trained_outside_params, number)
        exposed += times * shown
    return exposed
