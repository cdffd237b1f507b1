"""The checkpoint catalogue: a checkpoint is committed or it does not exist.

    <stage_key>/checkpoints/step-<9 digits>/<attempt>-<uuid>/<blobs>, MANIFEST.json
    <stage_key>/checkpoints/step-<9 digits>/<attempt>-<uuid>/GIVEN_UP
    <stage_key>/checkpoints/step-<9 digits>/<attempt>-<uuid>/BEST
    <stage_key>/checkpoints/fence-<attempt>-<step>

Every save has a prefix of its own, never written before (re-saving into one mixes old and new shards). Blobs
come first; `commit` checks them against a LIST and then creates MANIFEST.json with one conditional PUT, whose
presence is the commit. The latest is the highest committed step by LIST; no pointer can go stale.

A fence says that an attempt was given up, its node being lost, and what it had committed by then: what it
commits later, when the node is back, does not count. GIVEN_UP says that one checkpoint counts no more: it is
damaged, or a resume went back behind it. It is pruned like one that was never committed.

BEST says that a checkpoint was the best of its training when it was saved. It is written before the commit,
so that both take place at once. Of those that count, the newest with it is the best one, and is never pruned.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlpipe._core.errors import DamagedError, StoreError
from mlpipe._core.ids import new_attempt_uuid
from mlpipe.store.base import ObjectInfo, Store
from mlpipe.store.blobs import missing_objects, read_blob, write_blob
from mlpipe.store.folder import FolderStore
from mlpipe.store.manifest import MANIFEST, MAX_BYTES, Blob, Manifest, add_checksum, check, strip_checksum

__all__ = [
    "Blob", "Checkpoint", "best", "check_whole", "commit", "damages", "discard", "fence", "give_up",
    "latest", "list_checkpoints", "load_manifest", "mark_best", "new_prefix",
    "prune", "read_best", "read_blob", "step_of", "verify", "write_blob",
]  # fmt: skip

GIVEN_UP = "GIVEN_UP"
BEST = "BEST"
_BEST_BYTES = 65_536
_STALE_SECONDS = 3600.0  # a temporary file that nobody has written to for so long
_PREFIX = re.compile(r"(.*/checkpoints/step-([0-9]{9,})/([0-9]+)-([0-9a-f]+))/(.+)")
_FENCE = re.compile(r".*/checkpoints/fence-([0-9]+)-([0-9]+)")


@dataclass(frozen=True)
class Checkpoint:
    """A committed one. `key`: its prefix. `time`: of the commit, Unix seconds. `size_bytes`: all objects.
    `best`: it is the best of its stage."""

    key: str
    step: int
    attempt: int
    time: float
    size_bytes: int
    best: bool = False


@dataclass
class _Seen:
    """A prefix as LIST shows it, committed or not."""

    step: int
    attempt: int
    keys: list[str]
    size_bytes: int = 0
    committed: float | None = None
    given_up: bool = False
    best: bool = False


def new_prefix(stage_key: str, step: int, attempt: int) -> str:
    """A prefix that nothing was ever written to."""
    return f"{stage_key}/checkpoints/step-{step:09d}/{attempt}-{new_attempt_uuid()}"


def step_of(prefix: str) -> int:
    """Of a checkpoint's prefix."""
    return int(prefix.rpartition("/step-")[2].partition("/")[0])


def commit(store: Store, prefix: str, manifest: Mapping[str, Any]) -> bool:
    """Checks that every blob is there in full, then makes the checkpoint visible in one step.

    True: committed by this call, also when only the reply was lost. False: another manifest is there already.
    Raises StoreError when a blob is missing or the manifest is unsound; nothing is visible then.
    """
    where = f"{prefix}/{MANIFEST}"
    sound = check(manifest, prefix, where)
    sizes = {info.key: info.size_bytes for info in store.list(prefix)}
    problems = [problem for blob in sound["blobs"] for problem in missing_objects(blob, sizes)]
    if problems:
        raise StoreError(f"not committed: {'; '.join(problems[:5])}", where=where)
    data = add_checksum(sound)
    if len(data) > MAX_BYTES:
        raise StoreError(f"not committed: the manifest is larger than {MAX_BYTES} bytes", where=where)
    if store.put_if_absent(where, data):
        return True
    return store.get(where, length=MAX_BYTES + 1) == data  # the uuid in it makes it ours


def fence(store: Store, stage_key: str, attempt: int) -> int:
    """Gives up `attempt`: from now on nothing counts that it commits above the returned step, the highest
    that is committed now (0: none)."""
    last = latest(store, stage_key)
    step = last.step if last else 0
    store.put_if_absent(f"{stage_key}/checkpoints/fence-{attempt}-{step}", b"given up\n")
    return step


def give_up(store: Store, prefix: str, why: str) -> None:
    """From now on the checkpoint does not count."""
    store.put_if_absent(f"{prefix}/{GIVEN_UP}", f"{why}\n".encode())


def mark_best(store: Store, prefix: str, why: Mapping[str, Any]) -> None:
    """Before `commit`: the checkpoint will be the best one. `why`: JSON, of the validation that said so."""
    store.put_if_absent(f"{prefix}/{BEST}", json.dumps(why).encode() + b"\n")


def best(store: Store, stage_key: str) -> Checkpoint | None:
    """The best committed one; None where no validation said so."""
    return next((item for item in list_checkpoints(store, stage_key) if item.best), None)


def read_best(store: Store, prefix: str) -> dict[str, Any]:
    """What `mark_best` was given; empty if it cannot be read."""
    try:
        why = json.loads(store.get(f"{prefix}/{BEST}", length=_BEST_BYTES))
    except (StoreError, ValueError, RecursionError):
        return {}
    return why if isinstance(why, dict) else {}


def list_checkpoints(store: Store, stage_key: str) -> list[Checkpoint]:
    """Committed ones that count, ascending by step, then attempt, then time of the commit."""
    return _committed(_scan(store, stage_key))


def latest(store: Store, stage_key: str) -> Checkpoint | None:
    """The committed one with the highest step (of several: the latest attempt's)."""
    checkpoints = list_checkpoints(store, stage_key)
    return checkpoints[-1] if checkpoints else None


def _committed(seen_prefixes: dict[str, _Seen]) -> list[Checkpoint]:
    checkpoints = [
        Checkpoint(prefix, seen.step, seen.attempt, seen.committed, seen.size_bytes)
        for prefix, seen in seen_prefixes.items()
        if seen.committed is not None
    ]
    checkpoints.sort(key=lambda item: (item.step, item.attempt, item.time, item.key))
    for index in range(len(checkpoints) - 1, -1, -1):
        if seen_prefixes[checkpoints[index].key].best:
            checkpoints[index] = replace(checkpoints[index], best=True)
            break
    return checkpoints


def load_manifest(store: Store, prefix: str) -> Manifest:
    """Verified and checked. StoreError: absent (kind input); DamagedError: corrupt, or not to be believed."""
    where = f"{prefix}/{MANIFEST}"
    return check(strip_checksum(store.get(where, length=MAX_BYTES + 1), where), prefix, where)


def check_whole(store: Store, prefix: str, manifest: Manifest) -> None:
    """Raises DamagedError unless every object of the checkpoint is there in its full size, by one LIST."""
    sizes = {info.key: info.size_bytes for info in store.list(prefix)}
    problems = [problem for blob in manifest["blobs"] for problem in missing_objects(blob, sizes)]
    if problems:
        raise DamagedError("; ".join(problems[:5]))


def verify(store: Store, prefix: str) -> list[str]:
    """Reads every byte. What is wrong, in words; empty if sound. Raises StoreError only when the store itself
    cannot be reached or read."""
    try:
        manifest = load_manifest(store, prefix)
    except StoreError as error:
        if not isinstance(error, DamagedError) and error.kind != "input":
            raise
        return [error.told]
    return [error.told for error in damages(store, prefix, manifest["blobs"])]


def damages(
    store: Store, prefix: str, blobs: Sequence[Blob], raise_if_stopped: Callable[[], None] = lambda: None
) -> Iterator[StoreError]:
    """Reads every byte of `blobs` of the checkpoint at `prefix`, each once: what is wrong with them. Calls
    `raise_if_stopped` before each block, and raises what it does."""
    sizes = {info.key: info.size_bytes for info in store.list(prefix)}
    for blob in blobs:
        missing = [DamagedError(problem) for problem in missing_objects(blob, sizes)]
        yield from missing or _corrupt_blocks(store, blob, raise_if_stopped)


def _corrupt_blocks(store: Store, blob: Blob, raise_if_stopped: Callable[[], None]) -> Iterator[DamagedError]:
    buffer = memoryview(bytearray(min(blob["block_bytes"], blob["size_bytes"])))
    for start in range(0, blob["size_bytes"], blob["block_bytes"]):
        raise_if_stopped()
        try:
            read_blob(store, blob, start, buffer[: blob["size_bytes"] - start])
        except DamagedError as error:  # not of a store that cannot be read now
            yield error


def prune(store: Store, stage_key: str, keep: int, in_use: Collection[str] = ()) -> list[str]:
    """Keeps the newest `keep` committed checkpoints, the best one and those in `in_use`; returns the prefixes
    deleted.

    Uncommitted prefixes go too once a higher step is committed: their save has failed or was killed. A caller
    with a save in flight names its prefix in `in_use`.
    """
    if keep < 1:
        raise StoreError("at least one checkpoint must be kept", hint="set keep to 1 or more", kind="input")
    kept = {prefix.rstrip("/") for prefix in in_use}
    seen_prefixes = _scan(store, stage_key)  # once: a checkpoint committed from here on is not looked at
    committed = _committed(seen_prefixes)
    kept |= {item.key for item in committed[-keep:]} | {item.key for item in committed if item.best}
    newest = committed[-1].step if committed else -1
    doomed = {
        prefix: seen.keys
        for prefix, seen in seen_prefixes.items()
        if prefix not in kept and (seen.committed is not None or seen.step < newest)
    }
    _delete(store, doomed)
    if isinstance(store, FolderStore):  # on S3 nothing of ours is ever half-written
        store.sweep(f"{stage_key}/checkpoints", older_than_seconds=_STALE_SECONDS)
    return list(doomed)


def discard(store: Store, prefix: str) -> None:
    """Deletes one checkpoint, first its MANIFEST.json: it is never half there."""
    _delete(store, {prefix: [info.key for info in store.list(prefix)]})


def _delete(store: Store, doomed: Mapping[str, Sequence[str]]) -> None:
    """The keys of each prefix. All manifests go first: a checkpoint half deleted is not listed."""
    manifests = [f"{prefix}/{MANIFEST}" for prefix in doomed]
    store.delete(manifests)
    store.delete([key for keys in doomed.values() for key in keys if key not in manifests])


def _scan(store: Store, stage_key: str) -> dict[str, _Seen]:
    seen_prefixes: dict[str, _Seen] = {}
    fences: dict[int, int] = {}
    for info in store.list(f"{stage_key}/checkpoints"):
        if match := _FENCE.fullmatch(info.key):
            attempt, step = int(match[1]), int(match[2])
            fences[attempt] = min(step, fences.get(attempt, step))
        else:
            _note(seen_prefixes, info)
    for seen in seen_prefixes.values():
        if seen.given_up or seen.step > fences.get(seen.attempt, seen.step):
            seen.committed = None
    return seen_prefixes


def _note(seen_prefixes: dict[str, _Seen], info: ObjectInfo) -> None:
    match = _PREFIX.fullmatch(info.key)
    if match is None:
        return  # not ours
    prefix, step, attempt, _, name = match.groups()
    seen = seen_prefixes.setdefault(prefix, _Seen(int(step), int(attempt), []))
    seen.keys.append(info.key)
    seen.size_bytes += info.size_bytes
    if name == MANIFEST:
        seen.committed = info.modified
    seen.given_up |= name == GIVEN_UP
    seen.best |= name == BEST
