"""What a stage made: a folder of files in the store, with digests, committed by its manifest.

    <stage_key>/outputs/files/<path>      the files, as they were named
    <stage_key>/outputs/MANIFEST.json     written last; its presence is the commit
    <stage_key>/outputs/fence-<attempt>   this attempt was given up: it commits no more

An attempt is given up when its node is lost, perhaps while it writes. So the next one writes to a folder of
its own, files-<attempt>.

A reader gets a local folder: the one inside the store when that is a folder, else a copy made once per node.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlpipe._core import environment
from mlpipe._core.errors import StoreError
from mlpipe._core.files import home_folder, locked
from mlpipe.store.base import Store, check_key
from mlpipe.store.blobs import missing_objects, read_blob, write_blob
from mlpipe.store.manifest import MANIFEST, MAX_BYTES, UnsoundError, add_checksum, check_blob, strip_checksum

FORMAT = 1
FETCH_SECONDS = 3600.0
_CHUNK_BYTES = 8 * 2**20
_READ_BYTES = 64 * 2**20


def cache_folder() -> Path:
    """MLPIPE_CACHE, else the user's cache: outputs fetched from S3, traces of models, scratch of attempts."""
    base = os.environ.get("XDG_CACHE_HOME") or home_folder() / ".cache"
    return Path(os.environ.get(environment.CACHE) or Path(base) / "mlpipe").absolute()


def commit_output(store: Store, stage_key: str, folder: Path, attempt: int = 1) -> str:
    """Stores every file below `folder` and returns the digest of it all: SHA-256 over names, sizes and the
    SHA-256 of each content.

    Symbolic links and special files are refused, StoreError (input). Where an earlier attempt has committed
    the same content, nothing changes; other content is refused, and so is an attempt that was given up.
    """
    names = _files_below(folder)
    key = f"{stage_key}/outputs"
    place = f"files-{attempt}" if _check_fence(store, key, attempt) else "files"
    files: list[dict[str, Any]] = []
    if store.exists(f"{key}/{MANIFEST}"):
        for name in names:
            summed = hashlib.sha256()
            size_bytes = sum(len(chunk) for chunk in _read(folder / name, summed))
            files.append({"path": name, "sha256": summed.hexdigest(), "blob": {"size_bytes": size_bytes}})
        written = False
    else:
        store.delete([info.key for info in store.list(f"{key}/{place}")])  # of an attempt that died
        for name in names:
            summed = hashlib.sha256()
            blob = write_blob(store, f"{key}/{place}/{name}", _read(folder / name, summed))
            files.append({"path": name, "sha256": summed.hexdigest(), "blob": blob})
        manifest = {"format": FORMAT, "digest": _digest(files), "place": place, "files": files}
        _check_fence(store, key, attempt)
        written = store.put_if_absent(f"{key}/{MANIFEST}", add_checksum(manifest))
    if not written and load_output(store, stage_key)["digest"] != _digest(files):
        raise StoreError(
            "the output of this stage is committed already, with other content",
            where=f"{store.url}/{key}",
            hint="start another run",
            kind="input",
        )
    return _digest(files)


def give_up(store: Store, stage_key: str, attempt: int) -> str | None:
    """From now on `attempt` commits nothing; the digest of what was committed before."""
    store.put_if_absent(f"{stage_key}/outputs/fence-{attempt}", b"given up\n")
    if not store.exists(f"{stage_key}/outputs/{MANIFEST}"):
        return None
    return str(load_output(store, stage_key)["digest"])


def discard(store: Store, stage_key: str) -> None:
    """Deletes what the stage made, first the manifest: it is never half there."""
    store.delete([f"{stage_key}/outputs/{MANIFEST}"])
    keys = [info.key for info in store.list(f"{stage_key}/outputs/")]
    store.delete([key for key in keys if not key.startswith(f"{stage_key}/outputs/fence-")])


def _check_fence(store: Store, key: str, attempt: int) -> bool:
    """Whether an attempt of the stage was given up; if it is this one, StoreError."""
    names = {info.key for info in store.list(key, recursive=False)}
    fences = {name for name in names if name.startswith(f"{key}/fence-")}
    if f"{key}/fence-{attempt}" in fences:
        raise StoreError(
            "this attempt was given up, and its output does not count", where=f"{store.url}/{key}"
        )
    return bool(fences)


def load_output(store: Store, stage_key: str) -> dict[str, Any]:
    """The manifest, verified: {"format", "digest", "files": [{"path", "sha256", "blob"}]}. Raises StoreError
    when the stage has no committed output (kind input) or the manifest cannot be believed."""
    prefix = f"{stage_key}/outputs/"
    where = f"{prefix}{MANIFEST}"
    if not store.exists(where):
        raise StoreError("the stage has no output yet", where=f"{store.url}/{stage_key}", kind="input")
    manifest = strip_checksum(store.get(where, length=MAX_BYTES + 1), where)
    try:
        _check(manifest, prefix)
    except (UnsoundError, StoreError) as error:
        raise StoreError(f"not a sound manifest: {error}", where=where) from None
    sound: dict[str, Any] = manifest
    return sound


def fetch_output(store: Store, stage_key: str, cache_dir: Path) -> Path:
    """A local folder with the stage's output, for reading only.

    A folder store gives its own folder, sizes checked. Otherwise a copy below `cache_dir`, named by its
    digest: made once, under a file lock, every block verified, and visible only when complete.
    """
    manifest = load_output(store, stage_key)
    key = f"{stage_key}/outputs/{_place(manifest)}"
    place = store.local_path(key)
    if place is not None and manifest["files"]:
        sizes = {info.key: info.size_bytes for info in store.list(key)}
        problems = [p for file in manifest["files"] for p in missing_objects(file["blob"], sizes)]
        if problems:
            raise StoreError(f"the stage's output is damaged: {'; '.join(problems[:5])}", where=str(place))
        return place
    return _copied(store, stage_key, manifest["files"], cache_dir.absolute() / manifest["digest"])


def peek_output(store: Store, stage_key: str, cache_dir: Path, *names: str) -> Path:
    """The folder that `fetch_output` gives on any node with this `cache_dir`; here it has only the files
    called one of `names`. For a driver that plans what other machines will read."""
    manifest = load_output(store, stage_key)
    place = store.local_path(f"{stage_key}/outputs/{_place(manifest)}")
    if place is not None and manifest["files"]:
        return place
    wanted = [file for file in manifest["files"] if file["path"].rpartition("/")[2] in names]
    return _copied(store, stage_key, wanted, cache_dir.absolute() / manifest["digest"])


def _copied(store: Store, stage_key: str, files: list[dict[str, Any]], target: Path) -> Path:
    """`target` with `files` in it, some of which, or others of the same output, may be there already."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # one process of the node downloads, the others wait for it
        with locked(target.parent / f".{target.name}.lock", FETCH_SECONDS, "been fetching this"):
            absent = [file for file in files if not (target / file["path"]).is_file()]
            if absent or not target.is_dir():
                _download(store, absent, target)
    except OSError as error:
        raise StoreError(
            f"cannot keep a copy of the output of {stage_key}: {error.strerror}",
            where=str(target.parent),
            hint="free some space there, or choose another folder",
        ) from error
    return target


def _files_below(folder: Path) -> list[str]:
    """Relative paths with "/", sorted."""
    if not folder.is_dir():
        raise StoreError("the stage's output is not a folder", where=str(folder), kind="input")
    names = []
    for place, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            path = Path(place, name)
            mode = path.lstat().st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                what = "a symbolic link" if stat.S_ISLNK(mode) else "a special file"
                raise StoreError(
                    f"the stage's output contains {what}",
                    where=str(path),
                    hint="write ordinary files only",
                    kind="input",
                )
            if stat.S_ISREG(mode):
                names.append(check_key(path.relative_to(folder).as_posix()))
    return sorted(names)


def _read(path: Path, summed: Any) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            summed.update(chunk)
            yield chunk


def _digest(files: list[dict[str, Any]]) -> str:
    lines = [f"{file['sha256']} {file['blob']['size_bytes']} {file['path']}\n" for file in files]
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()


def _place(manifest: dict[str, Any]) -> str:
    return str(manifest.get("place", "files"))


def _check(manifest: Any, prefix: str) -> None:
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, list) or manifest.get("format") != FORMAT:
        raise UnsoundError(f"its format is not {FORMAT}")
    if not re.fullmatch("files(-[0-9]+)?", _place(manifest)):
        raise UnsoundError(f"its files lie elsewhere, in {_place(manifest)!r}")
    for file in files:
        if not isinstance(file, dict) or not isinstance(file.get("path"), str):
            raise UnsoundError("a file has no path")
        path = check_key(file["path"])
        check_blob(file.get("blob"), prefix, f"file {path!r}")
        if file["blob"]["key"] != f"{prefix}{_place(manifest)}/{path}" or not isinstance(
            file.get("sha256"), str
        ):
            raise UnsoundError(f"file {path!r} lies elsewhere")
    if manifest.get("digest") != _digest(files):
        raise UnsoundError("its digest does not fit")


def _download(store: Store, files: list[dict[str, Any]], target: Path) -> None:
    partial = target.parent / f".{target.name}.{secrets.token_hex(4)}"
    try:
        partial.mkdir()
        for file in files:
            path = partial / file["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            size_bytes = file["blob"]["size_bytes"]
            buffer = memoryview(bytearray(min(size_bytes, _READ_BYTES)))
            with path.open("xb") as output:
                for start in range(0, size_bytes, _READ_BYTES):
                    piece = buffer[: size_bytes - start]
                    read_blob(store, file["blob"], start, piece)
                    output.write(piece)
                output.flush()
                os.fsync(output.fileno())
        if not target.is_dir():
            partial.rename(target)
            return
        for file in files:  # into what a look at a few of them has left, and others may be reading
            path = target / file["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            (partial / file["path"]).rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
