"""What others take of this machine's CPUs while we compute on them, from Linux's own counters.

/proc/stat counts, for each CPU, the time that it worked and the time that a hypervisor gave to another guest
(steal); /proc/pressure/cpu the time in which something waited for a CPU, of ours or of others (proc(5),
Documentation/accounting/psi.rst). What worked and was not ours was others'.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

# Of an idle machine one or two hundredths; steps and figures vary by as much by themselves.
MOST_OTHERS_RATIO, MOST_STEAL_RATIO, MOST_PRESSURE_RATIO = 0.10, 0.05, 0.10


@dataclass(frozen=True)
class Load:
    """Over a span of time. `others_ratio`, `steal_ratio`: of the CPUs that this process may use;
    `pressure_ratio`: of the time, None where the kernel does not say."""

    others_ratio: float
    steal_ratio: float
    pressure_ratio: float | None

    @property
    def is_foreign(self) -> bool:
        """Others took enough to be in the way of whoever needs all CPUs."""
        return self.others_ratio > MOST_OTHERS_RATIO or self.steal_ratio > MOST_STEAL_RATIO

    @property
    def slowed_us(self) -> bool:
        """The same, and something did wait: a large machine has CPUs for several."""
        waited = self.pressure_ratio is None or self.pressure_ratio > MOST_PRESSURE_RATIO
        return self.is_foreign and (waited or self.steal_ratio > MOST_STEAL_RATIO)

    def __str__(self) -> str:
        words = f"others used {100 * self.others_ratio:.0f} % of the CPUs"
        if self.steal_ratio >= 0.005:
            words += f", the hypervisor took {100 * self.steal_ratio:.0f} %"
        if self.pressure_ratio is not None:
            words += f", something waited for a CPU {100 * self.pressure_ratio:.0f} % of the time"
        return words


@dataclass(frozen=True)
class Clock:
    """Seconds so far: of a monotonic clock, and over all CPUs that this process may use."""

    time: float
    num_cpus: int
    busy: float
    stolen: float
    waited: float | None

    @staticmethod
    def read(root: Path = Path("/proc")) -> Clock | None:
        """None where the machine does not say."""
        try:
            cpus = {f"cpu{number}" for number in os.sched_getaffinity(0)}
            lines = [line.split() for line in (root / "stat").read_text().splitlines()]
            ticks = [[int(word) for word in words[1:9]] for words in lines if words and words[0] in cpus]
            columns = (sum(column) for column in zip(*ticks, strict=True))
            user, nice, system, _, _, irq, softirq, steal = columns
        except (OSError, ValueError, AttributeError):
            return None
        try:
            some = (root / "pressure" / "cpu").read_text().split("\n")[0]
            waited = int(some.rpartition("total=")[2]) / 1e6
        except (OSError, ValueError):
            waited = None
        second = os.sysconf("SC_CLK_TCK")
        busy = (user + nice + system + irq + softirq) / second
        return Clock(time.monotonic(), len(ticks), busy, steal / second, waited)

    def until(self, now: Clock, own_seconds: float) -> Load | None:
        """`own_seconds`: CPU time that we used between; None where that is no time at all."""
        elapsed = now.time - self.time
        if elapsed <= 0 or now.num_cpus != self.num_cpus:
            return None
        cpu_seconds = elapsed * self.num_cpus
        others = (now.busy - self.busy - own_seconds) / cpu_seconds
        pressure = None
        if now.waited is not None and self.waited is not None:
            pressure = _ratio((now.waited - self.waited) / elapsed)
        return Load(_ratio(others), _ratio((now.stolen - self.stolen) / cpu_seconds), pressure)


def _ratio(value: float) -> float:
    return min(1.0, max(0.0, value))
