"""Promoted models: numbered versions, aliases that point at one, and where each came from.

models/<name>/<version>/CLAIM             reserves the number for one promoter
models/<name>/<version>/<blobs>           the weights, copied within the store
models/<name>/<version>/MANIFEST.json     written last; its presence is the commit. The checkpoint's own,
                                          less the optimizer, plus "lineage"
models/<name>/aliases/<alias>             {"version": n}, changed by conditional PUT
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from mlpipe._core.errors import DamagedError, StoreError
from mlpipe._core.ids import is_name, new_attempt_uuid
from mlpipe._core.serial import from_plain
from mlpipe.store.base import Store
from mlpipe.store.catalogue import commit, damages, load_manifest
from mlpipe.store.leases import CLOCKS_SECONDS
from mlpipe.store.manifest import MANIFEST, Blob, Manifest, Tensor, part_objects

_NUM_TRIES = 100
_NUM_THREADS = 4
_ALIAS_BYTES = 4096


@dataclass(frozen=True)
class Model:
    """One version. `key`: its prefix, readable by `catalogue.load_manifest`. `time`: of promotion, Unix
    seconds. `size_bytes`: of the weights."""

    name: str
    version: int
    key: str
    aliases: tuple[str, ...]
    time: float
    step: int
    size_bytes: int
    lineage: dict[str, Any]


def promote(
    store: Store,
    name: str,
    alias: str | None,
    prefix: str,
    lineage: Mapping[str, Any],
    raise_if_stopped: Callable[[], None] = lambda: None,
) -> int:
    """Makes the checkpoint at `prefix` the next version of model `name`, points `alias` at it, and returns
    the version. Only tensors named `model.*` are taken; what they lie in is read first. Two promoters at once
    get two versions. `lineage`: JSON (run, stage, spec digest, git commit, data digest, metrics).
    `raise_if_stopped`: called until anything is written, before each block that is read. Raises what that
    does; StoreError (input) for bad names, and a checkpoint without a model or removed meanwhile;
    DamagedError: nothing is written."""
    _check_name(name)
    if alias is not None:
        _check_alias(alias)
    source = load_manifest(store, prefix)
    tensors = {key: value for key, value in source["tensors"].items() if key.startswith("model.")}
    if not tensors:
        raise StoreError("the checkpoint holds no model", where=prefix, kind="input")
    used = sorted({chunk["blob"] for tensor in tensors.values() for chunk in tensor["chunks"]})
    for error in damages(store, prefix, [source["blobs"][index] for index in used], raise_if_stopped):
        if not store.exists(f"{prefix}/{MANIFEST}"):  # which a deletion takes first
            raise StoreError(
                "the checkpoint was removed while it was read",
                where=prefix,
                hint="mlpipe checkpoints list shows those that there are",
                kind="input",
            )
        raise error
    raise_if_stopped()
    version = _claim(store, name)
    key = _version_key(name, version)
    blobs, tensors = _moved(source, tensors, used, prefix, key)
    copies = [
        (old_part[0], new_part[0])
        for index, blob in blobs.items()
        for old_part, new_part in zip(part_objects(source["blobs"][index]), part_objects(blob), strict=True)
    ]
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="promote") as pool:
        for _ in pool.map(lambda pair: store.copy(*pair), copies):
            pass
    manifest: dict[str, Any] = {
        **source,
        "scalars": {},
        "time": time.time(),
        "tensors": tensors,
        "blobs": list(blobs.values()),
        "lineage": {**lineage, "checkpoint": prefix},
    }
    if not commit(store, key, manifest):
        raise StoreError("another promoter wrote into a version that it had not claimed", where=key)
    if alias is not None:
        set_alias(store, name, alias, version)
    return version


def _moved(
    source: Manifest, tensors: dict[str, Tensor], used: Sequence[int], prefix: str, key: str
) -> tuple[dict[int, Blob], dict[str, Tensor]]:
    """The blobs that `tensors` lie in, by their old number (`used`), with keys under `key`; and the tensors
    with new blob numbers."""
    number = {old: new for new, old in enumerate(used)}
    blobs: dict[int, Blob] = {}
    for old in used:
        blob = source["blobs"][old]
        blobs[old] = {**blob, "key": key + blob["key"][len(prefix) :]}
    moved: dict[str, Tensor] = {
        name: {
            **tensor,
            "chunks": [{**chunk, "blob": number[chunk["blob"]]} for chunk in tensor["chunks"]],
        }
        for name, tensor in tensors.items()
    }
    return blobs, moved


def set_alias(store: Store, name: str, alias: str, version: int) -> None:
    """Points `alias` at a committed version; the last caller wins. StoreError (input) when there is none."""
    _check_alias(alias)
    if version not in _versions(store, name):
        raise StoreError(f"model {name} has no version {version}", where=store.url, kind="input")
    key = f"models/{name}/aliases/{alias}"
    data = json.dumps({"version": version, "time": time.time(), "by": new_attempt_uuid()}).encode()
    for _ in range(_NUM_TRIES):
        if store.put_if_absent(key, data):
            return
        _, etag = store.get_with_etag(key)
        if store.put_if_match(key, data, etag):
            return
    raise StoreError(f"alias {alias} changed {_NUM_TRIES} times under us", where=f"{store.url}/{key}")


def list_models(store: Store) -> tuple[list[Model], list[DamagedError]]:
    """All committed versions, by name, then version; and what of them or of their aliases is damaged."""
    names = [
        name
        for info in store.list("models", recursive=False)
        if info.key.endswith("/") and is_name(name := PurePosixPath(info.key).name)
    ]
    models: list[Model] = []
    damaged: list[DamagedError] = []
    for name in names:
        aliases = _aliases(store, name)
        damaged += [alias for alias in aliases.values() if isinstance(alias, DamagedError)]
        for version in _versions(store, name):
            try:
                models.append(_model(store, name, version, aliases))
            except DamagedError as error:
                damaged.append(error)
    return models, damaged


def show_model(store: Store, name: str, version: int | str | None) -> Model:
    """A version by its number or an alias; None: the latest. Raises StoreError (input) when there is none;
    DamagedError, and never shows another one instead."""
    _check_name(name)
    aliases, versions = _aliases(store, name), _versions(store, name)
    text = str(max(versions, default=1) if version is None else version)
    number = int(text) if text.isascii() and text.isdecimal() else aliases.get(text)
    if isinstance(number, DamagedError):
        raise number
    if number is None or number not in versions:
        raise StoreError(
            f"there is no model {name}" + (f", version {version}" if versions else ""),
            where=store.url,
            hint="mlpipe models list shows them",
            kind="input",
        )
    return _model(store, name, number, aliases)


def find_version(
    store: Store, name: str, lineage: Mapping[str, Sequence[str]], *, since: float
) -> Model | None:
    """The newest version whose lineage says one of `lineage` for each of its keys. `since`: Unix seconds,
    before which none of those was promoted, by any machine's clock. One that is damaged is passed over."""
    for version in reversed(_versions(store, name)):
        try:
            model = _model(store, name, version, {})
        except DamagedError:
            continue
        if model.time < since - CLOCKS_SECONDS:
            break
        if all(model.lineage.get(key) in values for key, values in lineage.items()):
            return model
    return None


def _model(store: Store, name: str, version: int, aliases: dict[str, int | DamagedError]) -> Model:
    key = _version_key(name, version)
    manifest = load_manifest(store, key)
    return Model(
        name=name,
        version=version,
        key=key,
        aliases=tuple(sorted(alias for alias, target in aliases.items() if target == version)),
        time=manifest["time"],
        step=manifest["step"],
        size_bytes=sum(blob["size_bytes"] for blob in manifest["blobs"]),
        lineage=manifest.get("lineage", {}),
    )


def _check_name(name: str) -> None:
    if not is_name(name):
        raise StoreError(f"{name!r} is not a name", hint="use a-z, 0-9, '.', '_' and '-'", kind="input")


def _check_alias(alias: str) -> None:
    _check_name(alias)
    if alias.isdecimal():
        raise StoreError(f"alias {alias!r} looks like a version", hint="use a word", kind="input")


def _version_key(name: str, version: int) -> str:
    return f"models/{name}/{version}"


def _numbers(store: Store, name: str, file: str) -> list[int]:
    """Versions of `name` that have `file`, ascending."""
    versions = []
    for info in store.list(f"models/{name}"):
        version, _, rest = info.key.removeprefix(f"models/{name}/").partition("/")
        if rest == file and version.isascii() and version.isdecimal():
            versions.append(int(version))
    return sorted(versions)


def _versions(store: Store, name: str) -> list[int]:
    return _numbers(store, name, MANIFEST)


def _claim(store: Store, name: str) -> int:
    version = max(_numbers(store, name, "CLAIM"), default=0)
    for _ in range(_NUM_TRIES):
        version += 1
        if store.put_if_absent(f"{_version_key(name, version)}/CLAIM", new_attempt_uuid().encode()):
            return version
    raise StoreError(f"no version of {name} could be claimed in {_NUM_TRIES} tries", where=store.url)


def _aliases(store: Store, name: str) -> dict[str, int | DamagedError]:
    """The version of each, or what is wrong with it."""
    aliases: dict[str, int | DamagedError] = {}
    for info in store.list(f"models/{name}/aliases", recursive=False):
        alias = PurePosixPath(info.key).name
        try:
            version = json.loads(store.get(info.key, length=_ALIAS_BYTES))["version"]
            aliases[alias] = from_plain(int, version)
        except (ValueError, KeyError, TypeError, RecursionError):
            aliases[alias] = DamagedError("not an alias", where=info.key, hint="set it again")
    return aliases
