"""The ranks of this axis have one stage of the model each, or several: `shapes/shape.py`'s `Part` says which
blocks. Microbatches go from rank to rank, and a rank holds those that have not come back; until the first one
comes, and when the last one is gone, it is idle."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mlpipe.plan.axes import by_name
from mlpipe.plan.axes.axis import Layout, Passes, RankWork
from mlpipe.plan.pipelining import Held, bubble_passes, held, num_transfers
from mlpipe.plan.sizes import GATHER_BUCKET_BYTES
from mlpipe.plan.tensors import COMPUTE_BYTES, WEIGHT_BYTES, RankTensors, Tensors, total
from mlpipe.plan.wire import Wire


def divide(tensors: RankTensors, work: RankWork) -> RankTensors:
    """Of each microbatch that is held, by its stage, what autograd saved, of the last stage the gradient of
    its logits, and autocast's copies of the weights; of one whose weights' gradients are put off what these
    need. Gradients of replicas are averaged when all passes are done, through one bucket."""
    layout = work.layout
    most, fullest = max(_bytes_at(_held(work), tensors, work), key=lambda one: one[0])
    more = int(most) - work.held_bytes
    share = sum(fullest.kept) / len(fullest.kept)
    put_off = fullest.put_off * work.activations.put_off_bytes
    saved = [Tensors(int(share * one.num_bytes), int(share * one.number)) for one in tensors.saved]
    if put_off:
        saved.append(Tensors(put_off, fullest.put_off * sum(one.number for one in tensors.saved)))
    bucket = 0
    if layout.num_replicas > 1 and layout.mesh.dp_shard == 1:
        bucket = min(GATHER_BUCKET_BYTES, total(tensors.gradients))
    moments = tuple(moment._replace(alive=moment.alive + more + bucket) for moment in tensors.moments)
    return tensors._replace(
        saved=tuple(saved),
        activation_bytes=tensors.activation_bytes + more,
        buffers=tensors.buffers + bucket,
        moments=moments,
    )


def _held(work: RankWork) -> tuple[Held, ...]:
    """Of the rank whose part it is."""
    layout, part = work.layout, work.step.part
    rank = part.rank
    if rank is None:
        rank = 0 if part.is_first else layout.mesh.pp - 1 if part.is_last else part.number
    return held(layout.schedule, rank, layout.mesh.pp, work.step.accumulation)


def _bytes_at(passes: Iterable[Held], tensors: RankTensors, work: RankWork) -> Iterator[tuple[float, Held]]:
    """Of each: activations, logits, and copies of the weights but the first."""
    activations, part, width = work.activations, work.step.part, COMPUTE_BYTES[work.step.precision]
    in_blocks, outside = (width * number for number in _cast_params(work))
    saved, rebuilt = total(tensors.saved), work.rebuilt_bytes
    for one in passes:
        num_stages, last = len(one.kept), one.kept[-1] if part.is_last else 0
        num_bytes = sum(one.kept) / num_stages * (saved + in_blocks) - in_blocks
        num_bytes += last * activations.kept_logit_bytes + max(0, last - 1) * outside
        num_bytes += one.put_off * activations.put_off_bytes
        through_head = part.is_last and one.own == num_stages - 1
        if one.kind == "F":
            num_bytes += through_head * (activations.logit_bytes - activations.kept_logit_bytes)
        elif one.kind != "W":
            # when a block's backward pass is under way, the gradient of the logits is gone
            through_blocks = num_bytes - through_head * activations.kept_logit_bytes
            if one.kind == "I" and activations.rebuilt:  # other blocks left more behind than was kept of them
                others = activations.put_off_bytes * (1 - 1 / max(1, work.parameters.num_blocks))
                through_blocks += max(0, others - saved)
            num_bytes = max(num_bytes, through_blocks + rebuilt)
        yield num_bytes, one


def _cast_params(work: RankWork) -> tuple[int, int]:
    """Of the weights those that autocast casts anew for each microbatch, which autograd keeps with it: of
    blocks that neither FSDP casts nor recomputation casts again, and of the head."""
    parameters, step = work.parameters, work.step
    if step.precision == "fp32":
        return 0, 0
    again = work.layout.mesh.dp_shard == 1 and step.checkpointing == "none"
    in_blocks = parameters.total - parameters.outside if again else 0
    return in_blocks, parameters.outside if step.part.is_last else 0


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
    stride = layout.stage_stride(wire.hardware.devices_per_node)
    each = wire.over(num_ranks * stride).send(num_bytes, stride)
    if passes.overlap:
        return idle + 2 * (num_ranks - 1) * each
    busiest = min(1, num_ranks - 2)  # one between two others, if there is one
    return idle + num_transfers(schedule, busiest, num_ranks, passes.accumulation) * each
