"""The processes of a run, to kill and to wait for, and what its checkpoints hold."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import signal
import subprocess
from collections.abc import Iterable
from pathlib import Path

from mlpipe.plan.plan import Plan
from mlpipe.store import catalogue
from mlpipe.store.base import Store
from mlpipe.store.manifest import DTYPE_BYTES, Manifest


def children(pid: int) -> list[int]:
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, path.read_text().split())
    return found


def tree(pid: int) -> list[int]:
    """The process and all below it."""
    return [pid, *(below for child in children(pid) for below in tree(child))]


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def torchrun_of(process: subprocess.Popen[bytes]) -> int | None:
    return next((pid for pid in children(process.pid) if "mlpipe.train.torchrun" in command_of(pid)), None)


def worker_of(scratch: Path, rank: int) -> int | None:
    """By the pid file of its latest restart."""
    found = {}
    for path in scratch.glob("pid-*"):
        with contextlib.suppress(OSError, ValueError):
            pid, of_rank = map(int, path.read_text().split())
            if of_rank == rank:
                found[int(path.name.split("-")[1])] = pid
    return found[max(found)] if found else None


def kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def gone(pids: Iterable[int]) -> bool:
    """Zombies count as gone: whoever should reap them may be dead too."""
    for pid in pids:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X"):
                return False
    return True


def digest_of(store: Store, key: str) -> str:
    """Over all tensors of a checkpoint, whatever the layout of its chunks."""
    manifest: Manifest = catalogue.load_manifest(store, key)
    blobs = []
    for blob in manifest["blobs"]:
        buffer = bytearray(blob["size_bytes"])
        catalogue.read_blob(store, blob, 0, buffer)
        blobs.append(buffer)
    digest = hashlib.sha256()
    for name, tensor in sorted(manifest["tensors"].items()):
        digest.update(f"{name} {tensor['dtype']} {tensor['shape']}".encode())
        # strategies shard along dim 0 only: in order of their offsets the chunks are the tensor
        for chunk in sorted(tensor["chunks"], key=lambda chunk: chunk["offset"]):
            if chunk["shape"][1:] != tensor["shape"][1:]:
                raise AssertionError(f"{name} is cut along another dim: {chunk}")
            start = chunk["byte_offset"]
            num_bytes = math.prod(chunk["shape"]) * DTYPE_BYTES[tensor["dtype"]]
            digest.update(memoryview(blobs[chunk["blob"]])[start : start + num_bytes])
    return digest.hexdigest()


def digests(store: Store, plan: Plan) -> dict[tuple[int, int], str]:
    """Of every committed checkpoint, by (step, attempt)."""
    return {
        (found.step, found.attempt): digest_of(store, found.key)
        for found in catalogue.list_checkpoints(store, plan.stage_key)
    }


def steps_of_sound(store: Store, plan: Plan) -> list[int]:
    """Steps of all that are listed, after reading every byte of each."""
    found = catalogue.list_checkpoints(store, plan.stage_key)
    for checkpoint in found:
        problems = catalogue.verify(store, checkpoint.key)
        if problems:
            raise AssertionError(f"{checkpoint.key} is listed but unsound: {problems}")
    return [checkpoint.step for checkpoint in found]
