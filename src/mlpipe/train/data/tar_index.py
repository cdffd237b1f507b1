"""`mlpipe-index`: counts the samples of tars in a folder or a bucket, and writes index.json beside them."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from mlpipe.store.base import Store
from mlpipe.store.open import open_store
from mlpipe.train.data.files import DataFile, find_files
from mlpipe.train.data.tars import INDEX, members_of
from mlpipe.train.script import exit_code

_PIECE_BYTES = 16 * 2**20


def write_index(folder: str) -> int:
    """Of all *.tar below `folder`, which may be a bucket: each is read once. Returns the number of samples.
    Raises TrainError (input), StoreError."""
    base, files = find_files(f"{folder.rstrip('/')}/**/*.tar", ".tar")
    store = open_store(base)
    tars = [_described(store, base, file) for file in files]
    store.put(INDEX, (json.dumps({"format": 1, "tars": tars}, indent=1) + "\n").encode())
    return sum(tar["num_samples"] for tar in tars)


def _described(store: Store, base: str, file: DataFile) -> dict[str, Any]:
    where = f"{base}/{file.name}"
    if file.path is not None:
        with file.path.open("rb") as local:
            return _of(local, file, where)
    with tempfile.TemporaryFile() as copy:
        for start in range(0, file.size_bytes, _PIECE_BYTES):
            copy.write(store.get(file.name, start=start, length=min(_PIECE_BYTES, file.size_bytes - start)))
        return _of(copy, file, where)


def _of(opened: Any, file: DataFile, where: str) -> dict[str, Any]:
    opened.seek(0)
    digest = hashlib.file_digest(opened, "sha256").hexdigest()
    opened.seek(0)
    num_samples = len(members_of(opened, where))
    return {
        "file": file.name,
        "size_bytes": file.size_bytes,
        "sha256": digest,
        "num_samples": num_samples,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """As `script.exit_code`."""
    parser = argparse.ArgumentParser(
        prog="mlpipe-index", description="Count the samples of tars, and write index.json beside them."
    )
    parser.add_argument("folder", help="of the tars: a folder, or s3://bucket/prefix")
    folder = parser.parse_args(argv).folder

    def work() -> None:
        num_samples = write_index(folder)
        sys.stderr.write(f"{folder.rstrip('/')}/{INDEX}: {num_samples} samples\n")

    return exit_code("mlpipe-index", work, folder)


if __name__ == "__main__":
    sys.exit(main())
