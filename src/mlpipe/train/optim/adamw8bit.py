"""AdamW whose moments have 8 bits (Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mlpipe._core.optimizers import QUANTIZED_BLOCK
from mlpipe.train.optim.quantized import Moment, QuantizedAdamW, dynamic_numbers, middles
from mlpipe.train.shards import LocalShard


def adamw8bit(shards: Sequence[LocalShard], **args: Any) -> QuantizedAdamW:
    """A scale for each 256 values of a row."""
    return QuantizedAdamW(shards, args, _moment)


def _moment(weight: torch.Tensor, signed: bool) -> Moment:
    numbers = dynamic_numbers(8, signed)
    borders = middles(numbers)
    if not signed:
        borders = (0.0, *borders[1:])  # a square that is not 0 stays so: a step would divide by `eps` alone
    return Moment(weight, numbers, borders, QUANTIZED_BLOCK)
