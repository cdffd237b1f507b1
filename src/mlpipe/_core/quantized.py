"""How the weights beside which adapters are trained are kept in few bits: row by row in blocks of 64 values,
each of two bytes with a scale, the largest of their absolutes in bf16, and then the codes. No torch: planner
and export count and compute by the same figures.

`nf4` has the 16 quantiles of a normal distribution that QLoRA is named after (Dettmers et al., 2023,
arXiv:2305.14314, equation 4 and appendix E), two codes a byte, the first in the upper half; a scale of two
bytes takes 0.25 bit a weight, where its fp32 scales take 0.5 and those that are quantised again 0.127.
`int8` has 255 equal steps from -scale to scale (LLM.int8(), Dettmers et al., 2022, equation 1).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

Base = Literal["int8", "nf4"]
BLOCK = 64
SCALE_BYTES = 2
STEPS = 127  # of int8 from 0 to the scale
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
NF4_BORDERS = tuple((low + high) / 2 for low, high in pairwise(NF4))
_CODES_BYTES: dict[Base, int] = {"int8": BLOCK, "nf4": BLOCK // 2}


def block_bytes(base: Base) -> int:
    """Of a block, with its scale."""
    return SCALE_BYTES + _CODES_BYTES[base]


def row_bytes(columns: int, base: Base) -> int:
    """Of a row of so many weights; the last block is as long as the others."""
    return -(-columns // BLOCK) * block_bytes(base)


def is_quantized(name: str) -> bool:
    """Whether this weight of one of mlpipe's own models is kept in few bits where a base is: those of the
    linear layers of its blocks."""
    return "layers." in name and name.endswith("_proj.weight")
