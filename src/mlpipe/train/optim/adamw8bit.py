"""AdamW whose moments have 8 bits (Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2022): each
value is the index of the nearest of 256 numbers, times the largest of its block.

Blocks lie within rows, which no strategy splits, so that a checkpoint's are the same under any other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.nn import functional as F

from mlpipe._core.optimizers import QUANTIZED_BLOCK, SHORTEST_QUANTIZED_ROW
from mlpipe.train.optim.adamw import AdamW
from mlpipe.train.optim.update import scaled_gradients
from mlpipe.train.shards import LocalShard

_CHUNK_ELEMENTS = {"cpu": 2**18, "cuda": 2**24}  # that are fp32 at a time: what a core's cache holds


@dataclass
class _Moment:
    """`codes`: uint8, of the parameter's rows and columns. `scales`: fp32, of each block of a row."""

    codes: torch.Tensor
    scales: torch.Tensor
    signed: bool

    def values(self, rows: slice) -> torch.Tensor:
        """In fp32."""
        numbers = levels(self.signed, self.codes.device)
        found = numbers[self.codes[rows].int()]
        return found.mul_(_spread(self.scales[rows], found.shape[1]))

    def take(self, rows: slice, values: torch.Tensor) -> None:
        """The nearest that there is."""
        padded = F.pad(values, (0, -values.shape[1] % QUANTIZED_BLOCK))
        blocks = padded.view(len(values), -1, QUANTIZED_BLOCK)
        largest = blocks.abs().amax(-1)
        self.scales[rows] = largest
        ratio = values / _spread(largest.clamp(min=torch.finfo(torch.float32).tiny), values.shape[1])
        self.codes[rows] = torch.bucketize(ratio, _borders(self.signed, ratio.device), out_int32=True)


class AdamW8bit:
    """Matrices decay, vectors (norms, biases) do not. Tensors of short rows are AdamW's with fp32 moments."""

    def __init__(
        self, shards: Sequence[LocalShard], *, betas: Sequence[float], eps: float, weight_decay: float
    ) -> None:
        self.quantized = [shard for shard in shards if is_quantized(shard)]
        rest = [shard for shard in shards if not is_quantized(shard)]
        self.adamw = AdamW(rest, betas=betas, eps=eps, weight_decay=weight_decay)
        self._moments = {shard.name: (_zeros(shard, True), _zeros(shard, False)) for shard in self.quantized}

    @torch.no_grad()
    def step(self, *, lr: float, scale: float) -> None:
        """One update with the gradients multiplied by `scale`."""
        pairs = scaled_gradients(self.quantized, scale)
        self.adamw.step(lr=lr, scale=scale)  # which counts the updates
        count = self.adamw.count.to(self.quantized[0].local.device) if self.quantized else self.adamw.count
        for shard, gradient in pairs:
            mean, square = self._moments[shard.name]
            weight, gradient = shard.local.flatten(1), gradient.flatten(1)
            for rows in _chunks(weight):
                exp_avg, exp_avg_sq = mean.values(rows), square.values(rows)
                torch._fused_adamw_(
                    [weight[rows]],
                    [gradient[rows]],
                    [exp_avg],
                    [exp_avg_sq],
                    [],
                    [count],
                    lr=lr,
                    beta1=self.adamw.betas[0],
                    beta2=self.adamw.betas[1],
                    weight_decay=self.adamw.weight_decay if shard.is_decayed else 0.0,
                    eps=self.adamw.eps,
                    amsgrad=False,
                    maximize=False,
                )
                mean.take(rows, exp_avg)
                square.take(rows, exp_avg_sq)
            if not shard.local.is_contiguous():  # its rows are a copy
                shard.local.copy_(weight.view(shard.local.shape))

    def state(self) -> list[LocalShard]:
        """Codes of the parameters' shapes, and a scale for each block of their rows; AdamW's of all else."""
        found = []
        for shard in self.quantized:
            for kind, moment in zip(("exp_avg", "exp_avg_sq"), self._moments[shard.name], strict=True):
                found.append(shard.state(f"{kind}_codes", moment.codes.view(shard.local.shape)))
                shape, offset = (shard.shape[0], moment.scales.shape[1]), (shard.offset[0], 0)
                found.append(shard.state_like(f"{kind}_scales", moment.scales, shape, offset))
        return [*found, *self.adamw.state()]

    def scalars(self) -> dict[str, Any]:
        """AdamW's."""
        return self.adamw.scalars()

    def load_scalars(self, scalars: dict[str, Any]) -> None:
        """As `scalars` gave them."""
        self.adamw.load_scalars(scalars)


def is_quantized(shard: LocalShard) -> bool:
    """Whether its moments have 8 bits."""
    return len(shard.shape) >= 2 and math.prod(shard.shape[1:]) >= SHORTEST_QUANTIZED_ROW


def _zeros(shard: LocalShard, signed: bool) -> _Moment:
    weight = shard.local.flatten(1)
    zero = int((levels(signed, torch.device("cpu")) == 0).nonzero()[0])
    codes = torch.full(weight.shape, zero, dtype=torch.uint8, device=weight.device)
    blocks = -(-weight.shape[1] // QUANTIZED_BLOCK)
    return _Moment(codes, weight.new_zeros((weight.shape[0], blocks)), signed)


def _chunks(weight: torch.Tensor) -> Iterator[slice]:
    step = max(1, _CHUNK_ELEMENTS[weight.device.type] // weight.shape[1])
    for start in range(0, len(weight), step):
        yield slice(start, start + step)


def _spread(scales: torch.Tensor, num_columns: int) -> torch.Tensor:
    """Of each value the scale of its block."""
    return scales.repeat_interleave(QUANTIZED_BLOCK, dim=1)[:, :num_columns]


@cache
def levels(signed: bool, device: torch.device) -> torch.Tensor:
    """The 256 numbers of the dynamic tree data type (section 2.1 and figure 2; bitsandbytes' and torchao's
    `create_dynamic_map`), ascending: of each of seven powers of ten the middles of so many equal parts of
    [0.1, 1] as there are bits left; 0 and 1; with their opposites where `signed`."""
    found = [0.0, 1.0]
    for exponent in range(7):
        parts = 2**exponent if signed else 2 ** (exponent + 1)
        edges = torch.linspace(0.1, 1, parts + 1)
        middles = (10.0 ** (exponent - 6)) * (edges[:-1] + edges[1:]) / 2
        found += middles.tolist()
        if signed:
            found += (-middles).tolist()
    return torch.tensor(sorted(found), dtype=torch.float32, device=device)


@cache
def _borders(signed: bool, device: torch.device) -> torch.Tensor:
    numbers = levels(signed, device)
    borders = (numbers[:-1] + numbers[1:]) / 2
    if not signed:
        borders[0] = 0.0  # a square that is not 0 stays so: a step would divide by `eps` alone
    return borders
