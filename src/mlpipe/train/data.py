"""Which samples a rank reads, and when: a function of the seed and the global sample index alone.

Sample number `i` of the run is the same text under every strategy, world size and batch size; a step
consumes the next `global_batch` numbers, of which each data rank takes a contiguous share. The position
in the data is therefore one number, the samples consumed, and it lies in the checkpoint.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mlpipe._core.errors import TrainError
from mlpipe.plan.plan import DataPlan, Entry
from mlpipe.train.model import Batch, load_entry
from mlpipe.train.order import order
from mlpipe.train.session import seed_step
from mlpipe.train.tokens import TokenDataset, open_folder


def open_dataset(plan: DataPlan, *, split: str, seq_len: int) -> Any:
    """Token files, or what the user's function returns for `split` ("train", "validation")."""
    if plan.tokens is not None:
        return TokenDataset(open_folder(plan.tokens), split, seq_len)
    if plan.dataset is None:
        raise TrainError("the plan names no data", kind="bug")
    entry = Entry(plan.dataset.entry, {**plan.dataset.args, "split": split})
    make = load_entry(entry)
    try:
        dataset = make(**entry.args)
    except Exception as error:
        raise TrainError(
            f"failed to make the data set for the split {split!r}: {type(error).__name__}: {error}",
            where=entry.entry,
            kind="input",
        ) from error
    try:
        num_samples = len(dataset)
        sample, last = dataset[0], dataset[num_samples - 1]
    except Exception as error:
        raise TrainError(
            f"its data set is not map-style: {type(error).__name__}: {error}",
            where=entry.entry,
            hint="return an object with len() and [i] -> dict of tensors",
            kind="input",
        ) from error
    if num_samples == 0 or not isinstance(sample, dict) or not all(map(torch.is_tensor, sample.values())):
        raise TrainError(
            f"its data set of {num_samples} samples gives {type(sample).__name__}, not a dict of tensors",
            where=entry.entry,
            hint='return {"inputs": tensor, "targets": tensor} for each index',
            kind="input",
        )
    if _form(last) != _form(sample):
        raise _unlike(0, sample, num_samples - 1, last, entry.entry)
    return dataset


class Stream:
    """The microbatches of one data rank."""

    def __init__(
        self,
        dataset: Any,
        *,
        seed: int,
        global_batch: int,
        micro_batch: int,
        data_rank: int,
        num_data_ranks: int,
    ) -> None:
        self.dataset = dataset
        self.seed = seed
        self.micro_batch = micro_batch
        self.per_rank = global_batch // num_data_ranks
        self.data_rank = data_rank

    def step(self, position: int) -> list[Batch]:
        """This rank's microbatches of the step that starts at sample number `position`."""
        start = position + self.data_rank * self.per_rank
        indices = order(self.seed, start, self.per_rank, len(self.dataset))
        return [
            collate(self.dataset, indices[i : i + self.micro_batch])
            for i in range(0, self.per_rank, self.micro_batch)
        ]


class ReadAhead:
    """The samples of a step, read while the device computes the one before. What a data set draws at random
    is a function of the seed, the step and the rank, whenever it is read."""

    def __init__(self, stream: Stream, seed: int, device: torch.device) -> None:
        self.stream = stream
        self.seed = seed
        self.device = device
        self._next: list[Batch] | None = None

    def take(self, number: int, position: int) -> list[Batch]:
        """Of step `number`, which starts at sample number `position`."""
        if self._next is None:
            self.read(number, position)
        found, self._next = self._next, None
        return found or []

    def read(self, number: int, position: int) -> float:
        """For the next `take`. Returns the seconds for which the device had nothing to do meanwhile: all of
        them on a CPU, which computes in this thread; on a GPU none, or all (an upper bound) if it was through
        before the samples were there."""
        began = time.perf_counter()
        seed_step(self.seed, number, self.stream.data_rank)
        self._next = self.stream.step(position)
        seconds = time.perf_counter() - began
        hidden = self.device.type == "cuda" and not torch.cuda.current_stream(self.device).query()
        return 0.0 if hidden else seconds


def to_device(batch: Batch, device: torch.device) -> Batch:
    """On CUDA out of pinned memory: a copy from pageable memory waits for all that the device has to do."""
    if device.type == "cpu":
        return batch
    return {key: tensor.pin_memory().to(device, non_blocking=True) for key, tensor in batch.items()}


def collate(dataset: Any, indices: NDArray[np.int64]) -> Batch:
    """Samples stacked along a new dim 0. Token files are cut in one go."""
    if isinstance(dataset, TokenDataset):
        windows = torch.from_numpy(dataset.windows(indices))
        return {"inputs": windows[:, :-1].contiguous(), "targets": windows[:, 1:].contiguous()}
    samples = [dataset[int(index)] for index in indices]
    try:
        return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
    except (RuntimeError, KeyError, TypeError) as error:
        odd = next((i for i, sample in enumerate(samples) if _form(sample) != _form(samples[0])), None)
        if odd is None:
            raise
        raise _unlike(indices[0], samples[0], indices[odd], samples[odd], type(dataset).__name__) from error


def _unlike(i: int, sample: Any, j: int, other: Any, where: str) -> TrainError:
    return TrainError(
        f"samples {i} and {j} cannot lie in one batch: {_form(sample)} and {_form(other)}",
        where=where,
        hint="return the same keys and shapes for every index: cut or pad what differs in length",
        kind="input",
    )


def _form(sample: Any) -> str:
    """Keys and shapes."""
    if not isinstance(sample, dict):
        return type(sample).__name__
    return ", ".join(f"{key} {tuple(getattr(value, 'shape', ()))}" for key, value in sample.items())
