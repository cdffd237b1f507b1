"""Tars of samples as WebDataset has them: files that follow each other and are called alike up to their first
dot are one sample, and the rest of the name says what each is (`0001.png`, `0001.cls`).

A tar has no table of contents. Its headers are read once it is at hand, 512 bytes before each file, and then
any sample is where they say. How many samples each tar has must be known before: `mlpipe-index` counts them
and writes index.json beside the tars; of a folder of this machine they are counted at the start otherwise.

    index.json {"format": 1, "tars": [{"file", "size_bytes", "sha256", "num_samples"}, ...]}
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import tarfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mlpipe._core.errors import MlpipeError, TrainError
from mlpipe.plan.data import FilesPlan
from mlpipe.store.open import open_store
from mlpipe.train.data.fields import Fields
from mlpipe.train.data.files import base_of, cache_of, find_files, is_remote, matches
from mlpipe.train.data.shard_cache import CachedFile, check_room
from mlpipe.train.data.windows import WINDOW, Windowed

INDEX = "index.json"


@dataclass(frozen=True)
class Tar:
    """`file.name`: below the folder. `path`: None of one in a bucket."""

    file: CachedFile
    num_samples: int
    path: Path | None


@dataclass(frozen=True)
class Member:
    """Where a sample's files lie in a tar, by extension: first byte, and how many."""

    key: str
    places: dict[str, tuple[int, int]]


class TarSamples(Windowed):
    """One sample each. Order and numbering are by tars (windows.py). `path`: of these files; the rest as the
    plan has it."""

    def __init__(self, plan: FilesPlan, path: str, fields: Fields, limit_bytes: int) -> None:
        self.fields = fields
        self.vocab_size = fields.vocab_size
        self.url = base_of(path)[0].rstrip("/")
        self.tars = find_tars(path)
        super().__init__([tar.num_samples for tar in self.tars])
        if not self.num_samples:
            raise TrainError("there are no samples in these tars", where=path, kind="input")
        if is_remote(path):
            files = [tar.file for tar in self.tars]
            check_room(files, WINDOW, limit_bytes, where=path, smaller="smaller tars")
        self.wanted = set(plan.columns.values())
        self.cache = cache_of(self.url, limit_bytes)
        self._open: OrderedDict[int, tuple[int, list[Member]]] = OrderedDict()

    def __getitem__(self, index: int) -> dict[str, Any]:
        number, own = self.place_of(index)
        file, members = self._opened(number)
        member = members[own]
        name = ""
        try:
            sample = {}
            for name in self.wanted or member.places:
                begin, size = member.places[name]
                data = os.pread(file, size, begin)
                if len(data) < size:
                    raise ValueError("its tar ends within it")
                sample[name] = decoded(name, data)
            return self.fields.sample(sample)
        except KeyError as error:
            has = ", ".join(member.places)
            raise self._bad(index, member.key, f"has no {error}", f"it has {has}") from error
        except MlpipeError:
            raise
        except OSError as error:
            raise _unread(error, self.where(index)) from error
        except Exception as error:
            words = f".{name}: {str(error) or type(error).__name__}"
            raise self._bad(index, member.key, words, None) from error

    def where(self, index: int) -> str:
        """The tar of a sample."""
        return f"{self.url}/{self.tars[self.place_of(index)[0]].file.name}"

    def expect(self, pieces: list[int]) -> None:
        """Fetches them meanwhile."""
        files = [self.tars[number].file for number in pieces if self.tars[number].path is None]
        if files:
            self.cache.expect(files)

    def _opened(self, number: int) -> tuple[int, list[Member]]:
        """The open tar and its members. Forks read from it side by side: they say where."""
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        while len(self._open) >= 2 * WINDOW:
            os.close(self._open.popitem(last=False)[1][0])
        tar = self.tars[number]
        file = self._descriptor(tar)
        with os.fdopen(os.dup(file), "rb") as copy:
            members = members_of(copy, f"{self.url}/{tar.file.name}")
        if len(members) != tar.num_samples:
            raise _stale(
                f"{len(members)} samples, and {INDEX if tar.file.sha256 else 'the count at the start'} "
                f"says {tar.num_samples}",
                f"{self.url}/{tar.file.name}",
                self.url,
            )
        self._open[number] = file, members
        return self._open[number]

    def _descriptor(self, tar: Tar) -> int:
        if tar.path is not None:
            try:
                return os.open(tar.path, os.O_RDONLY)
            except OSError as error:
                raise _unread(error, str(tar.path)) from error
        return self.cache.opened(tar.file, lambda path: os.open(path, os.O_RDONLY))

    def _bad(self, index: int, key: str, words: str, hint: str | None) -> TrainError:
        return TrainError(f"sample {key!r}: {words}", where=self.where(index), hint=hint, kind="input")


def find_tars(path: str) -> list[Tar]:
    """By name; as index.json in their folder has them, else counted. Raises TrainError, StoreError."""
    base, pattern = base_of(path)
    if is_remote(path):
        store = open_store(base)
        if not store.exists(INDEX):
            raise TrainError(
                f"there is no {INDEX}, which says how many samples each tar has",
                where=base,
                hint=f"write it once: mlpipe-index {base}",
                kind="input",
            )
        text, folder = store.get(INDEX), None
    else:
        folder = Path(base)
        if not (folder / INDEX).is_file():
            files = find_files(path, ".tar")[1]
            return [_counted(one.path, one.name) for one in files if one.path is not None]
        text = (folder / INDEX).read_bytes()
    tars = [tar for tar in read_index(text, f"{base}/{INDEX}") if matches(tar.file.name, pattern, ".tar")]
    if not tars:
        raise TrainError(f"{INDEX} names no such tar", where=path, kind="input")
    if folder is None:
        return tars
    return [_at_hand(tar, folder) for tar in tars]


def _at_hand(tar: Tar, folder: Path) -> Tar:
    path = folder / tar.file.name
    try:
        size_bytes = path.stat().st_size
    except FileNotFoundError as error:
        raise _stale(f"{INDEX} names it, and it is not there", str(path), str(folder)) from error
    if size_bytes != tar.file.size_bytes:
        words = f"{size_bytes} bytes, and {INDEX} says {tar.file.size_bytes}"
        raise _stale(words, str(path), str(folder))
    return Tar(tar.file, tar.num_samples, path)


def _stale(words: str, where: str, folder: str) -> TrainError:
    return TrainError(words, where=where, hint=f"write it anew: mlpipe-index {folder}", kind="input")


def _unread(error: OSError, where: str) -> TrainError:
    return TrainError(f"cannot be read: {error.strerror or error}", where=where, kind="infrastructure")


def read_index(text: bytes, where: str) -> list[Tar]:
    """Raises TrainError (input) for what is none."""
    try:
        document = json.loads(text)
        if document["format"] != 1:
            raise ValueError(f"format {document['format']!r}, this mlpipe reads 1")
        tars = []
        for one in document["tars"]:
            name, size, digest = one["file"], _count(one["size_bytes"]), one["sha256"]
            is_below = not name.startswith("/") and ".." not in name.split("/") and "\0" not in name
            if not is_below or not re.fullmatch("[0-9a-f]{64}", digest):
                raise ValueError(f"{name!r} with {digest!r} is no file below this folder")
            tars.append(Tar(CachedFile(name, size, digest), _count(one["num_samples"]), None))
        if len({tar.file.name for tar in tars}) < len(tars):
            raise ValueError("a file stands there twice")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        hint = "write it anew with mlpipe-index"
        raise TrainError(
            f"this is no index of tars: {error!r}", where=where, hint=hint, kind="input"
        ) from error
    return sorted(tars, key=lambda tar: tar.file.name)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**48:
        raise ValueError(f"{value!r} is no number of bytes or samples")
    return value


def _counted(path: Path, name: str) -> Tar:
    with path.open("rb") as file:
        num_samples = len(members_of(file, str(path)))
    return Tar(CachedFile(name, path.stat().st_size, ""), num_samples, path)


def members_of(file: Any, where: str) -> list[Member]:
    """The samples of an open tar, in its order. Raises TrainError (input) for what is no plain tar, and where
    a sample has two files of one extension, or one whose bytes do not lie there as they are."""
    members: list[Member] = []
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for info in tar:
                if info.size < 0:  # it would come again and again
                    raise tarfile.ReadError(f"damaged at byte {info.offset}")
                key, extension = _parts(info.name)
                if not extension or not (info.isreg() or info.issym() or info.islnk()):
                    continue
                if not info.isreg() or info.issparse():
                    what = "is packed sparse" if info.isreg() else f"is a link to {info.linkname!r}"
                    raise TrainError(
                        f"{info.name!r} {what}",
                        where=where,
                        hint="pack it whole: tar --dereference --hard-dereference, without --sparse",
                        kind="input",
                    )
                if not members or members[-1].key != key:
                    members.append(Member(key, {}))
                if extension in members[-1].places:
                    words = f"sample {key!r} has two files .{extension}"
                    raise TrainError(words, where=where, hint="pack each sample once", kind="input")
                members[-1].places[extension] = (info.offset_data, info.size)
            end = tar.offset
        file.seek(end)
        if file.read(512).strip(b"\0"):  # tarfile takes what it cannot read for the end
            raise tarfile.ReadError(f"damaged at byte {end}")
    except (tarfile.TarError, ValueError, OverflowError, MemoryError, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # which a size below 0 is
            raise
        hint = "tars that are compressed cannot be read at any place: unpack them once (gunzip, zstd -d)"
        raise TrainError(
            f"this is no tar: {str(error) or type(error).__name__}", where=where, hint=hint, kind="input"
        ) from error
    return members


def _parts(name: str) -> tuple[str, str]:
    """Key and extension: the name up to the first dot behind its folders, and what follows it. No extension
    of what is hidden."""
    folder, _, last = name.removeprefix("./").rpartition("/")
    stem, _, extension = last.partition(".")
    return (f"{folder}/{stem}" if folder else stem), extension.lower() if stem else ""


def decoded(extension: str, data: bytes) -> Any:
    """By the last part of the extension. Raises ValueError for one that is not known."""
    last = extension.rpartition(".")[2]
    if last not in _DECODERS:
        known = ", ".join(_DECODERS)
        raise ValueError(f"is not decoded here, only {known}; choose with data.columns: {{KEY: EXTENSION}}")
    return _DECODERS[last](data)


def _image(data: bytes) -> torch.Tensor:
    """(channels, height, width) in fp32 from 0 to 1: one channel of grey images, three of all others."""
    try:
        from PIL import Image
    except ImportError:
        raise ValueError("images are decoded by Pillow, which is not installed: pip install pillow") from None
    try:
        with Image.open(io.BytesIO(data)) as image:
            if image.mode.startswith("I"):  # 16 bits, of which a conversion would keep the lowest
                pixels = np.array(image, dtype=np.float32) / 65535
            else:
                mode = "L" if image.mode in ("1", "L", "LA") else "RGB"
                pixels = np.array(image.convert(mode), dtype=np.float32) / 255
    except Image.UnidentifiedImageError:
        raise ValueError("this is no picture") from None
    except OSError as error:  # not the disk's
        raise ValueError(str(error)) from error
    return torch.from_numpy(pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1).copy())


def _text(data: bytes) -> str:
    return data.decode("utf-8")


_DECODERS: Mapping[str, Callable[[bytes], Any]] = {
    "txt": _text,
    "json": json.loads,
    "cls": lambda data: int(data.decode("ascii")),
    "npy": lambda data: np.load(io.BytesIO(data), allow_pickle=False),
    "png": _image,
    "jpg": _image,
    "jpeg": _image,
}
