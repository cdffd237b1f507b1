"""Metrics of one's own, one for each way in which a state is reduced over ranks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from mlpipe.plan.validation import MetricPlan
from mlpipe.train.metrics import Metric
from mlpipe.train.model import Batch

CPU = torch.device("cpu")
NUM_CLASSES = 4


class Right:
    """Sums: a number and a tensor that do not begin at 0, beside a constant."""

    def __init__(self, offset: int = 5) -> None:
        self.offset = offset
        self.right = offset
        self.total = torch.full((1,), float(offset))

    def update(self, outputs: Tensor, batch: Batch) -> None:
        targets = batch["targets"]
        self.right += int((outputs.argmax(dim=-1) == targets).sum())
        self.total = self.total + targets.numel()

    def compute(self) -> Tensor:
        return (self.right - self.offset) / (self.total - self.offset)


class Extremes:
    """Maximum and minimum, and several values."""

    reduce = {"highest": "max", "lowest": "min"}  # noqa: RUF012

    def __init__(self) -> None:
        self.highest = float("-inf")
        self.lowest = torch.tensor(float("inf"))

    def update(self, outputs: Tensor, batch: Batch) -> None:
        self.highest = max(self.highest, float(outputs.float().max()))
        self.lowest = torch.minimum(self.lowest, outputs.float().min())

    def compute(self) -> dict[str, Any]:
        return {"highest": self.highest, "lowest": self.lowest}


class Median:
    """What was seen, whole: a list that grows, and is not empty at first."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = [torch.zeros(3)]

    def update(self, outputs: Tensor, batch: Batch) -> None:
        self.seen.append(outputs.float().amax(dim=-1).flatten())

    def compute(self) -> float:
        return torch.cat(self.seen).median().item()


class Counts:
    """By key, and in a list of as many counts as there are classes, neither from 0; `None` until the first
    batch."""

    def __init__(self) -> None:
        self.of = Counter({0: 2, NUM_CLASSES: 1})
        self.parity = [0, 3]
        self.batches: int | None = None

    def update(self, outputs: Tensor, batch: Batch) -> None:
        targets = batch["targets"].flatten().tolist()
        self.of.update(targets)
        for target in targets:
            self.parity[target % 2] += 1
        self.batches = (self.batches or 0) + len(batch["targets"])

    def compute(self) -> dict[str, float]:
        return {
            "most": max(self.of.values()),
            "kinds": len(self.of),
            "all": self.of.total(),
            "odd": self.parity[1],
            "batches": self.batches or 0,
        }


class Merging:
    """As torcheval's: (input, target), and `merge_state`."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.right, self.total = 0, 0

    def to(self, device: Any) -> Merging:
        self.device = str(device)
        return self

    def update(self, input: Tensor, target: Tensor) -> Merging:
        assert input.shape == (*target.shape, input.shape[-1])
        assert target.dim() == 1
        self.right += int((input.argmax(dim=-1) == target).sum())
        self.total += len(target)
        return self

    def compute(self) -> float:
        return self.right / max(1, self.total)

    def merge_state(self, others: Any) -> Merging:
        for other in others:
            self.right += other.right
            self.total += other.total
        return self


class Distance:
    """Of a model with a loss of its own, whose outputs are what its forward returned."""

    def __init__(self) -> None:
        self.sum, self.num = 0.0, 0

    def update(self, outputs: Tensor, batch: Batch) -> None:
        self.sum += float((outputs - batch["x"]).abs().double().sum())
        self.num += outputs.numel()

    def compute(self) -> float:
        return self.sum / self.num


class Unreducible:
    def __init__(self) -> None:
        self.seen: set[int] = set()

    def update(self, outputs: Tensor, batch: Batch) -> None:
        self.seen |= set(batch["targets"].flatten().tolist())

    def compute(self) -> float:
        return len(self.seen)


class Table:
    def update(self, outputs: Tensor, batch: Batch) -> None: ...

    def compute(self) -> Tensor:
        return torch.zeros(3)


class Misspelt:
    reduce = {"most": "maximum"}  # noqa: RUF012

    def update(self, outputs: Tensor, batch: Batch) -> None: ...

    def compute(self) -> float:
        return 0.0


class Draws:
    """Randomness of every kind, which must not reach the training; and mischief with the buffers' mode."""

    def __init__(self) -> None:
        self.sum = 0.0

    def update(self, outputs: Tensor, batch: Batch) -> None:
        import random

        import numpy as np

        assert not torch.is_grad_enabled()
        self.sum += random.random() + float(np.random.rand()) + torch.rand(3).sum().item()

    def compute(self) -> float:
        return self.sum


def not_a_metric() -> str:
    return "surprise"


# Ranks without processes


def batch(number: int, size: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(number)
    outputs = torch.randn(size, 3, NUM_CLASSES, generator=generator) * (number + 1)
    targets = torch.randint(NUM_CLASSES, (size, 3), generator=generator)
    return outputs, {"inputs": torch.zeros(size, 3), "targets": targets}


def values(plan: MetricPlan, dealt: list[list[int]]) -> dict[str, float]:
    """`dealt`: of each rank the numbers of its batches, of which number i has i + 1 samples."""
    ranks = [Metric(plan, CPU) for _ in dealt]
    for one, numbers in zip(ranks, dealt, strict=True):
        one.begin()
        for number in numbers:
            one.update(*batch(number, number + 1))
    return ranks[-1].values([one.state() for one in ranks])
