"""What a step of an elastic training takes on so many nodes, if they stay."""

from __future__ import annotations

from mlpipe.kinds.train.spec import Train
from mlpipe.plan.candidates import global_batch, islands_plan, pick
from mlpipe.plan.choose import Candidate
from mlpipe.plan.hardware import Hardware
from mlpipe.plan.pricing import layout_of, of_islands
from mlpipe.plan.shapes.shape import ModelShape
from mlpipe.plan.tensors import GRADIENT_BYTES
from mlpipe.plan.wire import Wire


def best_on(spec: Train, shape: ModelShape, hardware: Hardware, num_nodes: int) -> Candidate:
    """The best for a node that has its part of the batch and a whole replica, and what its workers then send:
    each its gradients to its like on the other nodes, when the backward pass is over, at the network's full
    speed; or with `update` a step's share of what an island tells in a round. Raises PlanError."""
    batch, num_workers = global_batch(spec), hardware.devices_per_node
    part = -(-batch // (num_nodes * num_workers)) * num_workers  # of the node that has the most
    data = {"batch_size": part} | ({"batch_tokens": None} if hasattr(spec.data, "batch_tokens") else {})
    own = spec.model_copy(update={"data": spec.data.model_copy(update=data)})
    best, _ = pick(own, shape, hardware._replace(num_nodes=1))
    if best.seconds is None or best.mesh is None or best.hours is None:
        return best
    layout = layout_of(best.strategy, best.mesh, best.communication)
    trained, islands = shape.parameters.trained, islands_plan(spec)
    sent = GRADIENT_BYTES * trained.total if islands is None else of_islands(islands, trained).reduced_bytes
    there = hardware._replace(num_nodes=num_nodes)
    exposed = Wire(there).all_reduce(sent / layout.num_updating_ranks, num_nodes, num_workers)
    seconds = best.seconds._replace(communication=best.seconds.communication + exposed)
    hours = best.hours + spec.steps * exposed / 3600
    price = hardware.price_usd_per_device_hour
    usd = None if price is None else price * there.world_size * hours
    num_tokens = best.num_tokens * batch / part
    return best._replace(
        seconds=seconds,
        tokens_per_second=num_tokens / seconds.total,
        mfu_ratio=None,
        hours=hours,
        usd=usd,
        usd_per_million_tokens=None if usd is None else usd / (spec.steps * num_tokens / 1e6),
    )
