"""Which samples a rank reads, and when: a function of the seed and the global sample index alone.

Sample number `i` of the run is the same text under every strategy, world size and batch size; a step
consumes the next `global_batch` numbers, of which each data rank takes a contiguous share. The position
in the data is therefore one number, the samples consumed, and it lies in the checkpoint.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray

from mlpipe.plan.shares import bounds
from mlpipe.plan.work import TrainPlan
from mlpipe.train.data.datasets import Streams
from mlpipe.train.data.microbatch import Microbatch, collate, joined, own_part, pinned, samples_of, uncounted
from mlpipe.train.data.order import samples_at
from mlpipe.train.seeding import seed_step
from mlpipe.train.world import World


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
        # Of all ranks, where who is slow has less to do (see `plan/shares.py`); None: equal shares.
        self.speeds: Sequence[float] | None = None
        self.unit = 1  # samples that are not dealt to different ranks

    @classmethod
    def of(cls, plan: TrainPlan, dataset: Any, world: World, micro_batch: int) -> Self:
        """As the plan says, but for `micro_batch`."""
        return cls(
            dataset,
            world,
            seed=plan.seed,
            global_batch=plan.global_batch,
            micro_batch=micro_batch,
            seq_len=plan.model.seq_len,
        )

    def step(self, position: int) -> list[Microbatch]:
        """Of the step that starts at sample number `position`, equally many on every rank, but for `speeds`:
        then one at the least, and equally many where ranks send each other rows for their experts."""
        rank, num_ranks = self.share
        cuts = bounds(self.global_batch // self.unit, num_ranks, self.speeds)
        start, stop = (self.unit * cuts[part] for part in (rank, rank + 1))
        indices = self._order(position + start, stop - start)
        own = [
            self._microbatch(indices[i : i + self.micro_batch])
            for i in range(0, len(indices), self.micro_batch)
        ]
        most = math.ceil(math.ceil(self.global_batch / num_ranks) / self.micro_batch)
        if self.speeds is not None:
            first, together = rank - rank % self.world.mesh.ep, self.world.mesh.ep
            share = max(cuts[one + 1] - cuts[one] for one in range(first, first + together))
            most = max(1, math.ceil(self.unit * share / self.micro_batch))
        if len(own) == most:
            return own
        other = own[0] if own else self._microbatch(self._order(position, 1))
        return own + [uncounted(other)] * (most - len(own))

    def largest(self) -> list[Microbatch]:
        """Some of the size that a step's may have, for the memory probe: equally many on every rank."""
        return self.step(0)

    def _order(self, start: int, count: int) -> NDArray[np.int64]:
        samples = samples_of(self.dataset)
        if isinstance(samples, Streams):
            return np.zeros(count, dtype=np.int64)
        return samples_at(samples, self.seed, np.arange(start, start + count, dtype=np.int64))

    def _microbatch(self, indices: NDArray[np.int64]) -> Microbatch:
        return own_part(collate(self.dataset, indices), self.world, self.seq_len)

    def microbatch(self, samples: Mapping[int, Any], numbers: Sequence[int]) -> Microbatch:
        """Of those of the `samples`, by their numbers."""
        batch = joined(self.dataset, [samples[i] for i in numbers], numbers)
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
