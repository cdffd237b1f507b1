"""Speeds of a device, from the catalogue or as `mlpipe calibrate` measures them, and the bytes by which it
and `plan/time.py` count. Needs no spec: the workers import it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

from mlpipe._core.presets import LlamaConfig

# The model of which a calibration times whole passes, and how many of its longest sequences at once.
REFERENCE = {
    "cpu": LlamaConfig(4_096, 384, 2, 6, 2, 1_024, 256, 1e4, 1e-5, True),
    "cuda": LlamaConfig(32_768, 2_048, 2, 16, 8, 5_632, 2_048, 1e4, 1e-5, True),
}
REFERENCE_BATCH = 4
ADAM_TRAFFIC = 40  # bytes a parameter: norm 4, scale 8, the update reads 16 and writes 12


@dataclass(frozen=True)
class KernelRates:
    """Measured in one precision: `matmul_points`, (FLOPs, share of the peak); bytes that the formulas of
    `plan/time.py` count, a second, between the matmuls of a block (`stream`; `large`: of tensors that a CPU's
    caches do not hold; 0: no other) and in the loss; seconds of a forward and a backward pass of REFERENCE,
    where caches, memory and Python are those of a training (0: not measured)."""

    peak_flops: float
    matmul_points: tuple[tuple[float, ...], ...]
    attention_flops: float
    stream_bytes_per_second: float
    loss_bytes_per_second: float
    large_bytes_per_second: float = 0.0
    passes_seconds: float = 0.0

    def matmul_ratio(self, flops: float) -> float:
        """Share of the peak that a matmul of so many FLOPs reaches: between the points on a logarithmic
        axis, beyond them as at the last."""
        points = self.matmul_points
        if flops <= points[0][0]:
            return points[0][1]
        for (low, below), (high, above) in pairwise(points):
            if flops <= high:
                part = (math.log(flops) - math.log(low)) / (math.log(high) - math.log(low))
                return below + part * (above - below)
        return points[-1][1]


@dataclass(frozen=True)
class Speed:
    """What the time model knows of a device. Bandwidths in one direction: `link` to the others of its node,
    `network` to those of other nodes, which one device alone can use. `achievable_ratio`: of the peak, by
    the best matmul. A calibration adds `kernels` by precision, `kernel_seconds` and `collective_seconds`,
    what an operator and a collective cost beside their bytes, the store's bandwidth, those of FSDP2's
    gathering and scattering, what new memory costs (see `Measured`), and by how much finished runs differed
    from their predictions; `calibrated` says so in words."""

    peak_flops: dict[str, float]
    achievable_ratio: float
    memory_bytes_per_second: float
    link_bytes_per_second: float
    network_bytes_per_second: float
    kernels: dict[str, KernelRates] = field(default_factory=dict)
    update_bytes_per_second: float | None = None
    kernel_seconds: float = 0.0
    collective_seconds: float = 0.0
    store_bytes_per_second: float | None = None
    gather_bytes_per_second: float = 0.0
    scatter_bytes_per_second: float = 0.0
    new_tensor_seconds: float = 0.0
    time_ratio: float = 1.0
    memory_ratio: float = 1.0
    calibrated: str | None = None

    def matmul_ratio(self, precision: str, flops: float) -> float:
        """Share of the peak that a matmul of so many FLOPs reaches: as measured, else `achievable_ratio`."""
        found = self.kernels.get(precision)
        return found.matmul_ratio(flops) if found is not None else self.achievable_ratio


@dataclass(frozen=True)
class Measured:
    """With so many ranks on a node at work at the same time. `kernels` by precision."""

    kernels: dict[str, KernelRates]
    memory_bytes_per_second: float
    update_bytes_per_second: float
    kernel_seconds: float
    link_bytes_per_second: float  # 0 with one rank
    collective_seconds: float
    store_bytes_per_second: float
    gather_bytes_per_second: float = 0.0  # of the whole, with FSDP2's copies; 0 with one rank and on a GPU
    scatter_bytes_per_second: float = 0.0
    new_tensor_seconds: float = 0.0  # on a CPU, what one in newly mapped memory costs more


def traffic_block(dim: int, kv_dim: int, ffn: int) -> int:
    """Bytes a token of what stands between the matmuls of a block in eager mode, read off
    `train/models/llama.py` under bf16 (fp32 moves about as many): two norms of 14 a channel, the rotation of
    q and k 38, two residual sums 10, silu 4 and product 6."""
    return sum(num_bytes for _, num_bytes in traffic_by_width(dim, kv_dim, ffn))


def traffic_by_width(dim: int, kv_dim: int, ffn: int) -> list[tuple[int, int]]:
    """The same, by the channels of the tensors."""
    return [(dim, 28 * dim + 38 * dim + 20 * dim), (kv_dim, 38 * kv_dim), (ffn, 10 * ffn)]
