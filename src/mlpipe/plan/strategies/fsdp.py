"""FSDP2, ZeRO-3: weights, gradients and optimizer states are split; each block is gathered when needed."""

from __future__ import annotations

from dataclasses import replace

from mlpipe.plan.memory import (
    ADAM_BYTES,
    COMPUTE_BYTES,
    GRADIENT_BYTES,
    WEIGHT_BYTES,
    Counts,
    MemoryEstimate,
    Work,
    sparing_holes,
)
from mlpipe.plan.plan import Mesh
from mlpipe.plan.time import Passes, Wire, copy_seconds

SHARDS = "weights, gradients and optimizer states"
FLAGS: dict[str, bool] = {}


def mesh(num_nodes: int, devices_per_node: int) -> Mesh | str:
    return Mesh(dp_shard=num_nodes * devices_per_node)


def memory(counts: Counts, work: Work, mesh: Mesh) -> MemoryEstimate:
    return sharded(counts, work, mesh, reshard=True)


def sharded(counts: Counts, work: Work, mesh: Mesh, *, reshard: bool) -> MemoryEstimate:
    """All states split over `dp_shard`; besides, whole: the parameters of all blocks in the compute dtype,
    under `reshard` of the current and the prefetched one, what is outside the blocks in fp32 with its
    gradients, and the larger of what reductions hold: a block's gradients with their fp32 input, or the fp32
    input of what is outside. Accumulation keeps the gradients of all microbatches whole, in fp32, until the
    last one sends them, unless each does."""
    width = COMPUTE_BYTES[work.precision]
    share = counts.share(mesh.dp_shard)
    unsent = GRADIENT_BYTES * counts.total if work.accumulation > 1 and not work.reduce_every else 0
    gathered_blocks = width * (2 * counts.block if reshard else counts.total - counts.outside)
    gathered = gathered_blocks + (WEIGHT_BYTES + GRADIENT_BYTES) * counts.outside
    reducing = max((width + GRADIENT_BYTES) * counts.block, GRADIENT_BYTES * counts.outside)
    states = (WEIGHT_BYTES + ADAM_BYTES) // WEIGHT_BYTES * counts.small(mesh.dp_shard)
    found = MemoryEstimate(
        parameters=WEIGHT_BYTES * share,
        gradients=GRADIENT_BYTES * share + unsent,
        optimizer=ADAM_BYTES * share,
        activations=work.held,
        logits=work.logits,
        buffers=gathered + reducing,
        # the holes of weights that were gathered stay, though these are not alive at once
        holes=sparing_holes(
            states + counts.small(1, width) + (counts.small(1) if unsent else 0) + work.small
        ),
    )
    stays = 0 if reshard else gathered_blocks
    return replace(found, **_with_gloo(counts, work, found, stays, unsent)) if work.gloo else found


def _with_gloo(counts: Counts, work: Work, found: MemoryEstimate, stays: int, unsent: int) -> dict[str, int]:
    """On a CPU nothing runs ahead and what is freed is gone, so the peak is that of one of four moments: the
    loss, with the buffer of the last gathering; the backward pass of the last block; the reduction of its
    gradients and that of what is outside. gloo clones what it reduces (torch, ProcessGroupGloo.cpp)."""
    width, block, outside = COMPUTE_BYTES[work.precision], counts.block, counts.outside
    states = found.parameters + found.optimizer + unsent
    num_blocks = max(1, (counts.total - outside) // max(1, block))
    current = stays or width * block
    whole = (WEIGHT_BYTES + GRADIENT_BYTES) * outside
    peak = states + max(
        work.activations + work.logits + WEIGHT_BYTES * outside + stays + width * block,
        work.activations + work.rebuilt + whole + current + (0 if stays else width * block),
        work.activations * (num_blocks - 1) // num_blocks + whole + current + 3 * GRADIENT_BYTES * block,
        found.gradients - unsent + whole + 2 * GRADIENT_BYTES * outside,
    )
    buffers = found.buffers + 2 * GRADIENT_BYTES * max(block, outside)
    return {"buffers": buffers, "reused": found.tensors - found.buffers + buffers - peak}


def exposed(passes: Passes, wire: Wire, mesh: Mesh) -> float:
    return traffic(passes, wire, mesh, reshard=True)


def traffic(passes: Passes, wire: Wire, mesh: Mesh, *, reshard: bool) -> float:
    """Each block is gathered before its forward pass, under `reshard` again before its backward pass and in
    every microbatch. In the last microbatch, or in every one, its gradients are scattered; in the last they
    are reduced over the copies of hsdp. One block's transfers run beside the computing of its neighbour (Zhao
    et al., PyTorch FSDP, 2023); the first gathering and the last reduction have no neighbour. What was
    gathered is copied out of its buffer, and what will be scattered into one, in the stream that computes
    (torch, _fsdp_collectives.py); a calibration of a CPU has measured these copies with the transfers."""
    speed = wire.hardware.speed
    shard, copies = mesh.dp_shard, mesh.dp_replicate
    block, outside = passes.block_params, passes.outside_params

    def reduction(num_params: int, number: int) -> float:
        last, scattered, summed = number == passes.accumulation - 1, 0.0, 0.0
        if last or passes.reduce_every:
            scattered = wire.scatter(GRADIENT_BYTES * num_params, shard)
        if last:
            summed = wire.all_reduce(GRADIENT_BYTES * num_params / shard, copies, stride=shard)
        return scattered + summed

    def copies_of(num_bytes: int, measured: float) -> float:
        return copy_seconds(2 * num_bytes, wire.hardware) if shard > 1 and not measured else 0.0

    gathers = 2 * passes.accumulation if reshard else 1
    gathered = passes.width * passes.num_blocks * block + WEIGHT_BYTES * outside
    total = gathers * copies_of(gathered, speed.gather_bytes_per_second)
    reductions = passes.accumulation if passes.reduce_every else 1
    total += reductions * copies_of(GRADIENT_BYTES * passes.num_params, speed.scatter_bytes_per_second)
    for number in range(passes.accumulation):
        gather, first = 0.0, 0.0
        if reshard or number == 0:
            gather = wire.gather(passes.width * block, shard)
            first = wire.gather(WEIGHT_BYTES * outside, shard)
        backward = reduction(block, number) + (gather if reshard else 0.0)
        if passes.overlap:
            total += first + gather + (passes.num_blocks - 1) * max(0.0, gather - passes.forward_block)
            total += passes.num_blocks * max(0.0, backward - passes.backward_block)
        else:
            total += first + passes.num_blocks * (gather + backward)
        total += (first if reshard else 0.0) + reduction(outside, number)
    return total


def updated(counts: Counts, mesh: Mesh) -> int:
    return counts.share(mesh.dp_shard)
