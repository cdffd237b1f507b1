"""Neighbours along `dp_shard` have different experts and send each other tokens, as
`train/parallel/experts.py` has it. How states are split follows from `dp_shard`, of which this is a part."""

from __future__ import annotations

from mlpipe.plan.axes.axis import Layout, Passes, RankWork
from mlpipe.plan.tensors import RankTensors
from mlpipe.plan.wire import Wire


def divide(tensors: RankTensors, work: RankWork) -> RankTensors:
    """As without: that a rank gathers its own experts only leaves it more room than this says, and that all
    tokens may want the same ones needs some of that."""
    return tensors


def exposed_seconds(passes: Passes, wire: Wire, layout: Layout) -> float:
    """Experts wait for their rows, so nothing hides them. Weights are gathered as without `ep`."""
    ep, number = layout.mesh.ep, passes.accumulation * passes.num_blocks
    rows = 4 + (2 if passes.recomputes else 0)
    each = wire.all_to_all(ep * passes.routed_bytes, ep, layout.mesh.tp)
    return number * (rows * each + (2 if passes.recomputes else 1) * wire.all_to_all(0, ep, layout.mesh.tp))
