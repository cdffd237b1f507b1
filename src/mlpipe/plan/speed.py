"""Speeds of a device, from the catalogue or as `mlpipe calibrate` measures them. Needs no spec: the workers
import it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from mlpipe.plan.measured import KernelRates


class Speed(NamedTuple):
    """What the time model knows of a device. Bandwidths in one direction: `link` to the others of its node,
    `network` to those of other nodes, which one device alone can use, `host` to the memory of the machine
    (0: it is the device's own). `achievable_ratio`: of the peak, by the best matmul. `multiprocessors`: 0
    where nobody said. A calibration adds `kernels` by precision, `kernel_seconds` and `collective_seconds`,
    what an operator and a collective cost beside their bytes, the store's bandwidth, those of FSDP2's
    gathering and scattering, what new memory costs (see `Measured`), and by how much finished runs differed
    from their predictions; `calibrated` says so in words. `passes_seconds`, without a calibration: of both
    passes of `plan/reference.py`'s model by precision, as this machine is known (`plan/machine.py`).
    `rack_nodes` have the network among themselves, `rack` is that to others; 0: nobody tells racks apart."""

    peak_flops: Mapping[str, float]
    achievable_ratio: float
    memory_bytes_per_second: float
    link_bytes_per_second: float
    network_bytes_per_second: float
    float8_speedup: float | None = None  # of a product, over bf16's; None: none is known
    host_bytes_per_second: float = 0.0
    multiprocessors: float = 0.0
    kernels: Mapping[str, "KernelRates"] = {}
    passes_seconds: Mapping[str, float] = {}
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
    rack_nodes: int = 0
    rack_bytes_per_second: float = 0.0

    def matmul_ratio(self, precision: str, flops: float) -> float:
        """Share of the peak that a matmul of so many FLOPs reaches: as measured, else `achievable_ratio`."""
        rates = self.kernels.get(precision)
        return rates.matmul_ratio(flops) if rates is not None else self.achievable_ratio
