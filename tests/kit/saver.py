"""A child process that saves checkpoints through the catalogue, for tests that kill it.

    python -m kit.saver STORE_URL STEP [STEP ...]

Before each save it prints `ready STEP` and waits for a line on stdin; after it, `saved STEP`. Contents follow
from the step (`expected`), so that any reader can tell a sound checkpoint from a mixture. Prunes to two.
"""

from __future__ import annotations

import sys
import time

from mlpipe.store import catalogue
from mlpipe.store.base import Store
from mlpipe.store.blobs import write_blob
from mlpipe.store.manifest import Manifest
from mlpipe.store.open import open_store

STAGE = "runs/r/stages/train"
BLOCK_BYTES = 2**16
PART_BYTES = 2**17
BLOB_SIZES = {"model-0": 3 * 2**17 + 77, "optim-0": 2**18, "optim-1": 1000}


def expected(step: int, name: str) -> bytes:
    """The bytes of one blob of the checkpoint of `step`."""
    seed = f"{step}/{name}/".encode()
    size = BLOB_SIZES[name]
    return (seed * (size // len(seed) + 1))[:size]


def save(store: Store, step: int, attempt: int = 1, keep: int = 2) -> str:
    prefix = catalogue.new_prefix(STAGE, step, attempt)
    blobs, tensors = [], {}
    for index, (name, size) in enumerate(BLOB_SIZES.items()):
        data = expected(step, name)
        blobs.append(write_blob(store, f"{prefix}/{name}", [data], block_bytes=BLOCK_BYTES))
        chunk = {"offset": [0], "shape": [size], "blob": index, "byte_offset": 0}
        tensors[name.replace("-", ".")] = {"dtype": "uint8", "shape": [size], "chunks": [chunk]}
    manifest = {
        "format": 1,
        "step": step,
        "attempt": attempt,
        "uuid": prefix[-8:],
        "time": time.time(),
        "code": {},
        "scalars": {"step": step},
        "tensors": tensors,
        "blobs": blobs,
    }
    if not catalogue.commit(store, prefix, manifest):
        raise RuntimeError(f"{prefix} holds somebody else's manifest")
    catalogue.prune(store, STAGE, keep, in_use=[prefix])
    return prefix


def check_all(store: Store) -> list[int]:
    """Steps of all listed checkpoints, after reading each back bit for bit. Raises AssertionError."""
    steps = []
    for checkpoint in catalogue.list_checkpoints(store, STAGE):
        manifest: Manifest = catalogue.load_manifest(store, checkpoint.key)
        problems = catalogue.verify(store, checkpoint.key)
        if problems or manifest["step"] != checkpoint.step:
            raise AssertionError(f"{checkpoint.key} is listed but unsound: {problems}")
        for blob, name in zip(manifest["blobs"], BLOB_SIZES, strict=True):
            buffer = bytearray(blob["size_bytes"])
            catalogue.read_blob(store, blob, 0, buffer)
            if bytes(buffer) != expected(checkpoint.step, name):
                raise AssertionError(f"{blob['key']} has other bytes than were saved")
        steps.append(checkpoint.step)
    return steps


def main(url: str, steps: list[int]) -> None:
    store = open_store(url)
    if store.part_bytes is not None:
        store.part_bytes = PART_BYTES  # several requests a blob without megabytes
    for step in steps:
        print(f"ready {step}", flush=True)
        sys.stdin.readline()
        save(store, step)
        print(f"saved {step}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], [int(step) for step in sys.argv[2:]])
