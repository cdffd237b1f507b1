"""Bytes per rank, by cause: tensors as the axes of the mesh divide them, then what the allocator makes of
them.

The trainer keeps fp32 weights, gradients and optimizer states whatever the precision; under bf16 and
fp16 the matmuls see copies of the weights in it, which are counted as buffers. Standard library only.
"""

from functools import lru_cache
from typing import NamedTuple

from mlpipe.plan import allocators
from mlpipe.plan.axes import active
from mlpipe.plan.axes.axis import RankWork
from mlpipe.plan.optimizers import OptimizerCost
from mlpipe.plan.shapes.shape import ParameterCounts
from mlpipe.plan.tensors import (
    COMPUTE_BYTES,
    GRADIENT_BYTES,
    WEIGHT_BYTES,
    Moment,
    RankTensors,
    total,
)


class MemoryEstimate(NamedTuple):
    """Bytes on one rank at the peak of a step. `buffers`: copies and communication. `context`: what the
    process holds before the first tensor. `slack`: what the allocator cannot use. `reused`: what is not alive
    at the same time, as gradients that come to life when activations die; subtracted."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    buffers: int
    context: int = 0
    slack: int = 0
    reused: int = 0

    @property
    def tensors(self) -> int:
        """Without context and slack."""
        states = self.parameters + self.gradients + self.optimizer
        return states + self.activations + self.logits + self.buffers - self.reused

    @property
    def total(self) -> int:
        """All that the process needs."""
        return self.tensors + self.context + self.slack

    def scaled(self, ratio: float) -> "MemoryEstimate":
        """By what finished runs needed; the difference counts as slack, which may so become negative."""
        return self._replace(slack=self.slack + int((ratio - 1) * self.total)) if ratio != 1 else self


def rank_tensors(work: RankWork, alone: RankTensors | None = None) -> RankTensors:
    """What a rank holds. `alone`: what `whole` says, of whoever asks for many layouts."""
    tensors = alone or whole(work)
    for axis in active(work.layout.mesh):
        tensors = axis.divide(tensors, work)
    kept = work.exchange_bytes
    if not kept or (work.layout.exchanged_here is not None and work.layout.mesh.world_size > 1):
        return tensors  # with what the axis keeps for it
    moments = tuple(one._replace(alive=one.alive + kept) for one in tensors.moments)
    return tensors._replace(buffers=tensors.buffers + kept, moments=moments)


def whole(work: RankWork) -> RankTensors:
    """Of a rank that is alone, whatever the layout. The fullest moments are the end of the forward pass; the
    loss, the gradient of the head's weights, or the backward pass of the last block; and the end of the
    backward pass. Gradients that are not accumulated come to life as the activations die, all but the last
    that is rebuilt. That of a head which is the embedding waits for the embedding's; an embedding's that is
    accumulated is whole before it is added, as a head's is."""
    parameters, activations = work.parameters, work.activations
    width = COMPUTE_BYTES[work.step.precision]
    copies = parameters.cast(1, width) if width < WEIGHT_BYTES else ()
    gradients = parameters.trained.sharded(1, GRADIENT_BYTES)
    held, rebuilt = work.held_bytes, work.rebuilt_bytes
    forward, backward, buffers = _copied(work, max(0, total(copies) - width * parameters.looked_up))
    head, tied = activations.head_gradient_bytes, activations.tied_bytes
    waits = head if tied else 0
    at_head = 0 if work.step.fused_head else activations.kept_logit_bytes + head
    most = max(held, total(activations.saved) + max(at_head, rebuilt + waits))
    adds = work.step.accumulation > 1 and work.step.part.is_first
    added = GRADIENT_BYTES * parameters.trained.looked_up if adds else 0
    end = backward + total(gradients) + max(rebuilt, tied, added)
    tensors = RankTensors(
        parameters=parameters.held(1, WEIGHT_BYTES),
        gradients=gradients,
        unsent=(),
        optimizer=work.optimizer_states(1),
        saved=activations.saved,
        rebuilt=activations.rebuilt,
        copies=copies,
        activation_bytes=held - activations.logit_bytes,
        logit_bytes=activations.logit_bytes,
        buffers=buffers,
        moments=(forward, Moment(buffers + most), Moment(end)),
        waits=waits,
    )
    return tensors.keeping_gradients() if work.step.accumulation > 1 else tensors


def _copied(work: RankWork, in_all: int) -> tuple[Moment, int, int]:
    """Autocast keeps its copies of the weights, `in_all` bytes, until the forward pass ends (of frozen ones
    those of a block), and autograd each until its backward pass, of what is recomputed, which casts anew,
    while a block is, and none of blocks that no backward pass reaches. The end of the forward pass, with
    them all; then bytes of the copies when all gradients are there, which are a block's, and at the loss. A
    loss in one with the head is within the forward pass, that of a model that was traced may be."""
    parameters, activations = work.parameters, work.activations
    width = COMPUTE_BYTES[work.step.precision]
    outside = width * (parameters.outside - parameters.looked_up) if in_all else 0
    block = (in_all - outside) // max(1, parameters.num_blocks)
    if work.step.checkpointing == "none":
        return Moment(0), block, max(block, in_all - (width * parameters.unreached if in_all else 0))
    loss_bytes = activations.kept_logit_bytes
    if work.step.fused_head or not activations.logit_bytes:
        loss_bytes = work.held_bytes - total(activations.saved)
    trained = parameters.trained
    kept = total(trained.cast(1, width)) - width * trained.looked_up if in_all else 0
    cast = min(in_all, kept + block)
    return Moment(cast + total(activations.saved) + loss_bytes), block, max(outside, block)


def estimate(work: RankWork, device: str, alone: RankTensors | None = None) -> MemoryEstimate:
    """Bytes that a rank's process needs, and why. `alone`: as of `rank_tensors`."""
    held = rank_tensors(work, alone)
    reserved = allocators.reserve(held, device, work.layout.mesh, work.step.checkpointing)
    tensors = reserved.tensors
    causes = {
        "parameters": total(tensors.parameters),
        "gradients": total(tensors.gradients) + total(tensors.unsent),
        "optimizer": total(tensors.optimizer),
        "activations": tensors.activation_bytes,
        "logits": tensors.logit_bytes,
        "buffers": tensors.buffers,
    }
    reused = sum(causes.values()) - tensors.peak
    causes["buffers"] += max(0, -reused)  # more copies of weights than there are at the loss
    return MemoryEstimate(**causes, context=reserved.context, slack=reserved.slack, reused=max(0, reused))


@lru_cache(maxsize=64)  # the same for all candidates
def saved_bytes(parameters: ParameterCounts, optimizer: OptimizerCost, num_ranks: int) -> int:
    """Of a checkpoint, what each of all ranks writes under any layout: weights and states are written once,
    and ranks that hold replicas of the same share the writing (`train/checkpoint.py`)."""
    trained = parameters.trained
    written = trained if parameters.base_elsewhere else parameters
    weights = WEIGHT_BYTES * written.share(num_ranks)
    if optimizer.replaces_weights:
        weights -= WEIGHT_BYTES * trained.share(num_ranks)
    return weights + total(optimizer.states(trained, num_ranks))
