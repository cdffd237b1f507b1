"""Samples that go through the model together: stacked, or as the user's own function has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mlpipe._core.errors import TrainError
from mlpipe.train.data.tokens import TokenDataset
from mlpipe.train.data.uneven_samples import UnevenSamples
from mlpipe.train.data.windows import Windowed
from mlpipe.train.model import Batch
from mlpipe.train.world import World

# Number of the sample that is being read, or -1; in a data worker memory that its rank sees, too.
reading: Any = [-1]


@dataclass(frozen=True)
class Collated:
    """A user's `samples`, and their function that makes a batch of a list of them. `where`: its path."""

    samples: Any
    function: Callable[[list[Any]], Batch]
    where: str

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]

    def batch(self, samples: list[Any]) -> Batch:
        """Raises TrainError (input) where the function gives no batch."""
        batch = self.function(samples)
        if isinstance(batch, Mapping) and batch and all(map(torch.is_tensor, batch.values())):
            return dict(batch)
        raise TrainError(
            f"of a list of samples it made {form(batch)}, not a dict of tensors",
            where=self.where,
            hint='return {"inputs": tensor, "targets": tensor}, with the samples along dim 0',
            kind="input",
        )


@dataclass(frozen=True)
class Microbatch:
    """What goes through the model at a time. `num_tokens`: in it, whether they are targets or not;
    `num_padding`: of these, how many fill up shorter samples; None: the data do not tell. `work`: in any
    unit, of this one, and of the largest that a rank computes at the same time. One that
    does not `count` only keeps this rank in step with others that have more of them, since passes of a
    sharded model need all ranks: its loss, gradient and tokens count for nothing."""

    batch: Batch
    num_tokens: int
    counts: bool = True
    num_padding: int | None = None
    work: tuple[float, float] | None = None


def own_part(batch: Batch, world: World, seq_len: int) -> Microbatch:
    """Of a batch that the ranks of a data rank have in common: all, or this one's part of each sequence."""
    if world.mesh.cp > 1:
        from mlpipe.train.parallel.context import cut_batch

        batch = cut_batch(batch, world)
    return Microbatch(batch, num_tokens(batch, seq_len))


def uncounted(microbatch: Microbatch) -> Microbatch:
    """The same, for the other ranks' sake."""
    return replace(microbatch, counts=False)


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
    return {key: tensor.to(device, non_blocking=True) for key, tensor in pinned(batch).items()}


def pinned(batch: Batch) -> Batch:
    """In memory that the device may read by itself; what lies there already stays."""
    return {key: tensor.pin_memory() for key, tensor in batch.items()}


def collate(dataset: Any, indices: NDArray[np.int64]) -> Batch:
    """One batch of those samples: stacked along a new dim 0, or as the user's own function has it. Token
    files are cut in one go."""
    if isinstance(dataset, TokenDataset):
        windows = torch.from_numpy(dataset.windows(indices))
        return {"inputs": windows[:, :-1].contiguous(), "targets": windows[:, 1:].contiguous()}
    if isinstance(dataset, UnevenSamples):
        return dataset.padded(indices)
    samples = [_sample(dataset, int(index)) for index in indices]
    reading[0] = -1
    return joined(dataset, samples, indices)


def samples_of(dataset: Any) -> Any:
    """The data set itself, where a function of the user's makes batches of it."""
    return dataset.samples if isinstance(dataset, Collated) else dataset


def joined(dataset: Any, samples: list[Any], numbers: Sequence[int] | NDArray[np.int64]) -> Batch:
    if isinstance(dataset, Collated):
        return dataset.batch(samples)
    try:
        return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
    except (RuntimeError, KeyError, TypeError) as error:
        odd = next((i for i, sample in enumerate(samples) if form(sample) != form(samples[0])), None)
        at = int(numbers[odd or 0])
        where = dataset.where(at) if isinstance(dataset, Windowed) else type(dataset).__name__
        if odd is not None:
            raise unlike(numbers[0], samples[0], at, samples[odd], where) from error
        if not is_sample(samples[0]):
            raise no_sample(f"at {at} ", samples[0], where) from error
        raise


def _sample(dataset: Any, index: int) -> Any:
    reading[0] = index
    try:
        return dataset[index]
    except Exception as error:
        error.add_note(f"at sample {index}")
        raise


def is_sample(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(map(torch.is_tensor, value.values()))


def no_sample(of: str, sample: Any, where: str) -> TrainError:
    return TrainError(
        f"its data set {of}gives {form(sample)}, not a dict of tensors",
        where=where,
        hint='return {"inputs": tensor, "targets": tensor} for each index, or name a function that makes a '
        "batch of such samples: data.collate",
        kind="input",
    )


def unlike(i: int, sample: Any, j: int, other: Any, where: str) -> TrainError:
    return TrainError(
        f"samples {i} and {j} cannot lie in one batch: {form(sample)} and {form(other)}",
        where=where,
        hint="return the same keys and shapes for every index: cut or pad what differs in length",
        kind="input",
    )


def form(sample: Any) -> str:
    """Keys and shapes."""
    if not isinstance(sample, dict):
        return type(sample).__name__
    return ", ".join(
        f"{key} {tuple(value.shape) if hasattr(value, 'shape') else type(value).__name__}"
        for key, value in sample.items()
    )
