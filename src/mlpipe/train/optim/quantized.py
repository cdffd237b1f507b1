"""AdamW whose moments have few bits (Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2022; Li
et al., Memory Efficient Optimizers with 4-bit States, 2023): each value is the index of the nearest of so
many numbers, times the largest of its block.

Blocks lie within rows, which no strategy splits, so that a checkpoint's are the same under any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch.nn import functional as F

from mlpipe._core.errors import TrainError
from mlpipe._core.optimizers import SHORTEST_QUANTIZED_ROW
from mlpipe.train.optim.adamw import AdamW
from mlpipe.train.optim.update import scaled_gradients
from mlpipe.train.shards import LocalShard

_CHUNK_ELEMENTS = {"cpu": 2**18, "cuda": 2**24}  # that are fp32 at a time: what a core's cache holds


Numbers = tuple[float, ...]


class Moment:
    """Of a weight of rows and columns, 0 at first. `codes`: uint8; a row's lie in as many bytes as they need.
    `scales`: fp32, of each `block` values of a row. `numbers`: 256 or 16, ascending; `borders`: up to where
    each but the last is the nearest."""

    def __init__(self, weight: torch.Tensor, numbers: Numbers, borders: Numbers, block: int) -> None:
        self.numbers, self.borders = numbers, borders
        self.block = block
        self.num_columns = weight.shape[1]
        self.codes_per_byte = 8 // (len(numbers) - 1).bit_length()
        num_bytes = -(-self.num_columns // self.codes_per_byte)
        nearest_zero = min(range(len(numbers)), key=lambda code: abs(numbers[code]))
        byte = nearest_zero if self.codes_per_byte == 1 else nearest_zero * 17  # both halves
        self.codes = torch.full((len(weight), num_bytes), byte, dtype=torch.uint8, device=weight.device)
        self.scales = weight.new_zeros((len(weight), -(-self.num_columns // block)))

    def values(self, rows: slice) -> torch.Tensor:
        """In fp32."""
        codes = self.codes[rows].int()
        if self.codes_per_byte == 2:
            codes = torch.stack((codes >> 4, codes & 15), dim=-1).flatten(1)[:, : self.num_columns]
        return _on(self.numbers, codes.device)[codes].mul_(self._spread(self.scales[rows]))

    def take(self, rows: slice, values: torch.Tensor) -> None:
        """The nearest that there is."""
        blocks = F.pad(values, (0, -self.num_columns % self.block)).view(len(values), -1, self.block)
        largest = blocks.abs().amax(-1)
        self.scales[rows] = largest
        ratio = values / self._spread(largest.clamp(min=torch.finfo(torch.float32).tiny))
        codes = torch.bucketize(ratio, _on(self.borders, ratio.device), out_int32=True)
        if self.codes_per_byte == 2:
            pairs = F.pad(codes, (0, self.num_columns % 2)).view(len(codes), -1, 2)
            codes = (pairs[..., 0] << 4) | pairs[..., 1]
        self.codes[rows] = codes

    def _spread(self, scales: torch.Tensor) -> torch.Tensor:
        """Of each value the scale of its block."""
        return scales.repeat_interleave(self.block, dim=1)[:, : self.num_columns]


MakeMoment = Callable[[torch.Tensor, bool], Moment]


class QuantizedAdamW:
    """`moment(weight, signed)`: the first moment of a weight is signed, the second is not. Matrices decay,
    vectors (norms, biases) do not. Tensors of short rows are AdamW's with fp32 moments."""

    def __init__(self, shards: Sequence[LocalShard], args: dict[str, Any], moment: MakeMoment) -> None:
        self.quantized = [shard for shard in shards if is_quantized(shard)]
        self.adamw = AdamW([shard for shard in shards if not is_quantized(shard)], **args)
        self._moments = {
            shard.name: (moment(weight, True), moment(weight, False))
            for shard in self.quantized
            for weight in (shard.local.flatten(1),)
        }
        for shard in self.quantized:
            _check_blocks(shard, self._moments[shard.name][0].block)

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
        """The codes, of the parameter's shape where each is a byte, and a scale for each block; AdamW's of
        all else."""
        shards = []
        for shard in self.quantized:
            for kind, moment in zip(("exp_avg", "exp_avg_sq"), self._moments[shard.name], strict=True):
                if moment.codes_per_byte == 1:
                    shards.append(shard.state(f"{kind}_codes", moment.codes.view(shard.local.shape)))
                else:
                    shards.append(_by_rows(shard, f"{kind}_codes", moment.codes))
                shards.append(_by_rows(shard, f"{kind}_scales", moment.scales))
        return [*shards, *self.adamw.state()]

    def scalars(self) -> dict[str, Any]:
        """AdamW's."""
        return self.adamw.scalars()

    def load_scalars(self, scalars: dict[str, Any]) -> None:
        """As `scalars` gave them."""
        self.adamw.load_scalars(scalars)


def is_quantized(shard: LocalShard) -> bool:
    """Whether its moments have few bits."""
    return len(shard.shape) >= 2 and math.prod(shard.shape[1:]) >= SHORTEST_QUANTIZED_ROW


@cache
def dynamic_numbers(num_bits: int, signed: bool) -> Numbers:
    """The 256 or 16 numbers of the dynamic tree data type (Dettmers et al., section 2.1 and figure 2;
    bitsandbytes' and torchao's `create_dynamic_map`), ascending: of each power of ten, one less than there
    are bits, the middles of so many equal parts of [0.1, 1] as there are bits left; 0 and 1; with their
    opposites where `signed`."""
    numbers = [0.0, 1.0]
    for exponent in range(num_bits - 1):
        parts = 2**exponent if signed else 2 ** (exponent + 1)
        edges = torch.linspace(0.1, 1, parts + 1)
        middle = (10.0 ** (exponent - (num_bits - 2))) * (edges[:-1] + edges[1:]) / 2
        numbers += middle.tolist()
        if signed:
            numbers += (-middle).tolist()
    return tuple(sorted(numbers))


@cache
def middles(numbers: Numbers) -> Numbers:
    """Borders between each two neighbours, in fp32."""
    values = torch.tensor(numbers, dtype=torch.float32)
    return tuple(((values[:-1] + values[1:]) / 2).tolist())


def _by_rows(shard: LocalShard, kind: str, local: torch.Tensor) -> LocalShard:
    """A slice of columns has whole blocks of them, see `_check_blocks`."""
    cut = next((cut for cut in shard.slices if cut.dim), None)
    rank, num_ranks = (cut.rank, cut.num_ranks) if cut else (0, 1)
    columns = local.shape[1]
    return shard.state_like(
        kind, local, (shard.shape[0], num_ranks * columns), (shard.offset[0], rank * columns)
    )


def _check_blocks(shard: LocalShard, block: int) -> None:
    """Raises TrainError (input) for a slice that ends within a block: another mesh would have other ones."""
    for cut in shard.slices:
        length = shard.shape[cut.dim] // cut.num_ranks
        if cut.dim and (len(shard.shape) != 2 or length % block):
            raise TrainError(
                f"this optimizer has a scale for each {block} values of a row, and of those of {shard.name}, "
                f"which are split over {cut.axis}, a rank has {length}",
                where="train.optimizer",
                hint=f"take widths that {block * cut.num_ranks} divides, or adamw",
                kind="input",
            )


def _chunks(weight: torch.Tensor) -> Iterator[slice]:
    step = max(1, _CHUNK_ELEMENTS[weight.device.type] // weight.shape[1])
    for start in range(0, len(weight), step):
        yield slice(start, start + step)


@cache
def _on(numbers: Numbers, device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32, device=device)
