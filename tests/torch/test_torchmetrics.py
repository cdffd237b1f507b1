"""Metrics of torchmetrics as they are: as exact over ranks as one's own."""

from __future__ import annotations

import sys

import pytest
import torch
import torchmetrics
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.metrics import NUM_CLASSES, values

from mlpipe._core.errors import TrainError
from mlpipe.plan.plan import MetricPlan

pytestmark = pytest.mark.torch


class Pearson(torchmetrics.Metric):  # type: ignore[misc,name-defined]
    """States of every reduction but the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("highest", torch.tensor(-torch.inf), dist_reduce_fx="max")
        self.add_state("lowest", torch.tensor(torch.inf), dist_reduce_fx="min")
        self.add_state("seen", [], dist_reduce_fx="cat")
        self.add_state("sizes", [], dist_reduce_fx=None)

    def update(self, outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> None:
        self.total += outputs.sum()
        self.highest = torch.maximum(self.highest, outputs.max())
        self.lowest = torch.minimum(self.lowest, outputs.min())
        self.seen.append(outputs.flatten())
        self.sizes.append(torch.tensor(len(outputs)))

    def compute(self) -> dict[str, torch.Tensor]:
        seen = torch.cat(self.seen) if isinstance(self.seen, list) else self.seen
        return {
            "total": self.total, "highest": self.highest, "lowest": self.lowest,
            "median": seen.median(), "number": torch.tensor(len(seen)), "sizes": sum(self.sizes),
        }  # fmt: skip


class MeanOverRanks(torchmetrics.Metric):  # type: ignore[misc,name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.add_state("mean", torch.zeros(()), dist_reduce_fx="mean")

    def update(self, outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> None:
        self.mean = outputs.mean()

    def compute(self) -> torch.Tensor:
        return self.mean


def both() -> object:
    classes = {"task": "multiclass", "num_classes": NUM_CLASSES}
    return torchmetrics.MetricCollection([torchmetrics.Accuracy(**classes), torchmetrics.F1Score(**classes)])


sys.modules["torchmetrics_of_this_test"] = sys.modules[__name__]
LIBRARY = (
    MetricPlan("all", "torchmetrics_of_this_test:Pearson"),
    MetricPlan("both", "torchmetrics_of_this_test:both"),
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
    plan = MetricPlan("mean", "torchmetrics_of_this_test:MeanOverRanks")
    values(plan, [[0, 1]])
    with pytest.raises(TrainError, match="'mean' is a mean over ranks"):
        values(plan, [[0], [1]])
