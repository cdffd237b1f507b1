"""`buckets: auto`: how many gradients travel together, chosen by passes over the very link.

Small buckets leave early and hide behind the rest of the backward pass, but each pays the link's latency;
large ones pay it seldom, and the last has nothing to hide behind (Li et al., PyTorch Distributed, 2020). Each
size is timed on a microbatch, without an update, beside DDP's own. One is taken that was faster each time
than that was at its fastest; else DDP's stays. All ranks see the slowest rank's times, and so decide alike.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mlpipe._core.units import format_bytes
from mlpipe.train.data.microbatch import Microbatch
from mlpipe.train.memory_probe import undone
from mlpipe.train.parallel.parallelized_model import ParallelizedModel
from mlpipe.train.schedules import Schedule
from mlpipe.train.world import World

_log = logging.getLogger(__name__)
DEFAULT = "default"
_SIZES = tuple(kib * 2**10 for kib in (4096, 1024, 16384, 256, 65536))  # tried in this order
_DEFAULT_FIRST = 2**20  # DDP's default has a first bucket of so many, and 25 MiB after it
_ROUNDS = 3
_MOST_SECONDS = 20.0  # of timed passes
_LONGEST_SECONDS = _MOST_SECONDS / 8  # of one pass: of slower ones too few could be looked at
_GAIN = 0.98  # what is not faster by so much is not worth another order of sums


def sizes_to_try(gradient_bytes: int) -> list[int]:
    """Those that make other buckets of so many bytes than the others."""
    cut = [size for size in _SIZES if size < gradient_bytes]
    return [*cut, gradient_bytes] if gradient_bytes > _DEFAULT_FIRST else cut


def fastest(seconds: Mapping[str, Sequence[float]]) -> str:
    """Of measured sizes the one with the best worst round, if that is below the default's best."""
    whole = {size: max(rounds) for size, rounds in seconds.items() if len(rounds) == _ROUNDS}
    others = [size for size in whole if size != DEFAULT]
    if DEFAULT not in whole or not others:
        return DEFAULT
    best = min(others, key=whole.__getitem__)
    return best if whole[best] < _GAIN * min(seconds[DEFAULT]) else DEFAULT


def choose_buckets(
    model: ParallelizedModel,
    schedule: Schedule,
    batches: Sequence[Microbatch],
    world: World,
    before: dict[str, Any] | None,
) -> dict[str, Any]:
    """Sets the buckets of `model`, and leaves the choice there. `before`: the choice of the checkpoint that
    this training goes on from, which as many ranks keep. Returns fields of the start record."""
    if model.set_buckets is None:
        return {}
    if before is None or before["num_ranks"] != world.size:
        seconds = _measure(model, schedule, batches, world)
        chosen = fastest(seconds)
        size = None if chosen == DEFAULT else int(chosen)
        before = {"bytes": size, "num_ranks": world.size, "seconds": seconds}
        _log.info("buckets of gradients: %s", "as DDP's default" if size is None else format_bytes(size))
    model.bucket_choice = before
    model.set_buckets(before["bytes"])
    best = {size: min(rounds) for size, rounds in before["seconds"].items() if rounds}
    return {"bucket_bytes": before["bytes"], "bucket_seconds": best}


def _measure(
    model: ParallelizedModel, schedule: Schedule, batches: Sequence[Microbatch], world: World
) -> dict[str, list[float]]:
    """Seconds of a pass on the slowest rank, by size and round. After the first round the fastest goes on
    beside the default; a link that is too slow for that leaves rounds out."""
    gradient_bytes = sum(p.nbytes for p in model.module.parameters() if p.requires_grad)
    left = [str(size) for size in sizes_to_try(gradient_bytes)]
    seconds: dict[str, list[float]] = {DEFAULT: []}
    spent = 0.0
    if left and (once := _seconds_of(DEFAULT, 1, model, schedule, batches, world)[0]) > _LONGEST_SECONDS:
        return {DEFAULT: [once]}
    for turn in range(_ROUNDS if left else 0):
        for size in [DEFAULT, *left]:
            if spent > _MOST_SECONDS:
                return seconds
            passed = _seconds_of(size, 2, model, schedule, batches, world)
            seconds.setdefault(size, []).append(min(passed))
            spent += sum(passed)
        if turn == 0:
            left = [min(left, key=lambda size: seconds[size][0])]
    return seconds


def _seconds_of(
    size: str,
    num_passes: int,
    model: ParallelizedModel,
    schedule: Schedule,
    batches: Sequence[Microbatch],
    world: World,
) -> list[float]:
    """Of so many passes, each as the slowest rank had it, after one, after which DDP sorts its buckets."""
    assert model.set_buckets is not None
    model.set_buckets(None if size == DEFAULT else int(size))
    passed = []
    with undone(model):
        for _ in range(1 + num_passes):
            began = time.perf_counter()
            schedule.forward_backward(batches)
            if world.device.type == "cuda":
                torch.cuda.synchronize(world.device)
            passed.append(time.perf_counter() - began)
            model.module.zero_grad(set_to_none=True)
    slowest = torch.tensor(passed[1:], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return [float(one) for one in slowest]
