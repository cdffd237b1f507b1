"""Work of one rank for the planner's tests, with nothing in it that a test does not name."""

from __future__ import annotations

from mlpipe._core.meshes import Strategy
from mlpipe.plan.axes.axis import RankWork
from mlpipe.plan.mesh import Mesh
from mlpipe.plan.optimizers import OptimizerCost
from mlpipe.plan.pricing import layout_of
from mlpipe.plan.shapes.shape import Activations, ParameterCounts, StepShape
from mlpipe.plan.tensors import Tensors

ADAM = OptimizerCost(8)


def rank_work(
    parameters: ParameterCounts,
    strategy: Strategy = "single",
    mesh: Mesh | None = None,
    *,
    precision: str = "fp32",
    saved: int = 0,
    logits: int = 0,
    backward: int = 0,
    accumulation: int = 1,
    overlap: bool = True,
) -> RankWork:
    """`saved`: bytes of one activation. `overlap`: a GPU's."""
    kept = (Tensors(saved, 1),) if saved else ()
    activations = Activations(
        kept, (), backward_bytes=backward, logit_bytes=logits, made=(), kept_logit_bytes=logits // 2
    )
    step = StepShape(1, 1, accumulation, precision, "none", compiled=False)
    return RankWork(parameters, activations, step, layout_of(strategy, mesh or Mesh()), ADAM, overlap)
