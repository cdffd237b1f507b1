"""How fast a machine was in a preflight of the last hour, so that the next one need not measure it again.

    <cache>/preflight/<digest of the node, its boot, what was measured and with what>.json

Only what a machine has by itself: its matmul, its memory, what goes from GPU to GPU; and only of one that
nothing was wrong with. Links, store, disk and clock are looked at each time. Ages are of the clock that
counts from the boot, which nobody sets.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import time
from pathlib import Path

import torch

from mlpipe import __version__
from mlpipe._core.cpus import num_cpus
from mlpipe._core.files import write_whole
from mlpipe.plan.plan import Plan
from mlpipe.store.outputs import cache_folder
from mlpipe.train.preflight.verdict import PEERS, Report

SECONDS = 3600.0
SPEEDS = ("flops", "memory_bytes_per_second")
AGE = "speed_age_seconds"  # the figure that says that the speeds are remembered
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def recall(plan: Plan, node: str) -> dict[str, float] | None:
    """The speeds of this machine and their age; None: nobody has measured them lately."""
    try:
        kept = json.loads(_path(plan, node).read_bytes())
        figures = {name: float(kept[name]) for name in (*SPEEDS, PEERS) if name in (*SPEEDS, *kept)}
        age = _now() - float(kept["at"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
    if not 0 <= age < SECONDS or not all(0 < rate < math.inf for rate in figures.values()):
        return None
    return {**figures, AGE: age}


def remember(plan: Plan, report: Report) -> None:
    """What was measured just now, not what was remembered before; where it can be kept."""
    if AGE in report.figures or not report.figures.keys() >= set(SPEEDS):
        return
    kept = {
        "at": _now(),
        **{name: report.figures[name] for name in (*SPEEDS, PEERS) if name in report.figures},
    }
    with contextlib.suppress(OSError):
        write_whole(_path(plan, report.node), json.dumps(kept))


def _path(plan: Plan, node: str) -> Path:
    """Raises OSError where a boot has no id."""
    gpus = [str(torch.cuda.get_device_properties(index)) for index in range(torch.cuda.device_count())]
    of = (
        *(node, _BOOT.read_text().strip(), __version__, str(torch.__version__), plan.launch.device),
        *(plan.work.training.precision, str(num_cpus())),
        *(os.environ.get("CUDA_VISIBLE_DEVICES", ""), *gpus),
    )
    digest = hashlib.sha256("\0".join(of).encode()).hexdigest()[:32]
    return cache_folder() / "preflight" / f"{digest}.json"


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)
