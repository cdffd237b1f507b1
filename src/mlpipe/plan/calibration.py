"""What `mlpipe calibrate` wrote: a hardware entry measured where the training will run, and the runs that
were compared with their predictions since. An explicit input of planning, which goes before what is known of
the machine unasked (`machine.py`).

    {"schema_version": 1, "name": ..., "device": "cpu" | "cuda",
     "ranks": {"<ranks of a node>": Measured, ...}, "runs": [Compared, ...], "load": Load}
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from mlpipe._core.cpu_load import Load
from mlpipe._core.errors import PlanError
from mlpipe._core.files import read_file, write_whole
from mlpipe._core.serial import from_json, leaves, to_json, to_plain
from mlpipe.plan.measured import Measured
from mlpipe.plan.speed import Speed

SCHEMA_VERSION = 1
_MAX_BYTES = 2**24
_LEAST, _MOST = 1e-15, 1e21  # of any figure; beyond them nothing was measured, and arithmetic may not end
_MAY_BE_NONE = frozenset(
    (
        "large_bytes_per_second",
        "passes_seconds",
        "kernel_seconds",
        "link_bytes_per_second",
        "collective_seconds",
        "store_bytes_per_second",
        "gather_bytes_per_second",
        "scatter_bytes_per_second",
        "new_tensor_seconds",
        "others_ratio",
        "steal_ratio",
        "pressure_ratio",
    )
)


@dataclass(frozen=True)
class Compared:
    """A finished training stage. The predictions are those without any correction."""

    run: str
    stage: str
    predicted_memory_bytes: float
    measured_memory_bytes: float
    predicted_step_seconds: float
    measured_step_seconds: float


@dataclass(frozen=True)
class Calibration:
    """The file: see above."""

    schema_version: int
    name: str
    device: str
    ranks: dict[str, Measured]
    runs: tuple[Compared, ...]
    load: Load | None = None  # of the machine meanwhile; the worst over the numbers of ranks

    def speed(self, ranks_per_node: int, base: Speed) -> Speed:
        """`base` with what was measured for as many ranks, or the nearest number. The corrections are medians
        over the runs."""
        number = min(self.ranks, key=lambda key: (abs(int(key) - ranks_per_node), int(key)))
        measured = self.ranks[number]
        several = [item for item in self.ranks.values() if item.link_bytes_per_second]
        wire = measured if measured.link_bytes_per_second or not several else several[0]
        words = f"calibrated with {number} rank{'' if number == '1' else 's'} ({self.name})"
        if self.runs:
            words += f" and by {len(self.runs)} run{'' if len(self.runs) == 1 else 's'}"
        return base._replace(
            peak_flops={
                **base.peak_flops,
                **{name: kernels.peak_flops for name, kernels in measured.kernels.items()},
            },
            memory_bytes_per_second=measured.memory_bytes_per_second,
            link_bytes_per_second=wire.link_bytes_per_second or base.link_bytes_per_second,
            kernels=measured.kernels,
            update_bytes_per_second=measured.update_bytes_per_second,
            kernel_seconds=measured.kernel_seconds,
            collective_seconds=wire.collective_seconds,
            gather_bytes_per_second=wire.gather_bytes_per_second,
            scatter_bytes_per_second=wire.scatter_bytes_per_second,
            new_tensor_seconds=measured.new_tensor_seconds,
            store_bytes_per_second=measured.store_bytes_per_second or None,
            time_ratio=_ratio([(run.measured_step_seconds, run.predicted_step_seconds) for run in self.runs]),
            memory_ratio=_ratio(
                [(run.measured_memory_bytes, run.predicted_memory_bytes) for run in self.runs]
            ),
            calibrated=words,
        )


def _ratio(pairs: list[tuple[float, float]]) -> float:
    return median(measured / predicted for measured, predicted in pairs) if pairs else 1.0


def load(path: str | Path) -> Calibration:
    """Raises PlanError."""
    hint = "write it with `mlpipe calibrate --out FILE`"
    try:
        data = read_file(path, _MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise ValueError(f"larger than {_MAX_BYTES} bytes")
        calibration = from_json(Calibration, data)
        _check(calibration)
    except OSError as error:
        raise PlanError(f"cannot be read: {error.strerror}", where=str(path), hint=hint) from None
    except ValueError as error:
        raise PlanError(f"not a calibration: {error}", where=str(path), hint=hint) from None
    if calibration.schema_version != SCHEMA_VERSION or not calibration.ranks:
        raise PlanError("a calibration of another version, or of nothing", where=str(path), hint=hint)
    return calibration


def _check(calibration: Calibration) -> None:
    """Raises ValueError for what nobody has measured."""
    for path, figure in leaves(to_plain(calibration)).items():
        is_none = figure == 0 and path.rpartition(".")[2] in _MAY_BE_NONE
        if isinstance(figure, float | int) and not (is_none or _LEAST <= figure <= _MOST):
            raise ValueError(f"{path} is {figure:g}")
    for number, measured in calibration.ranks.items():
        if not (number.isascii() and number.isdecimal() and len(number) < 7):
            raise ValueError(f"ranks.{number[:20]} is no number of ranks")
        for name, rates in measured.kernels.items():
            points = rates.matmul_points
            good = points and all(len(point) == 2 for point in points)
            good = good and all(_LEAST <= figure <= _MOST for point in points for figure in point)
            if not good or any(low[0] > high[0] for low, high in pairwise(points)):
                raise ValueError(f"ranks.{number}.kernels.{name}.matmul_points are none")


def save(path: str | Path, calibration: Calibration) -> None:
    """Writes the file, whole or not at all."""
    write_whole(Path(path), to_json(calibration))
