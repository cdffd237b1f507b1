"""By its first sample a data set of the user's own is known again when a training goes on."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch

from mlpipe.plan.data import DataPlan
from mlpipe.train.data.datasets import Streams
from mlpipe.train.data.microbatch import collate, samples_of
from mlpipe.train.data.mixture import Mixture
from mlpipe.train.model import Batch

_UNKNOWN = "-"
_LOOKS = 16  # at a sample that seems to be another one


def digests(dataset: Any, plan: DataPlan, twice: Batch) -> str | None:
    """A word for each source: `digest`, or '-' of what is not the user's own. `twice`: a batch of the first
    of all samples, which has been read. None where nothing is known."""
    if isinstance(samples_of(dataset), Streams):
        return None
    words = [
        _UNKNOWN if own.dataset is None else _seen(dataset, number, 2) if number else digest(twice, 2)
        for number, own in enumerate(plan.sources)
    ]
    return " ".join(words) if {*words} != {_UNKNOWN} else None


def changes(dataset: Any, plan: DataPlan, before: str, now: str) -> list[str]:
    """Notes of the sources whose first sample is another one than before. They are read again: of samples
    that are flipped with p = 1/2 two are alike half of the time. No error: what reads them may be of another
    version, or round otherwise on another machine."""
    words = enumerate(zip(before.split(), now.split(), strict=False))
    return [
        f"the first sample{f' of source {number}' if plan.mix else ''} is another one than at the "
        "checkpoint: unless samples are drawn at random, the data have changed"
        for number, (former, word) in words
        if _UNKNOWN not in (former, word) and word != former and word == _seen(dataset, number, _LOOKS)
    ]


def digest(batch: Batch, number: int) -> str:
    """Of a sample that makes up a batch, so many times. '-' where it differs there, as one that is changed at
    random, or a function of the user's has put the batch together otherwise."""
    found = hashlib.sha256()
    for name, values in sorted(batch.items()):
        is_plain = values.layout == torch.strided and not values.is_nested
        if not is_plain or values.shape[:1] != (number,):
            return _UNKNOWN
        one, *others = {_bytes(value) for value in values}  # a NaN is like itself there
        if others:
            return _UNKNOWN
        found.update(f"{name} {values.dtype} {[*values.shape[1:]]} ".encode() + one)
    return found.hexdigest()[:16]


def _bytes(value: torch.Tensor) -> bytes:
    plain = torch.empty(value.shape, dtype=value.dtype).copy_(value)  # without its strides
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def _seen(dataset: Any, source: int, number: int) -> str:
    """`digest` of a batch of so many times the first sample of a source; '-' where a function of the user's
    refuses such a batch, which no training may have asked of it."""
    samples = samples_of(dataset)
    first = samples.starts[source] if isinstance(samples, Mixture) else 0
    try:
        return digest(collate(dataset, np.full(number, first, dtype=np.int64)), number)
    except Exception:
        return _UNKNOWN
