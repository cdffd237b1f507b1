"""What `mlpipe calibrate` measures of a device. Needs no spec: the workers import it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class KernelRates:
    """Measured in one precision: `matmul_points`, (FLOPs, share of the peak); bytes a second, as the model's
    shape counts them, between the matmuls of a block (`stream`; `large`: of tensors that a CPU's caches do
    not hold; 0: no other) and in the loss; seconds of both passes of `plan/reference.py`'s model,
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
