"""Data sets of Hugging Face's `datasets`, and one that keeps to the same protocol."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from datasets import Dataset

NUM = 40


def table(**more: list[Any]) -> Dataset:
    from datasets import Dataset  # a second, where only tests that need it shall pay

    return Dataset.from_dict(
        {"x": [[float(i), 1.0, 2.0] for i in range(NUM)], "index": list(range(NUM)), **more}
    )


def plain(split: str) -> Dataset:
    return table()


def with_text(split: str) -> Dataset:
    return table(text=["a"] * NUM)


def streamed(split: str) -> Any:
    return table().to_iterable_dataset(num_shards=4)


def shuffled(split: str) -> Any:
    return table().to_iterable_dataset(num_shards=4).shuffle(seed=3, buffer_size=6)


def texts(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {"inputs": torch.tensor([[ord(one["text"])] for one in samples])}


class Duck:
    """What mlpipe asks of them: rows of plain Python, tensors when it is told so, parts, a state."""

    def __init__(self, indices: list[int], formatted: bool = False) -> None:
        self.indices, self.formatted, self.at, self.epoch = indices, formatted, 0, 0

    def with_format(self, kind: str) -> Duck:
        assert kind == "torch"
        return Duck(self.indices, True)

    def shard(self, num_shards: int, index: int) -> Duck:
        return Duck(self.indices[index::num_shards], self.formatted)

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.at = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.epoch = state["at"], state["epoch"]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self.at < len(self.indices):
            i, self.at = self.indices[self.at], self.at + 1
            row = {"x": [float(i), 1.0, 2.0], "index": i}
            yield {key: torch.tensor(value) for key, value in row.items()} if self.formatted else row


def duck(split: str) -> Duck:
    return Duck(list(range(NUM)))
