"""What is known of this machine's CPUs without anybody's asking: how fast one core does the passes of
`plan/reference.py`'s model, and by how much the trainings that ended here differed from what follows.

    $XDG_STATE_HOME/mlpipe/machines/<processor>-<CPUs>-torch-<version>.json    Machine

One file for each processor, number of CPUs and version of torch, since a home may be shared by several
machines, and a machine by several environments. Where there is none, the catalogue holds; a calibration that
the pipeline's file names goes before both.
"""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from mlpipe._core.cpus import num_cpus, processor
from mlpipe._core.files import state_folder, write_whole
from mlpipe._core.serial import from_json, to_json
from mlpipe.plan.reference import reference_seconds
from mlpipe.plan.settings import Precision
from mlpipe.plan.speed import Speed

SCHEMA_VERSION = 1
PRECISIONS: tuple[Precision, ...] = ("bf16", "fp32")
_MOST_RUNS = 9  # of each precision; the last ones
_FEWEST, _MOST = 0.1, 20.0  # a ratio beyond these is no matter of speed


@dataclass(frozen=True)
class Core:
    """One core alone: FLOPs a second of a large matmul, and seconds of both passes of the reference model."""

    matmul_flops: float
    passes_seconds: float


@dataclass(frozen=True)
class Learnt:
    """A training that ended here. `passes_ratio`: seconds of its passes over those that the figures of the
    same file say."""

    run: str
    stage: str
    precision: str
    workers: int
    passes_ratio: float


@dataclass(frozen=True)
class Machine:
    """The file. `core`, by precision; one that has not been measured is the catalogue's."""

    schema_version: int
    torch: str
    core: dict[str, Core]
    runs: tuple[Learnt, ...] = ()

    def speed(self, base: Speed, workers: int, cores: float) -> Speed:
        """`base`, the catalogue's, of each of so many workers with so many cores, as it is here. A correction
        is the median over the runs with as many workers, or the nearest number."""
        ratios: dict[str, list[float]] = {name: self._ratios(name, workers) for name in PRECISIONS}
        seconds = {name: reference_seconds(name, "cpu", base) for name, rows in ratios.items() if rows}
        seconds |= {name: core.passes_seconds / cores for name, core in self.core.items()}
        if not seconds:
            return base
        from statistics import median  # which imports as much again as the planner

        # the catalogue's peak is of the matmuls' share that it assumes besides
        peaks = {name: core.matmul_flops * cores / base.achievable_ratio for name, core in self.core.items()}
        by = ["a short measurement"] if self.core else []
        by += [f"{len(self.runs)} run{'s' if len(self.runs) > 1 else ''} here"] if self.runs else []
        return base._replace(
            peak_flops={**base.peak_flops, **peaks},
            passes_seconds={name: each * median(ratios[name] or [1.0]) for name, each in seconds.items()},
            calibrated=f"{processor()}, by {' and '.join(by)}",
        )

    def _ratios(self, precision: str, workers: int) -> list[float]:
        rows = [row for row in self.runs if row.precision == precision]
        nearest = min((abs(row.workers - workers) for row in rows), default=0)
        return [row.passes_ratio for row in rows if abs(row.workers - workers) == nearest]

    def learn(self, row: Learnt) -> Machine:
        """With one more run, or the newer figure of one; as it was if speed alone does not explain it."""
        if not _FEWEST <= row.passes_ratio <= _MOST:
            return self
        others = [one for one in self.runs if (one.run, one.stage) != (row.run, row.stage)]
        mine = [one for one in others if one.precision == row.precision]
        dropped = mine[: max(0, len(mine) + 1 - _MOST_RUNS)]
        return replace(self, runs=(*(one for one in others if one not in dropped), row))


def is_known() -> bool:
    """Whether nothing is left to measure."""
    known = read()
    return known is not None and known.core.keys() >= set(PRECISIONS)


def speed_here(base: Speed, workers: int, cores: float) -> Speed:
    """As this machine is known, else `base`."""
    known = read()
    return base if known is None else known.speed(base, workers, cores)


def path() -> Path:
    """Of this machine's file."""
    name = f"{processor()}-{num_cpus()}-torch-{torch()}"
    return state_folder() / "machines" / f"{re.sub(r'[^A-Za-z0-9]+', '-', name).strip('-')}.json"


def read() -> Machine | None:
    """None: nothing is known, or the file is of another torch, or not ours."""
    try:
        machine = from_json(Machine, path().read_bytes())
    except (OSError, ValueError):
        return None
    figures = [each for core in machine.core.values() for each in (core.matmul_flops, core.passes_seconds)]
    good = machine.core.keys() <= set(PRECISIONS) and all(0 < figure < math.inf for figure in figures)
    good = good and all(_FEWEST <= row.passes_ratio <= _MOST for row in machine.runs)
    return machine if good and machine.schema_version == SCHEMA_VERSION and machine.torch == torch() else None


def save(machine: Machine) -> None:
    """Raises OSError."""
    write_whole(path(), to_json(machine))


@lru_cache(maxsize=1)
def torch() -> str:
    """Version of the installed one, which is not imported; empty: there is none. By the name of its folder
    where that is: importlib.metadata brings thirty modules."""
    for folder in map(Path, sys.path):
        if found := next(folder.glob("torch-*.dist-info"), None):
            return found.name.removeprefix("torch-").removesuffix(".dist-info")
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("torch")
    except PackageNotFoundError:
        return ""
