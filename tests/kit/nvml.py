"""A `pynvml` with the functions of nvidia-ml-py that mlpipe calls, over a card that is made up.

Names, arguments and results as in nvidia-ml-py 13.615: what the library answers with an error code is raised
as NVMLError; an older package lacks names.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType, SimpleNamespace
from typing import Any

UUID = "GPU-8a56a4bc-e184-a047-2620-be19fdf913d5"
NOT_SUPPORTED, TIMEOUT, NOT_FOUND = 3, 10, 6


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value


class FakeNvml(ModuleType):
    """`refuses`: functions that the card or the driver does not support. `xids`: errors to be reported."""

    NVMLError = NVMLError
    NVML_TEMPERATURE_GPU = 0
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    nvmlEventTypeXidCriticalError = 8
    nvmlClocksEventReasonSwPowerCap = 0x04
    nvmlClocksEventReasonHwSlowdown = 0x08
    nvmlClocksEventReasonSwThermalSlowdown = 0x20
    nvmlClocksEventReasonHwThermalSlowdown = 0x40
    nvmlClocksEventReasonHwPowerBrakeSlowdown = 0x80

    def __init__(self, *, refuses: Iterable[str] = (), xids: Iterable[int] = ()) -> None:
        super().__init__("pynvml")
        self.xids = list(xids)
        self.calls: list[str] = []
        answers: dict[str, Any] = {
            "nvmlInit": lambda: None,
            "nvmlDeviceGetHandleByUUID": self._handle,
            "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=87, memory=40),
            "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(
                total=80 << 30, used=60 << 30, free=20 << 30
            ),
            "nvmlDeviceGetPowerUsage": lambda handle: 651_250,  # mW
            "nvmlDeviceGetTemperatureV": lambda handle, sensor: 71,
            "nvmlDeviceGetTemperature": lambda handle, sensor: 70,
            "nvmlDeviceGetTotalEccErrors": lambda handle, kind, counter: 2,
            "nvmlDeviceGetCurrentClocksEventReasons": lambda handle: 0x04 | 0x40,
            "nvmlEventSetCreate": lambda: "events",
            "nvmlDeviceRegisterEvents": lambda handle, types, events: None,
            "nvmlEventSetWait_v2": self._wait,
        }
        for name, answer in answers.items():
            setattr(self, name, self._function(name, self._refuse if name in set(refuses) else answer))

    def fall_off_the_bus(self) -> None:
        """From now on nothing is told."""
        for name in [name for name in vars(self) if name.startswith("nvml")]:
            setattr(self, name, self._refuse)

    def _function(self, name: str, answer: Any) -> Any:
        def called(*arguments: Any) -> Any:
            self.calls.append(name)
            return answer(*arguments)

        return called

    def _refuse(self, *_: Any) -> None:
        raise NVMLError(NOT_SUPPORTED)

    def _handle(self, uuid: str) -> str:
        if uuid != UUID:
            raise NVMLError(NOT_FOUND)
        return "handle"

    def _wait(self, events: str, timeout_ms: int) -> SimpleNamespace:
        if not self.xids:
            raise NVMLError(TIMEOUT)
        return SimpleNamespace(eventType=8, eventData=self.xids.pop(0))

    def older(self) -> FakeNvml:
        """As packages before 12 were: other names for the reasons, and a few functions fewer."""
        reasons = self.nvmlDeviceGetCurrentClocksEventReasons
        del self.nvmlDeviceGetCurrentClocksEventReasons, self.nvmlDeviceGetTemperatureV
        self.nvmlDeviceGetCurrentClocksThrottleReasons = reasons
        for name in [name for name in vars(FakeNvml) if name.startswith("nvmlClocksEventReason")]:
            setattr(self, name.replace("Event", "Throttle"), getattr(self, name))
        return self
