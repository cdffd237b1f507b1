"""Parquet files and tars of numbered samples: sample i has `x` [i, i + 0.5, -i] and `index` i."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

SIZES = (5, 1, 7, 3)


def row(i: int) -> dict[str, Any]:
    return {"x": [float(i), i + 0.5, float(-i)], "index": i, "text": f"number {i}"}


def write_parquet(
    folder: Path, sizes: Sequence[int] = SIZES, *, group: int = 3, name: str = "train", first: int = 0
) -> Path:
    """A file for each of `sizes`, in row groups of `group` rows; numbered from `first` on."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True, exist_ok=True)
    for number, size in enumerate(sizes):
        rows = [row(first + i) for i in range(size)]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}-{number}.parquet", row_group_size=group)
        first += size
    return folder


def write_tar(path: Path, samples: Mapping[str, Mapping[str, bytes]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for key, files in samples.items():
            for extension, data in files.items():
                info = tarfile.TarInfo(f"{key}.{extension}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return path


def packed(i: int) -> dict[str, bytes]:
    array = io.BytesIO()
    np.save(array, np.array(row(i)["x"]))
    return {"x.npy": array.getvalue(), "cls": str(i).encode(), "txt": row(i)["text"].encode()}


def write_tars(folder: Path, sizes: Sequence[int] = SIZES, *, name: str = "train", first: int = 0) -> Path:
    for number, size in enumerate(sizes):
        samples = {f"{first + i:04d}": packed(first + i) for i in range(size)}
        write_tar(folder / f"{name}-{number}.tar", samples)
        first += size
    return folder


def plain(value: Any) -> Any:
    """A sample as JSON."""
    return json.loads(json.dumps({key: each.tolist() for key, each in value.items()}))
