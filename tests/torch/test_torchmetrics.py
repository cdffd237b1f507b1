"""Metrics of torchmetrics as they are: as exact over ranks as one's own."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.metrics import NUM_CLASSES, values

from mlpipe._core.errors import TrainError
from mlpipe.plan.validation import MetricPlan

pytestmark = pytest.mark.torch


LIBRARY = (
    MetricPlan("all", "kit.torch_metrics:Pearson"),
    MetricPlan("both", "kit.torch_metrics:both"),
    MetricPlan("auroc", "torchmetrics.classification:MulticlassAUROC", {"num_classes": NUM_CLASSES}),
    MetricPlan(
        "confusion", "torchmetrics.classification:MulticlassMatthewsCorrCoef", {"num_classes": NUM_CLASSES}
    ),
)


@pytest.mark.parametrize("plan", LIBRARY, ids=lambda plan: plan.name)
@settings(max_examples=8, deadline=None)
@given(owners=st.lists(st.integers(0, 2), min_size=4, max_size=4))
def test_metrics_of_torchmetrics_are_exact_too(plan, owners):
    dealt = [[number for number, owner in enumerate(owners) if owner == rank] for rank in range(3)]
    assert values(plan, dealt) == pytest.approx(values(plan, [list(range(4))]), rel=1e-5, abs=1e-6)


def test_a_mean_over_ranks_is_refused_where_there_are_several():
    plan = MetricPlan("mean", "kit.torch_metrics:MeanOverRanks")
    values(plan, [[0, 1]])
    with pytest.raises(TrainError, match="'mean' is a mean over ranks"):
        values(plan, [[0], [1]])
