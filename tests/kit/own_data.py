"""Data sets of one's own that augment, fail, die, hang and count."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset


class Drawn:
    """Samples for `kit.own:normed`, each look at one of which draws anew. At sample `at` it does `what`, once
    if there is a file `once` to say that it has."""

    def __init__(self, size: int, what: str = "", at: int = -1, once: str = "") -> None:
        self.size, self.what, self.at, self.once = size, what, at, once

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        if i == self.at and os.getpid() != RANK and not (self.once and Path(self.once).exists()):
            if self.once:
                Path(self.once).touch()
            self.strike()
        return {"x": torch.rand(3) + i, "index": torch.tensor(i)}

    def strike(self) -> None:
        if self.what == "raise":
            raise LookupError("no such picture")
        if self.what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.what == "exit":
            os._exit(7)
        if self.what == "hang":
            time.sleep(3600)


RANK = -1  # the process that does not strike: the one that opened the data set, which looks at a few samples


def drawn(split: str, **args: Any) -> Drawn:
    global RANK
    RANK = os.getpid()
    return Drawn(**{"size": 48, **args})


class Texts:
    """Samples that are no tensors, of different lengths."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: int) -> str:
        return "ab" * (i % 5 + 1)


def texts(split: str) -> Texts:
    return Texts()


def padded(samples: list[str]) -> dict[str, Tensor]:
    longest = max(map(len, samples))
    rows = [[ord(letter) for letter in text.ljust(longest + 1)] for text in samples]
    ids = torch.tensor(rows)
    return {"inputs": ids[:, :-1], "targets": ids[:, 1:]}


def unbatched(samples: list[str]) -> list[str]:
    return samples


class Numbers:
    """Of one source of a mixture: samples for `kit.own:normed` that show where they are from."""

    def __init__(self, size: int, base: int) -> None:
        self.size, self.base = size, base

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"x": torch.tensor([self.base + i, i, 1.0]), "index": torch.tensor(self.base + i)}


def numbers(split: str, size: int, base: int) -> Numbers:
    return Numbers(size, base)


class Stream:
    """Every `num_parts`th of `size` samples, of which each look draws anew. It says where it stands, at each
    epoch from the beginning."""

    def __init__(self, size: int, part: int, num_parts: int) -> None:
        self.size, self.part, self.num_parts = size, part, num_parts
        self.at = part

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while self.at < self.size:
            i, self.at = self.at, self.at + self.num_parts
            yield {"x": torch.rand(3) + i, "index": torch.tensor(i)}
        self.at = self.part

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Forgetful(IterableDataset[dict[str, Tensor]]):
    """Does not say where it stands, and has its samples in another order in each epoch."""

    epoch = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for i in range(self.size):
            shown = (i + self.epoch) % self.size
            yield {"x": torch.rand(3) + shown, "index": torch.tensor(shown)}

    def split(self, rank: int, world_size: int) -> Forgetful:
        assert self.size % world_size == 0
        return Forgetful(self.size // world_size)


def stream(split: str, rank: int, world_size: int, size: int = 40) -> Stream:
    return Stream(size, rank, world_size)


def forgetful(split: str, size: int = 40) -> Forgetful:
    return Forgetful(size)


def once(split: str) -> Iterator[dict[str, Tensor]]:
    return iter([{"x": torch.rand(3)}] * 3)


def unsplittable(split: str) -> Any:
    return (sample for sample in [{"x": torch.rand(3)}])


class Live(Stream):
    """Whose state is itself."""

    def state_dict(self) -> dict[str, Any]:
        return vars(self)


def live(split: str) -> Live:
    return Live(40, 0, 1)


class Shuffled:
    """Draws when it is made, when it is iterated over, at the first sample and at each."""

    def __init__(self, size: int, part: int, num_parts: int) -> None:
        self.size, self.part, self.num_parts = size, part, num_parts
        self.made = torch.rand(3)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return self.samples(torch.rand(3))

    def samples(self, begun: Tensor) -> Iterator[dict[str, Tensor]]:
        for i in torch.randperm(self.size).tolist():
            index = torch.tensor(i * self.num_parts + self.part)
            yield {"x": torch.stack([self.made, begun, torch.rand(3)]), "index": index}


def redrawn(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch that draws itself."""
    return {"x": torch.rand(len(samples)), "index": torch.stack([sample["index"] for sample in samples])}


def shuffled(split: str, rank: int, world_size: int) -> Shuffled:
    return Shuffled(9, rank, world_size)


class Unsaved(Stream):
    def state_dict(self) -> dict[str, Any]:
        return {"at": torch.tensor(3)}


def unsaved(split: str) -> Unsaved:
    return Unsaved(4, 0, 1)


def unchanged(samples: list[Any]) -> dict[str, Tensor]:
    """A batch that only counts."""
    return {"inputs": torch.arange(len(samples))}


class Uneven:
    """Samples of 3 to 90 tokens, of which the first half is not learnt. `what`: is wrong about sample 5."""

    def __init__(self, size: int, what: str) -> None:
        self.size, self.what = size, what
        if what == "lengths":
            self.lengths = torch.tensor([Uneven.length(self, i) for i in range(size)])

    def __len__(self) -> int:
        return self.size

    def length(self, i: int) -> int:
        if i == 5 and self.what == "none":
            return 0
        return 3 + i * 37 % 88 + (i == 5 and self.what == "lies")

    def __getitem__(self, i: int) -> Any:
        drawn = torch.randint(256, (4 + i * 37 % 88,), generator=torch.Generator().manual_seed(i))
        targets = drawn[1:].clone()
        targets[: len(targets) // 2] = -100
        if i == 5 and self.what == "other":
            return {"inputs": drawn, "targets": targets}
        return {"inputs": drawn[:-1], "targets": targets}


def uneven(split: str, size: int = 24, what: str = "") -> Uneven:
    return Uneven(size, what)
