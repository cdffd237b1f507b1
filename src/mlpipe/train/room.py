"""Whether /dev/shm has room for what ranks show each other (`communication: on_demand`)."""

from __future__ import annotations

import shutil
from pathlib import Path

from mlpipe._core.errors import TrainError
from mlpipe._core.units import format_bytes

FOLDER = Path("/dev/shm")


def check_room(num_bytes: int | None) -> None:
    """Before ranks start; None: nothing is needed, or nobody knows how much. Raises TrainError (input)."""
    if num_bytes is not None and shutil.disk_usage(FOLDER).free < num_bytes:
        raise no_room(num_bytes)


def no_room(num_bytes: int) -> TrainError:
    """For so many bytes more."""
    return TrainError(
        f"communication: on_demand needs {format_bytes(num_bytes)} of shared memory, and "
        f"{format_bytes(shutil.disk_usage(FOLDER).free)} of it are free",
        where=str(FOLDER),
        hint="make it larger (kubernetes.shm of a pod, --shm-size of a container), or write "
        "communication: resident",
        kind="input",
    )
