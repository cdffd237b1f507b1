"""A user's map-style set of samples that differ in length, and that tells it before they are read."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlpipe._core.errors import TrainError
from mlpipe.train.data.microbatch import form
from mlpipe.train.data.uneven_samples import UnevenSamples, check_alike

_KEYS = ("inputs", "targets")


class OwnSamples(UnevenSamples):
    """`dataset`: has `lengths`, or `length(i)`. Longer samples are cut to `seq_len` tokens. Raises TrainError
    (input), also where ranks are told other lengths."""

    def __init__(self, dataset: Any, where: str, seq_len: int) -> None:
        self.dataset, self.where, self.seq_len = dataset, where, seq_len
        self._told = self._lengths()
        self.lengths = np.minimum(self._told, seq_len)
        for index in (0, len(self) - 1):
            self.sample(index)
        digest = hashlib.sha256(self._told.tobytes()).hexdigest()
        told = f"{len(self)} samples of {self._told.sum()} tokens ({digest[:8]})"
        check_alike(digest, where, told, "let it have the same samples in the same order on every worker")

    def sample(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """As the base class says. Raises TrainError (input) where the set does not keep its word."""
        try:
            sample = self.dataset[index]
        except Exception as error:
            error.add_note(f"at sample {index}")
            raise
        try:
            inputs, targets = (np.asarray(sample[key]) for key in _KEYS)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise self._unfit(index, form(sample)) from error
        if (
            inputs.ndim != 1
            or inputs.shape != targets.shape
            or {inputs.dtype.kind, targets.dtype.kind} - {*"iu"}
        ):
            shapes = (
                f"{key} {one.shape} of {one.dtype}" for key, one in zip(_KEYS, (inputs, targets), strict=True)
            )
            raise self._unfit(index, ", ".join(shapes))
        if len(inputs) != self._told[index]:
            raise TrainError(
                f"sample {index} has {len(inputs)} tokens, and its data set says {self._told[index]}",
                where=self.where,
                hint="let length(i) be the number of inputs of [i]",
                kind="input",
            )
        length = self.seq_len
        return inputs[:length].astype(np.int64), targets[:length].astype(np.int64)

    @property
    def notes(self) -> list[str]:
        """What a report says of them."""
        num_cut = int((self._told > self.seq_len).sum())
        return [f"{num_cut} of {len(self)} samples cut to {self.seq_len} tokens"] if num_cut else []

    def _unfit(self, index: int, what: str) -> TrainError:
        return TrainError(
            f"sample {index} is {what}",
            where=self.where,
            hint='return {"inputs": ..., "targets": ...}, equally many whole numbers each; a '
            "target of -100 is not learnt",
            kind="input",
        )

    def _lengths(self) -> NDArray[np.int64]:
        """As the set tells them."""
        try:
            size = len(self.dataset)
            if (told := getattr(self.dataset, "lengths", None)) is None:
                told = [self.dataset.length(index) for index in range(size)]
            found = np.asarray(told)
        except Exception as error:
            raise TrainError(
                f"its data set does not tell how long its samples are: {type(error).__name__}: {error}",
                where=self.where,
                hint="give it len() and length(i), or lengths; or leave data.packing away",
                kind="input",
            ) from error
        if found.shape != (size,) or not size or found.dtype.kind not in "iu":
            raise TrainError(
                f"its data set of {size} samples tells lengths {found.shape} of {found.dtype}",
                where=self.where,
                hint="a whole number of tokens for each sample, and one sample at the least",
                kind="input",
            )
        if len(short := np.flatnonzero(found < 1)):
            raise TrainError(
                f"its data set says that sample {short[0]} has {found[short[0]]} tokens",
                where=self.where,
                hint="leave out samples without any: each has one at the least",
                kind="input",
            )
        return found.astype(np.int64)
