"""Which samples a rank reads, and when: a function of the seed and the global sample index alone.

Sample number `i` of the run is the same text under every strategy, world size and batch size; a step
consumes the next `global_batch` numbers, of which each data rank takes a contiguous share. The position
in the data is therefore one number, the samples consumed, and it lies in the checkpoint.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset

from mlpipe._core.errors import TrainError
from mlpipe.plan.plan import DataPlan, Entry, SourcePlan
from mlpipe.train.chat.samples import ChatSamples, open_chat
from mlpipe.train.mixture import Mixture, Shortened
from mlpipe.train.model import Batch, load_entry
from mlpipe.train.order import samples_at
from mlpipe.train.seeding import seed_step
from mlpipe.train.tokens import TokenDataset, open_folder
from mlpipe.train.windows import Windowed
from mlpipe.train.world import World

# Number of the sample that is being read, or -1; in a data worker memory that its rank sees, too.
reading: Any = [-1]


class Streams:
    """A user's set that can only be iterated over, in `splits` parts; `make(part)` opens one at its
    beginning. As `[i]`, whatever the index, it gives its first sample, by which the model is tried out; the
    others are read by streams.py."""

    def __init__(self, make: Callable[[int], Any], splits: int, where: str) -> None:
        self.make = make
        self.splits = splits
        self.where = where
        self._first = next(iter(make(0)), None)

    def __getitem__(self, index: int) -> Any:
        return self._first


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
            f"of a list of samples it made {_form(batch)}, not a dict of tensors",
            where=self.where,
            hint='return {"inputs": tensor, "targets": tensor}, with the samples along dim 0',
            kind="input",
        )


def open_dataset(plan: DataPlan, *, split: str, seq_len: int) -> Any:
    """Token files, what the user's function returns for `split` ("train", "validation"), or a mixture."""
    if plan.chat is not None:
        return open_chat(plan.chat, split, seq_len)
    if plan.tokens is not None:
        return open_tokens(plan.sources[0], split, seq_len)
    sources = [_open_source(source, plan, split, seq_len) for source in plan.sources]
    dataset = sources[0]
    if plan.mix:
        forms = [_form(source[0]) for source in sources]
        odd = next((number for number, form in enumerate(forms) if form != forms[0]), None)
        if odd is not None and plan.collate is None:
            raise TrainError(
                f"samples of the sources 0 and {odd} cannot lie in one batch: {forms[0]} and {forms[odd]}",
                where="data.mix",
                hint="give them the same keys and shapes, or name a function that makes a batch: "
                "data.collate",
                kind="input",
            )
        mixture = Mixture(sources, [source.weight for source in plan.mix])
        dataset = mixture if split == "train" else Shortened(mixture)
    if plan.collate is None:
        return dataset
    collated = Collated(dataset, load_entry(Entry(plan.collate, {})), plan.collate)
    collated.batch([dataset[0], dataset[0 if isinstance(dataset, Streams) else len(dataset) - 1]])
    return collated


def open_files(source: SourcePlan, split: str, seq_len: int) -> Any:
    """A `Windowed`, of Parquet or of tars. Raises TrainError (input)."""
    assert source.files is not None
    plan = source.files
    path = plan.path if split == "train" else plan.validation
    if path is None:
        raise TrainError(
            "there are no files to validate with",
            where=plan.path,
            hint="name them: data.validation",
            kind="input",
        )
    from mlpipe.train.fields import Fields  # tokenizers, pyarrow and tarfile, for those who need them

    if plan.format == "parquet":
        from mlpipe.train.parquet import ParquetRows as Samples
    else:
        from mlpipe.train.tars import TarSamples as Samples  # type: ignore[assignment]
    return Samples(plan, path, Fields(plan, seq_len), source.cache_bytes or 0)


def open_tokens(source: SourcePlan, split: str, seq_len: int) -> TokenDataset:
    """Of a folder, or of a bucket."""
    assert source.tokens is not None
    tokens = open_folder(source.tokens)
    if tokens.url is None:
        return TokenDataset(tokens, split, seq_len)
    from mlpipe.train.token_shards import ShardedTokens

    return ShardedTokens(tokens, tokens.split(split), seq_len, source.cache_bytes or 0)


def _open_source(source: SourcePlan, plan: DataPlan, split: str, seq_len: int) -> Any:
    """Without a `collate` one that gives dicts of tensors."""
    if source.tokens is not None:
        return open_tokens(source, split, seq_len)
    if source.files is not None:
        files = open_files(source, split, seq_len)
        if plan.collate is None:
            from mlpipe.train.fields import check_tensors

            check_tensors(files[0], files.where(0))
        return files
    if source.dataset is None:
        raise TrainError("the plan names no data", kind="bug")
    entry = Entry(source.dataset.entry, {**source.dataset.args, "split": split})
    dataset = _made(entry, 0, plan.splits)
    if _is_stream(dataset):
        return _open_stream(entry, plan, split)
    if plan.splits > 1:
        raise TrainError(
            "its data set is map-style, whose samples any rank finds by their number",
            where=entry.entry,
            hint="leave data.splits away: it is for streams",
            kind="input",
        )
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
    if plan.collate is not None:
        return dataset
    if not _is_sample(sample) and hasattr(dataset, "with_format"):
        dataset = dataset.with_format("torch")  # as Hugging Face's are asked for tensors
        sample, last = dataset[0], dataset[num_samples - 1]
    if num_samples == 0 or not _is_sample(sample):
        raise _no_sample(f"of {num_samples} samples ", sample, entry.entry)
    if _form(last) != _form(sample):
        raise _unlike(0, sample, num_samples - 1, last, entry.entry)
    return dataset


def _open_stream(entry: Entry, plan: DataPlan, split: str) -> Streams:
    if plan.mix or split != "train":
        what = (
            "be mixed with others" if plan.mix else "be validated with: that needs the same samples each time"
        )
        raise TrainError(
            f"its data set can only be iterated over, and so cannot {what}",
            where=entry.entry,
            hint=f"return an object with len() and [i] -> dict of tensors for the split {split!r}",
            kind="input",
        )
    streams = Streams(lambda part: _made(entry, part, plan.splits), plan.splits, entry.entry)
    if plan.collate is not None:
        return streams
    sample = streams[0]
    if not _is_sample(sample) and hasattr(streams.make(0), "with_format"):
        streams = Streams(
            lambda part: _made(entry, part, plan.splits).with_format("torch"), plan.splits, entry.entry
        )
        sample = streams[0]
    if not _is_sample(sample):
        raise _no_sample("", sample, entry.entry)
    return streams


def fingerprint(dataset: Any) -> str | None:
    """Of files of samples, what decides which of them has which number: how many each piece has, in words.
    None of other data."""
    if isinstance(dataset, Collated):
        return fingerprint(dataset.samples)
    if isinstance(dataset, ChatSamples):
        return dataset.identity
    if isinstance(dataset, Mixture):
        told = [words for source in dataset.sources if (words := fingerprint(source)) is not None]
        return ", ".join(told) or None
    if not isinstance(dataset, Windowed) or isinstance(dataset, TokenDataset):
        return None
    digest = hashlib.sha256(dataset.counts.tobytes()).hexdigest()
    return f"{len(dataset)} samples in {len(dataset.counts)} pieces ({digest[:8]})"


def vocab_size_of(dataset: Any) -> int:
    """Of the tokens in the data; 0 where there are none, or nobody knows."""
    if isinstance(dataset, Collated):
        return vocab_size_of(dataset.samples)
    if isinstance(dataset, Mixture):
        return max(map(vocab_size_of, dataset.sources))
    known = isinstance(dataset, TokenDataset | Windowed | ChatSamples)
    return getattr(dataset, "vocab_size", None) or 0 if known else 0


def tokenizer_of(data: DataPlan) -> str | None:
    """Path of the tokenizer.json that its text was read with."""
    if data.tokens is not None:
        path = open_folder(data.tokens).tokenizer_path
        return str(path) if path is not None else None
    chosen = data.chat or data.files
    if chosen is None or chosen.tokenizer is None:
        return None
    from mlpipe.train.tokenizer import tokenizer_file

    return tokenizer_file(chosen.tokenizer)


def _is_stream(dataset: Any) -> bool:
    """torch's own has a [i] that only raises."""
    return isinstance(dataset, IterableDataset) or (
        hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")
    )


def _made(entry: Entry, part: int, num_parts: int) -> Any:
    """What the user's function gives. Where it has parameters `rank` and `world_size`, it makes one of so
    many parts of a stream; else the stream is asked for it: `split(rank, world_size)`,
    or `shard(num_shards=, index=)`."""
    make = load_entry(entry)
    names = inspect.signature(make).parameters
    splits = "rank" in names and "world_size" in names
    given = {"rank": part, "world_size": num_parts} if splits else {}
    try:
        made = make(**entry.args, **given)
        if num_parts > 1 and not splits and callable(getattr(made, "split", None)):
            made, splits = made.split(part, num_parts), True
        elif num_parts > 1 and not splits and hasattr(made, "shard") and _is_stream(made):
            made, splits = made.shard(num_shards=num_parts, index=part), True  # Hugging Face's
    except Exception as error:
        raise TrainError(
            f"failed to make the data set for the split {entry.args['split']!r}: "
            f"{type(error).__name__}: {error}",
            where=entry.entry,
            kind="input",
        ) from error
    if num_parts > 1 and not splits and _is_stream(made):
        raise TrainError(
            f"its stream cannot be cut into {num_parts} parts",
            where=entry.entry,
            hint="let the function take rank and world_size, or the stream have split(rank, world_size); or "
            "leave data.splits away: then each rank reads all of it and keeps its share",
            kind="input",
        )
    return made


def _is_sample(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(map(torch.is_tensor, value.values()))


def _no_sample(of: str, sample: Any, where: str) -> TrainError:
    return TrainError(
        f"its data set {of}gives {_form(sample)}, not a dict of tensors",
        where=where,
        hint='return {"inputs": tensor, "targets": tensor} for each index, or name a function that makes a '
        "batch of such samples: data.collate",
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
        # Which part of the samples is this rank's, and of how many; replicas that come and go change it.
        self.share = (world.data_rank, world.num_data_ranks)

    def step(self, position: int) -> list[Microbatch]:
        """Of the step that starts at sample number `position`, equally many on every rank."""
        rank, num_ranks = self.share
        start, stop = (self.global_batch * part // num_ranks for part in (rank, rank + 1))
        indices = self._order(position + start, stop - start)
        own = [
            self._microbatch(indices[i : i + self.micro_batch])
            for i in range(0, len(indices), self.micro_batch)
        ]
        most = math.ceil(math.ceil(self.global_batch / num_ranks) / self.micro_batch)
        if len(own) == most:
            return own
        other = own[0] if own else self._microbatch(self._order(position, 1))
        return own + [uncounted(other)] * (most - len(own))

    def largest(self) -> list[Microbatch]:
        """Some of the size that a step's may have, for the memory probe: equally many on every rank."""
        return self.step(0)

    def _order(self, start: int, count: int) -> NDArray[np.int64]:
        samples = self.dataset.samples if isinstance(self.dataset, Collated) else self.dataset
        if isinstance(samples, Streams):
            return np.zeros(count, dtype=np.int64)
        return samples_at(samples, self.seed, np.arange(start, start + count, dtype=np.int64))

    def _microbatch(self, indices: NDArray[np.int64]) -> Microbatch:
        return own_part(collate(self.dataset, indices), self.world, self.seq_len)

    def microbatch(self, samples: Mapping[int, Any], numbers: Sequence[int]) -> Microbatch:
        """Of those of the `samples`, by their numbers."""
        batch = _joined(self.dataset, [samples[i] for i in numbers], numbers)
        return own_part(batch, self.world, self.seq_len)


def seeded_step(loader: MicrobatchLoader, number: int, position: int) -> list[Microbatch]:
    """Step `number`, which starts at sample number `position`. What a data set draws at random is a function
    of the seed, the step and the data rank, whenever and wherever it is read."""
    seed_step(loader.seed, number, loader.share[0])
    return loader.step(position)


class StepReader(Protocol):
    """Reads steps in another way than one after the other in this process."""

    def step(self, number: int, position: int) -> list[Microbatch]:
        """As `seeded_step`; the steps come one after the other."""
        ...

    def waited(self, seconds: float) -> None:
        """That the device had nothing to do, since the call before: a step later."""
        ...

    def state(self, number: int) -> list[Any] | None:
        """What a checkpoint after step `number` needs to know besides the position in the data."""
        ...


class ReadAhead:
    """The samples of a step, read while the device computes the one before. `reader`: by whom, if not by
    this process."""

    def __init__(self, loader: MicrobatchLoader, reader: StepReader | None = None) -> None:
        self.loader = loader
        self.reader = reader
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
        if self.reader is None:
            self._next = seeded_step(self.loader, number, position)
        else:
            self._next = self.reader.step(number, position)
            if world.device.type == "cuda":
                self._next = [replace(one, batch=pinned(one.batch)) for one in self._next]
        seconds = time.perf_counter() - began
        hidden = world.device.type == "cuda" and not torch.cuda.current_stream(world.device).query()
        lost = 0.0 if hidden else seconds
        if self.reader is not None:
            self.reader.waited(lost)
        return lost

    def forget(self) -> None:
        """What was read: the share is another one."""
        self._next = None

    def state(self, number: int) -> list[Any] | None:
        """As `StepReader.state`; all ranks ask together."""
        return None if self.reader is None else self.reader.state(number)


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
    if isinstance(dataset, ChatSamples):
        return dataset.padded(indices)
    samples = [_sample(dataset, int(index)) for index in indices]
    reading[0] = -1
    return _joined(dataset, samples, indices)


def _joined(dataset: Any, samples: list[Any], numbers: Sequence[int] | NDArray[np.int64]) -> Batch:
    if isinstance(dataset, Collated):
        return dataset.batch(samples)
    try:
        return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
    except (RuntimeError, KeyError, TypeError) as error:
        odd = next((i for i, sample in enumerate(samples) if _form(sample) != _form(samples[0])), None)
        at = int(numbers[odd or 0])
        where = dataset.where(at) if isinstance(dataset, Windowed) else type(dataset).__name__
        if odd is not None:
            raise _unlike(numbers[0], samples[0], at, samples[odd], where) from error
        if not _is_sample(samples[0]):
            raise _no_sample(f"at {at} ", samples[0], where) from error
        raise


def _sample(dataset: Any, index: int) -> Any:
    reading[0] = index
    try:
        return dataset[index]
    except Exception as error:
        error.add_note(f"at sample {index}")
        raise


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
    return ", ".join(
        f"{key} {tuple(value.shape) if hasattr(value, 'shape') else type(value).__name__}"
        for key, value in sample.items()
    )
