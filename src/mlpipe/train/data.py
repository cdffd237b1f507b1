"""Which samples a rank reads, and when: a function of the seed and the global sample index alone.

Sample number `i` of the run is the same text under every strategy, world size and batch size; a step
consumes the next `global_batch` numbers, of which each data rank takes a contiguous share. The position
in the data is therefore one number, the samples consumed, and it lies in the checkpoint.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mlpipe._core.errors import TrainError
from mlpipe.plan.plan import DataPlan, Entry
from mlpipe.train.model import Batch, load_entry
from mlpipe.train.order import order
from mlpipe.train.seeding import seed_step
from mlpipe.train.tokens import TokenDataset, open_folder
from mlpipe.train.world import World


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


@dataclass(frozen=True)
class Microbatch:
    """What goes through the model at a time. `num_tokens`: in it, whether they are targets or not. One that
    does not `count` only keeps this rank in step with others that have more of them, since passes of a
    sharded model need all ranks: its loss, gradient and tokens count for nothing."""

    batch: Batch
    num_tokens: int
    counts: bool = True


class MicrobatchLoader:
    """The microbatches of this rank: a contiguous share of each step's samples, in pieces of `micro_batch`
    or fewer. `seq_len`: tokens of a sample that does not show its own."""

    def __init__(
        self, dataset: Any, world: World, *, seed: int, global_batch: int, micro_batch: int, seq_len: int
    ) -> None:
        self.dataset = dataset
        self.world = world
        self.seed = seed
        self.global_batch = global_batch
        self.micro_batch = micro_batch
        self.seq_len = seq_len

    def step(self, position: int) -> list[Microbatch]:
        """Of the step that starts at sample number `position`, equally many on every rank."""
        num_ranks, rank = self.world.num_data_ranks, self.world.data_rank
        start, stop = (self.global_batch * part // num_ranks for part in (rank, rank + 1))
        indices = order(self.seed, position + start, stop - start, len(self.dataset))
        own = [
            self._microbatch(indices[i : i + self.micro_batch])
            for i in range(0, len(indices), self.micro_batch)
        ]
        most = math.ceil(math.ceil(self.global_batch / num_ranks) / self.micro_batch)
        if len(own) == most:
            return own
        other = own[0] if own else self._microbatch(order(self.seed, position, 1, len(self.dataset)))
        return own + [replace(other, counts=False)] * (most - len(own))

    def _microbatch(self, indices: NDArray[np.int64]) -> Microbatch:
        batch = collate(self.dataset, indices)
        return Microbatch(batch, num_tokens(batch, self.seq_len))


class ReadAhead:
    """The samples of a step, read while the device computes the one before. What a data set draws at random
    is a function of the seed, the step and the data rank, whenever it is read."""

    def __init__(self, loader: MicrobatchLoader) -> None:
        self.loader = loader
        self._next: list[Microbatch] | None = None

    def take(self, number: int, position: int) -> list[Microbatch]:
        """Of step `number`, which starts at sample number `position`."""
        if self._next is None:
            self.read(number, position)
        batches, self._next = self._next, None
        return batches or []

    def read(self, number: int, position: int) -> float:
        """For the next `take`. Returns the seconds for which the device had nothing to do meanwhile: all of
        them on a CPU, which computes in this thread; on a GPU none, or all (an upper bound) if it was through
        before the samples were there."""
        began = time.perf_counter()
        world = self.loader.world
        seed_step(self.loader.seed, number, world.data_rank)
        self._next = self.loader.step(position)
        seconds = time.perf_counter() - began
        hidden = world.device.type == "cuda" and not torch.cuda.current_stream(world.device).query()
        return 0.0 if hidden else seconds


def num_tokens(batch: Batch, seq_len: int) -> int:
    """Of a batch of token ids as many as it has; of other samples `seq_len` each, as the plan says."""
    for name in ("inputs", "input_ids"):
        if name in batch and batch[name].dim() > 1 and not batch[name].is_floating_point():
            return batch[name].numel()
    return len(next(iter(batch.values()))) * seq_len


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
