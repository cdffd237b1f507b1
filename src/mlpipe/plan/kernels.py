"""Seconds of single kernels. A matmul takes its FLOPs at the achievable share of the peak and its bytes at
the memory's bandwidth, one after the other: tiles load before they multiply, and store behind: products
of 4,096 reach 0.66 of an H100's peak, and its best ones 0.80. What is between the matmuls takes its bytes; on
a GPU an eager kernel takes at least its launch. Standard library only."""

from __future__ import annotations

import math

from mlpipe.plan.speed import Speed
from mlpipe.plan.tensors import COMPUTE_BYTES

# Share of the matmuls' rate that fused attention reaches over long sequences. Dao, FlashAttention-2 (2023):
# up to 73 % of an A100's peak, of which matmuls reach 87 %; Shah et al., FlashAttention-3 (2024), figure 5:
# its predecessor, which torch's SDPA runs, 335 TFLOP/s on an H100, of whose 989 matmuls reach 80 %. A CPU's
# runs as its matmuls do.
_ATTENTION_RATIO, _ATTENTION_RATIO_HOPPER = 0.73 / 0.87, 0.34 / 0.80
# Tokens of a sequence after which half of that is reached: what tiles on the diagonal compute in vain, and
# what starts and ends. The same figure, causal, 128 channels a head: 260, 298, 319 and 333 TFLOP/s for 1,024,
# 2,048, 4,096 and 8,192 tokens.
_ATTENTION_TOKENS = 285
_HOPPER_FLOPS = 500e12  # bf16 peak, of Hopper and later
_STREAM_RATIO = 0.8  # share of the bandwidth that streams get: stas00/ml-engineering, network/README.md
_LAUNCH = 5e-6  # of CPU a kernel in eager mode (PyTorch's CUDA graphs post, 2021)
# torch.compile keeps about a third of the traffic between matmuls: one read and one write of what eager mode
# reads and writes three times. torchtitan's Llama-8B on 8 H100 got 16 % faster.
_FUSED = 1 / 3
# Of what a multiprocessor computes at once the sizes that lose nothing by being small (NVIDIA, Matrix
# Multiplication Background User's Guide, sections 2.3, 3.1 and 3.2).
_TILES = ((256, 128), (128, 256), (128, 128))
CACHED_BYTES = 2 * 2**20  # of a tensor that a core's share of the caches holds


class Kernels:
    """Seconds of single kernels on a device of this speed. Remembers its matmuls: of many ways to train most
    have the same ones."""

    def __init__(self, precision: str, compiled: bool, device: str, speed: Speed) -> None:
        self.precision, self.compiled = precision, compiled
        self.device, self.speed = device, speed
        self.peak = self.speed.peak_flops[precision]
        self.width = COMPUTE_BYTES[precision]
        self.measured = self.speed.kernels.get(precision)
        self._matmuls: dict[tuple[int, int, int, int], float] = {}

    def matmul(self, rows: int, inner: int, outer: int, number: int = 1) -> float:
        """Of `number` such products in one kernel."""
        sizes = rows, inner, outer, number
        if sizes not in self._matmuls:
            self._matmuls[sizes] = self._matmul(*sizes)
        return self._matmuls[sizes]

    def _matmul(self, rows: int, inner: int, outer: int, number: int) -> float:
        flops = 2.0 * rows * inner * outer
        if self.measured is not None:  # its points have felt the memory and the tiles already
            return number * self.matmul_flops(flops)
        num_bytes = number * self.width * (rows * inner + inner * outer + rows * outer)
        computing = self._rounds(rows, outer, number) * self.matmul_flops(number * flops)
        return computing + num_bytes / (self.speed.memory_bytes_per_second * _STREAM_RATIO)

    def _rounds(self, rows: int, outer: int, number: int) -> float:
        """Seconds over those of tiles that fill all multiprocessors to the last round, and are full."""
        at_once = self.speed.multiprocessors
        if not at_once:
            return 1.0
        tiles = ((min(m, rows) * min(n, outer), number * -(-rows // m) * -(-outer // n)) for m, n in _TILES)
        computed = min(size * at_once * math.ceil(count / at_once) for size, count in tiles)
        return computed / (number * rows * outer)

    def matmul_flops(self, flops: float) -> float:
        return flops / (self.peak * self.speed.matmul_ratio(self.precision, flops))

    def attention(self, flops: float, seq_len: int) -> float:
        if self.measured is not None:
            return flops / self.measured.attention_flops
        ratio = _ATTENTION_RATIO_HOPPER if self.peak >= _HOPPER_FLOPS else _ATTENTION_RATIO
        if self.device == "cpu":
            ratio = 1.0
        else:
            ratio *= seq_len / (seq_len + _ATTENTION_TOKENS)
        return flops / (self.peak * self.speed.achievable_ratio * ratio)

    def between(self, tokens: int, traffic: list[tuple[int, int]]) -> float:
        """The matmuls of a block: bytes a token, by channels of the tensors."""
        if self.measured is None:
            return self.stream(tokens * sum(num_bytes for _, num_bytes in traffic))
        return sum(
            self.stream(tokens * num_bytes, large=tokens * channels * self.width >= CACHED_BYTES)
            for channels, num_bytes in traffic
        )

    def stream(self, num_bytes: float, *, fuse: bool = True, large: bool = False) -> float:
        if fuse and self.compiled:
            num_bytes *= _FUSED
        if fuse and self.measured is not None:
            slow = self.measured.large_bytes_per_second if large else 0.0
            return num_bytes / (slow or self.measured.stream_bytes_per_second)
        return num_bytes / (self.speed.memory_bytes_per_second * _STREAM_RATIO)

    def loss(self, num_bytes: float) -> float:
        if self.measured is not None:
            return num_bytes / self.measured.loss_bytes_per_second
        return self.stream(num_bytes, fuse=False)

    def at_least(self, seconds: float, num_kernels: int) -> float:
        if self.device == "cpu":
            return seconds + num_kernels * self.speed.kernel_seconds
        return seconds if self.compiled else max(seconds, num_kernels * _LAUNCH)


def copy_seconds(num_bytes: float, speed: Speed) -> float:
    """Reads and writes of so many bytes in all."""
    return num_bytes / (speed.memory_bytes_per_second * _STREAM_RATIO)
