"""Data sets that can only be iterated over, read such that every sample has a number, as in any other set.

A stream is cut into `splits` parts, however many ranks there are: sample number i of the run is the next one
of part i modulo splits. Where the ranks divide the parts, each rank reads its own; else every rank reads all
of them and keeps its share. So the samples of a step are the same on any number of ranks and processes. Where
each part stands after a step lies in the checkpoint: `state_dict()` of what can say it, as torchdata's
StatefulDataLoader asks for it, else the number of samples, which are then read again and passed over.
What a part draws at random is a function of the seed, the part, the epoch and the number of the sample in it.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from mlpipe._core.errors import TrainError
from mlpipe.train.data import microbatch
from mlpipe.train.data.datasets import Streams
from mlpipe.train.data.loader import MicrobatchLoader
from mlpipe.train.data.microbatch import Microbatch, uncounted
from mlpipe.train.data.workers import DataWorkers
from mlpipe.train.seeding import seed_host

_log = logging.getLogger(__name__)
_EACH = 2  # steps that a worker has before it
_KEPT = 3  # steps of which it is known where the parts stood


class Cursor:
    """One part of a stream, and where it stands. It begins anew where it ends; `set_epoch` of the set is told
    the number, if there is one. `saved`: what `state` gave."""

    def __init__(self, streams: Streams, part: int, seed: int, saved: dict[str, Any] | None) -> None:
        self.where = streams.where
        self.part = part
        self.seed = seed
        seed_host(seed, part, 0, 0)
        self.dataset = streams.make(part)
        self.is_counted = _has_shuffle_buffer(self.dataset)
        self.epoch = saved["epoch"] if saved else 0
        self.count = 0
        self._set_epoch()
        if saved is None:
            self._iterator = iter(self.dataset)
        elif saved["state"] is not None:
            self._iterator = self._loaded(saved["state"])
            self.count = saved["count"]
        else:
            self._iterator = iter(self.dataset)
            if saved["count"]:
                told = self.where, saved["count"]
                _log.info("%s does not say where it stands: reading %d samples again", *told)
            for _ in range(saved["count"]):
                self.take()

    def take(self) -> Any:
        """The next sample. Raises TrainError (input) for a stream without any."""
        for _ in range(2):
            seed_host(self.seed, self.part, self.epoch, self.count + 1)
            for sample in self._iterator:
                self.count += 1
                return sample
            if not self.count:
                break
            self.epoch, self.count = self.epoch + 1, 0
            self._set_epoch()
            self._iterator = iter(self.dataset)
        how = "is empty" if not self.epoch else "gives nothing when it is iterated over once more"
        raise TrainError(
            f"its stream {how}",
            where=self.where,
            hint="return an object whose __iter__ begins anew each time it is called",
            kind="input",
        )

    def state(self) -> dict[str, Any]:
        """JSON. Raises TrainError (input) where the set's own state is not."""
        holders = () if self.is_counted else (self._iterator, self.dataset)
        holder = next((one for one in holders if hasattr(one, "state_dict")), None)
        state = holder.state_dict() if holder is not None else None
        try:
            state = json.loads(json.dumps(state))  # as it is now: it may be a part of the set itself
        except (TypeError, ValueError) as error:
            raise TrainError(
                f"its state_dict() cannot be saved: {error}",
                where=self.where,
                hint="let it hold numbers, texts, lists and dicts of those only",
                kind="input",
            ) from error
        return {"epoch": self.epoch, "count": self.count, "state": state}

    def _loaded(self, state: Any) -> Iterator[Any]:
        if hasattr(self.dataset, "load_state_dict"):
            self.dataset.load_state_dict(state)
            return iter(self.dataset)
        iterator = iter(self.dataset)
        iterator.load_state_dict(state)  # type: ignore[attr-defined]  # whose state_dict it was
        return iterator

    def _set_epoch(self) -> None:
        seed_host(self.seed, self.part, self.epoch, 0)  # for its __iter__, too
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self.epoch)


def _has_shuffle_buffer(dataset: Any) -> bool:
    """Whether it is one of Hugging Face's that shuffles through a buffer: their state_dict() leaves out what
    lies in it, and they would go on without these samples."""
    steps = [getattr(dataset, "_ex_iterable", None)]
    while steps:
        step = steps.pop()
        if "BufferShuffled" in type(step).__name__:
            return True
        steps += [one for one in (getattr(step, "ex_iterable", None),) if one is not None]
        steps += getattr(step, "ex_iterables", ())
    return False


@dataclass(frozen=True)
class Share:
    """Which parts a data rank reads, and which samples of a step are its own."""

    splits: int
    num_ranks: int
    rank: int

    @property
    def parts(self) -> list[int]:
        if self.splits % self.num_ranks:
            return list(range(self.splits))
        return list(range(self.rank, self.splits, self.num_ranks))

    def own(self, position: int, count: int) -> list[int]:
        """Of the samples position, ..., position + count - 1."""
        if self.splits % self.num_ranks == 0:
            mine = set(self.parts)
            return [i for i in range(position, position + count) if i % self.splits in mine]
        start, stop = (count * part // self.num_ranks for part in (self.rank, self.rank + 1))
        return list(range(position + start, position + stop))


class Parts:
    """Some of the parts that a rank reads, in one process. Opened when the first step is asked for."""

    def __init__(self, streams: Streams, numbers: list[int], seed: int, saved: list[Any] | None) -> None:
        self.streams = streams
        self.numbers = numbers
        self.seed = seed
        self.saved = saved
        self.cursors: dict[int, Cursor] = {}

    def step(self, position: int, count: int) -> tuple[dict[int, Any], dict[int, Any]]:
        """Samples of the step by their number, and where each part stands after it."""
        splits = self.streams.splits
        samples, states = {}, {}
        for part in self.numbers:
            if part not in self.cursors:
                saved = self.saved[part] if self.saved is not None else None
                self.cursors[part] = Cursor(self.streams, part, self.seed, saved)
            first = position + (part - position) % splits
            for i in range(first, position + count, splits):
                microbatch.reading[0] = i
                samples[i] = self.cursors[part].take()
            microbatch.reading[0] = -1
            states[part] = self.cursors[part].state()
        return samples, states


class StreamReader:
    """The steps of a rank. `saved`: what `state` gave before the run was interrupted. `num_workers`:
    processes that share the rank's parts; with none it reads them itself."""

    def __init__(
        self,
        loader: MicrobatchLoader,
        streams: Streams,
        *,
        num_steps: int,
        num_workers: int,
        saved: list[Any] | None,
        workers_of: Callable[[Callable[[Any], Any]], DataWorkers],
    ) -> None:
        if saved is not None and len(saved) != streams.splits:
            raise TrainError(
                f"the checkpoint knows where each of {len(saved)} parts of the stream stands, and now there "
                f"are {streams.splits}",
                where="data.splits",
                hint=f"write splits: {len(saved)}",
                kind="input",
            )
        world = loader.world
        self.loader = loader
        self.num_steps = num_steps
        self.share = Share(streams.splits, world.num_data_ranks, world.data_rank)
        mine = self.share.parts
        number = min(num_workers, len(mine))
        self.groups = [
            Parts(streams, mine[first :: max(1, number)], loader.seed, saved)
            for first in range(max(1, number))
        ]
        self.workers = workers_of(lambda job: self.groups[job[0]].step(*job[1:])) if number else None
        if self.workers is not None:
            self.workers.grow(number)
        self.saved = saved
        self._asked = 0
        self._states: dict[int, dict[int, Any]] = {}

    def step(self, number: int, position: int) -> list[Microbatch]:
        """Of the samples that are this rank's, equally many microbatches on every rank."""
        count = self.loader.global_batch
        samples: dict[int, Any] = {}
        states: dict[int, Any] = {}
        for part, stands in self._read(number, position, count):
            samples |= part
            states |= stands
        self._states = {n: kept for n, kept in self._states.items() if n > number - _KEPT} | {number: states}
        seed_host(self.loader.seed, number, self.loader.world.data_rank)  # for a `collate` that draws
        size, own = self.loader.micro_batch, self.share.own(position, count)
        # a rank without samples of its own has read those of others
        batches = [
            self.loader.microbatch(samples, own[first : first + size]) for first in range(0, len(own), size)
        ] or [uncounted(self.loader.microbatch(samples, [position]))]
        most = math.ceil(math.ceil(count / self.share.num_ranks) / size)
        return batches + [uncounted(batches[0])] * (most - len(batches))

    def waited(self, seconds: float) -> None:
        """The number of processes stays."""

    def state(self, number: int) -> list[Any] | None:
        """Where each part stood after step `number`, the same on all ranks, which all have to ask."""
        if not self._states:  # no rank has read anything since the checkpoint
            return self.saved
        mine = self._states[number]
        if self.share.num_ranks > 1:
            everyone: list[Any] = [None] * self.loader.world.size
            dist.all_gather_object(everyone, mine)
            mine = {part: state for states in everyone for part, state in states.items()}
        return [mine[part] for part in range(self.share.splits)]

    def _read(self, number: int, position: int, count: int) -> list[tuple[dict[int, Any], dict[int, Any]]]:
        if self.workers is None:
            return [group.step(position, count) for group in self.groups]
        for ahead in range(max(number, self._asked + 1), min(self.num_steps, number + _EACH) + 1):
            for worker in range(len(self.workers)):
                self.workers.ask(worker, (worker, position + (ahead - number) * count, count))
            self._asked = ahead
        answers = [self.workers.answer(worker) for worker in range(len(self.workers))]
        if number == self.num_steps:
            self.workers.close()
        return answers
