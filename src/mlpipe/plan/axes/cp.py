"""The ranks of this axis share each sequence: `shapes/shape.py`'s `Part` divides activations, logits and
computing. Keys and values of the whole sequence come together in every block, or go round; weights are the
same, so they are sharded over these ranks too, and gradients reduced (`Layout.num_shards`)."""

from __future__ import annotations

from mlpipe.plan.axes.axis import Layout, Passes, RankWork
from mlpipe.plan.kernels import copy_seconds
from mlpipe.plan.mesh import Mesh
from mlpipe.plan.tensors import COMPUTE_BYTES, GRADIENT_BYTES, RankTensors
from mlpipe.plan.wire import Wire

_BACKWARD = 2.5  # times attention's forward pass, as in `shapes/dense.py`


def divide(tensors: RankTensors, work: RankWork) -> RankTensors:
    """Besides, what a block's attention has in its backward pass of others' keys and values: alive while the
    activations of that block are."""
    held = _held_bytes(work)
    moments = tuple(moment._replace(alive=moment.alive + held) for moment in tensors.moments)
    return tensors._replace(buffers=tensors.buffers + held, moments=moments)


def _held_bytes(work: RankWork) -> int:
    """Gathered: those of whole sequences, their gradients, and those of one chunk's queries, or on their way;
    exact sums take gradients in fp32, on a CPU out of copies of keys and values in fp32.
    In a ring, of one rank each: those that it computes with and that arrive; gradients that it computes,
    sends and that arrive; and its own, which are added up in fp32."""
    sums = GRADIENT_BYTES / COMPUTE_BYTES[work.step.precision]
    if work.layout.context_exchange == "all_gather" and work.step.exact_sums:
        return int((1 + (2 if work.overlap else 3) * sums) * work.kv_bytes)
    if work.layout.context_exchange == "all_gather":
        return 3 * work.kv_bytes
    return int((5 + sums) * work.kv_bytes / work.layout.mesh.cp)


def exposed_seconds(passes: Passes, wire: Wire, layout: Layout) -> float:
    """Of attention's forward passes and of its backward pass."""
    forwards = 2 if passes.recomputes and not passes.keeps_attention else 1
    way = _in_a_ring if layout.context_exchange == "ring" else _gathered
    forward, backward = way(passes, wire, layout.mesh)
    return passes.accumulation * passes.num_blocks * (forwards * forward + backward)


def _gathered(passes: Passes, wire: Wire, mesh: Mesh) -> tuple[float, float]:
    """Keys and values are gathered in each pass, and gradients of them go to their owners (Llama 3, 2024,
    section 3.3.2). As if computing hid none of it: only the diagonal blocks of attention are computed
    meanwhile. Exact sums: of gradients in fp32."""
    gathering = wire.gather_activations(passes.kv_bytes, mesh.cp, mesh.tp)
    gradients = passes.kv_bytes * passes.sum_width // passes.width
    return gathering, gathering + wire.all_to_all(mesh.cp * gradients, mesh.cp, mesh.tp)


def _in_a_ring(passes: Passes, wire: Wire, mesh: Mesh) -> tuple[float, float]:
    """Of n ranks' keys and values those of one are passed on beside each of n - 1 rounds of computing; so are
    gradients beside the round after that which gave them, the last ones after all. What a round gives is
    merged in fp32, and read and written for it."""
    rounds, speed = mesh.cp - 1, wire.hardware.speed
    hop = wire.hop(passes.kv_bytes / mesh.cp, mesh.cp, mesh.tp)
    once = passes.attention_seconds / mesh.cp
    numbers, is_narrow = passes.query_bytes / passes.width, passes.width < GRADIENT_BYTES

    def shown(seconds: float, computing: float) -> float:
        return sum(wire.beside(seconds, computing)) if passes.overlap else seconds

    merging = copy_seconds(numbers * (18 if is_narrow else 12), speed)
    adding = copy_seconds(numbers * (8 + passes.width), speed)
    forward = rounds * (shown(hop, once) + merging)
    backward = shown(hop, _BACKWARD * once) + (rounds - 1) * shown(2 * hop, _BACKWARD * once) + hop
    return forward, backward + rounds * adding
