"""The GPU of one rank, by NVIDIA's own library (NVML), for machines without DCGM's exporter.

Read at a scrape, never in a step. Needs the package nvidia-ml-py and the driver; without either, and for what
a card does not support, there are no series: an absent GPU is not a GPU at 0 %. Names and units after
NVML's API reference; a utilisation says only that some kernel ran.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

Sample = tuple[str, tuple[str, ...], float]  # metric, values of its own labels, value
_MOST_EVENTS = 100  # a scrape takes; the driver keeps the others for the next
_AGE_SECONDS = 1.0  # several scrapers within it share one reading
# nvmlClocksEventReason<name>, in older packages nvmlClocksThrottleReason<name>: why the clocks are held down
_REASONS = {
    "SwPowerCap": "power_cap",
    "SwThermalSlowdown": "thermal",
    "HwThermalSlowdown": "hw_thermal",
    "HwPowerBrakeSlowdown": "hw_power_brake",
    "HwSlowdown": "hw_slowdown",
}


class NvmlGpu:
    """`uuid`: as torch and NVML say it, GPU-xxxxxxxx-... Raises what NVML raises when there is no such GPU,
    ImportError without its package."""

    def __init__(self, uuid: str) -> None:
        import pynvml

        self._nvml = pynvml
        pynvml.nvmlInit()
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        self._lock = threading.Lock()
        self._samples: list[Sample] = []
        self._read_at = float("-inf")
        self._num_xids = 0.0
        self._events = self._watch_errors()

    def read(self) -> list[Sample]:
        """The samples of now, or of a few moments ago: scrapers share a reading."""
        with self._lock:
            if time.monotonic() - self._read_at > _AGE_SECONDS:
                self._samples = list(self._look())
                self._read_at = time.monotonic()
            return self._samples

    def _look(self) -> Iterator[Sample]:
        nvml, handle = self._nvml, self._handle
        looks: dict[str, Callable[[], float]] = {
            "mlpipe_gpu_utilization_ratio": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            "mlpipe_gpu_memory_used_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
            "mlpipe_gpu_power_watts": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "mlpipe_gpu_temperature_celsius": self._temperature,
            "mlpipe_gpu_ecc_errors": lambda: nvml.nvmlDeviceGetTotalEccErrors(
                handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            ),
        }
        for name, look in looks.items():
            if (value := self._ask(look)) is not None:
                yield name, (), float(value)
        if (reasons := self._reasons()) is not None:
            for word, reason in _REASONS.items():
                mask = getattr(nvml, f"nvmlClocksEventReason{word}", None)
                mask = getattr(nvml, f"nvmlClocksThrottleReason{word}", 0) if mask is None else mask
                yield "mlpipe_gpu_throttled", (reason,), float(bool(reasons & mask))
        if self._events is not None:
            for _ in range(_MOST_EVENTS):
                if (event := self._ask(lambda: nvml.nvmlEventSetWait_v2(self._events, 0))) is None:
                    break
                self._num_xids += 1
                yield "mlpipe_gpu_last_xid", (), float(event.eventData)
            yield "mlpipe_gpu_xid_errors_total", (), self._num_xids

    def _watch_errors(self) -> Any:
        """The driver keeps XIDs for us from now on; None where it cannot."""
        nvml = self._nvml
        try:
            events = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(self._handle, nvml.nvmlEventTypeXidCriticalError, events)
        except (nvml.NVMLError, AttributeError):
            return None
        return events

    def _reasons(self) -> Any:
        """A mask, by the older name where the package or the driver does not know the newer."""
        for kind in ("Event", "Throttle"):
            look = getattr(self._nvml, f"nvmlDeviceGetCurrentClocks{kind}Reasons", None)
            if look is not None and (mask := self._ask(partial(look, self._handle))) is not None:
                return mask
        return None

    def _temperature(self) -> float:
        nvml, handle = self._nvml, self._handle
        if hasattr(nvml, "nvmlDeviceGetTemperatureV"):  # the other one goes with CUDA 14
            try:
                return float(nvml.nvmlDeviceGetTemperatureV(handle, nvml.NVML_TEMPERATURE_GPU))
            except nvml.NVMLError:
                pass  # the driver is older than the package
        return float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))

    def _ask(self, look: Callable[[], Any]) -> Any:
        """None for what this card, driver or version of the package does not tell."""
        try:
            return look()
        except (self._nvml.NVMLError, AttributeError):
            return None


def find_gpu(uuid: str | None) -> NvmlGpu | None:
    """None without a GPU, its driver or nvidia-ml-py: metrics never stop a training."""
    if uuid is None:
        return None
    try:
        return NvmlGpu(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
    except Exception:  # the package is missing, or NVML says no in one of its many ways
        return None
