"""AdamW whose moments have 4 bits (Li et al., Memory Efficient Optimizers with 4-bit States, 2023), blocks
with a scale each, as in torchao: in the paper the second moment has one for each row and column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mlpipe._core.optimizers import QUANTIZED_BLOCK_4BIT
from mlpipe.train.optim.quantized import Moment, QuantizedAdamW, dynamic_numbers, middles
from mlpipe.train.shards import LocalShard

_LINEAR = tuple(number / 16 for number in range(1, 17))  # without 0: a step divides by its root (section 4.1)


def adamw4bit(shards: Sequence[LocalShard], **args: Any) -> QuantizedAdamW:
    """A scale for each 128 values of a row; two values in a byte."""
    return QuantizedAdamW(shards, args, _moment)


def _moment(weight: torch.Tensor, signed: bool) -> Moment:
    numbers = dynamic_numbers(4, signed) if signed else _LINEAR
    return Moment(weight, numbers, middles(numbers), QUANTIZED_BLOCK_4BIT)
