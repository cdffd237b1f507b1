"""Numbers in 16, 8 and 4 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from mlpipe._core.compression import BLOCK
from mlpipe.train.parallel.compression.averager import Coded, MakeAverager

_FP16_EXPONENT = 15  # of 65,504, its largest number
_SCALE_BYTES = 4


class _Bf16:
    """Rounded to 8 significant bits; of fp32's range."""

    def encode(self, rows: Tensor) -> Tensor:
        return rows.bfloat16().view(torch.uint8)

    def decode(self, codes: Tensor, length: int) -> Tensor:
        return codes.view(torch.bfloat16).float()


class _Fp16:
    """Rounded to 11 significant bits, times a power of two for each row, so that the largest number fits:
    what fp16 can represent is the same afterwards."""

    def encode(self, rows: Tensor) -> Tensor:
        largest = rows.abs().amax(1, keepdim=True)
        exponent = (torch.frexp(largest).exponent - _FP16_EXPONENT).clamp_min_(-126)
        scale = torch.ldexp(torch.ones_like(largest), exponent)
        scale = torch.where(largest.isfinite(), scale, largest)  # and all is nan or 0: `decode` multiplies
        values = (rows / scale).half()
        return torch.cat([scale.view(torch.uint8), values.view(torch.uint8)], 1)

    def decode(self, codes: Tensor, length: int) -> Tensor:
        scale = codes[:, :_SCALE_BYTES].contiguous().view(torch.float32)
        return codes[:, _SCALE_BYTES:].contiguous().view(torch.float16).float() * scale


class _Int:
    """Whole numbers from -`most` to `most`, times a scale for each block: the largest value of it over
    `most`. Rounded to the nearest."""

    def __init__(self, most: int) -> None:
        self.most = most

    def encode(self, rows: Tensor) -> Tensor:
        blocks = rows.view(rows.shape[0], -1, BLOCK)
        scale = blocks.abs().amax(2, keepdim=True) / self.most
        values = (blocks / scale.clamp_min(torch.finfo(torch.float32).tiny)).round_()
        values = values.nan_to_num_(0, 0, 0).add_(self.most).to(torch.uint8).flatten(1)
        if self.most < 8:
            values = values[:, ::2] * 16 + values[:, 1::2]
        return torch.cat([scale.flatten(1).view(torch.uint8), values], 1)

    def decode(self, codes: Tensor, length: int) -> Tensor:
        num_scales = length // BLOCK
        scale = codes[:, : num_scales * _SCALE_BYTES].contiguous().view(torch.float32)
        values = codes[:, num_scales * _SCALE_BYTES :]
        if self.most < 8:
            values = torch.stack([values // 16, values % 16], 2).flatten(1)
        blocks = values.float().sub_(self.most).view(codes.shape[0], num_scales, BLOCK)
        # 0 x inf and nan x anything are nan
        return (blocks * scale[..., None]).flatten(1)


def bf16() -> MakeAverager:
    """Of buckets of any tensors."""
    return lambda tensors: Coded(_Bf16())


def fp16() -> MakeAverager:
    """Likewise."""
    return lambda tensors: Coded(_Fp16())


def int8() -> MakeAverager:
    """Likewise."""
    return lambda tensors: Coded(_Int(127))


def int4() -> MakeAverager:
    """Likewise."""
    return lambda tensors: Coded(_Int(7))
