"""The shape of a training: of its model, or of that part which is not frozen."""

from __future__ import annotations

from collections.abc import Sequence

from mlpipe.plan.model import AdapterPlan
from mlpipe.plan.shapes import presets
from mlpipe.plan.shapes.dense import Dense
from mlpipe.plan.shapes.shape import ModelShape
from mlpipe.plan.work import TrainPlan


def without(
    shape: ModelShape | None, patterns: Sequence[str] | None, adapter: AdapterPlan | None = None
) -> ModelShape | None:
    """What is planned where so much is frozen, or all but an adapter: of a model whose parameters have no
    names here, all."""
    if not isinstance(shape, Dense) or (adapter is None and not patterns):
        return shape
    from mlpipe.plan.shapes.frozen import Adapted, Frozen  # of few plans

    if adapter is not None:
        return Adapted(shape, adapter.targets, adapter.rank, adapter.dora, adapter.base)
    frozen = Frozen(shape, tuple(patterns or ()))
    _ = frozen.trained  # patterns that say nothing are refused at once
    return frozen


def planned(train: TrainPlan) -> ModelShape | None:
    """The shape of a planned training; None: of a user's own model."""
    return without(presets.planned(train.model), train.freeze, train.adapter)
