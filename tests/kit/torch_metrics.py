"""Metrics on torchmetrics. Its import takes seconds: here, and so not in each process that collects tests."""

# mypy: ignore-errors
# (a state of torchmetrics is a "Tensor | Module" to it)
from __future__ import annotations

import torch
import torchmetrics
from kit.metrics import NUM_CLASSES


class Pearson(torchmetrics.Metric):
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


class MeanOverRanks(torchmetrics.Metric):
    def __init__(self) -> None:
        super().__init__()
        self.add_state("mean", torch.zeros(()), dist_reduce_fx="mean")

    def update(self, outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> None:
        self.mean = outputs.mean()

    def compute(self) -> torch.Tensor:
        return self.mean


def both() -> object:
    accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=NUM_CLASSES)
    f1 = torchmetrics.F1Score(task="multiclass", num_classes=NUM_CLASSES)
    return torchmetrics.MetricCollection([accuracy, f1])
