"""Folders of memory-mapped token files: a manifest, one flat binary file a split, a tokenizer.

    manifest.json {"format": 1, "dtype": "uint16", "vocab_size": 4096, "tokenizer": "tokenizer.json",
                   "splits": {"train": {"file", "num_tokens", "num_bytes", "sha256"}, ...}}

`num_bytes` is the size of the split's text in UTF-8: what bits per byte are counted by. A folder in a bucket
has its splits in many files, which `mlpipe-corpus --shard` makes:

    manifest.json {"format": 2, ..., "splits": {"train": {"num_tokens", "num_bytes",
                                                          "shards": [{"file", "num_tokens", "sha256"}, ...]}}}
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlpipe._core.errors import TrainError
from mlpipe.store.open import open_store
from mlpipe.store.outputs import cache_folder

FORMAT = 1
SHARDED = 2
DTYPES = {"uint16": np.uint16, "uint32": np.uint32}
MANIFEST = "manifest.json"
BUCKET = "s3://"


@dataclass(frozen=True)
class Shard:
    """One of several files of a split."""

    file: str
    num_tokens: int
    sha256: str


@dataclass(frozen=True)
class Split:
    """In one file, or in `shards`."""

    file: str
    num_tokens: int
    num_bytes: int
    sha256: str
    shards: tuple[Shard, ...] = ()


@dataclass(frozen=True)
class TokenFolder:
    """`digest` is the SHA-256 of the manifest, which names the digest of every file: that of the data.
    `url`: of the bucket whose files `path` has copies of; None: it is the folder itself."""

    path: Path
    dtype: str
    vocab_size: int
    tokenizer: str | None
    splits: dict[str, Split]
    digest: str
    url: str | None = None

    def split(self, name: str) -> Split:
        """Raises TrainError (input) where there is none of that name."""
        if name not in self.splits:
            known = ", ".join(sorted(self.splits))
            raise _bad(f"no split {name!r}; there are {known}", self.where, _REMAKE)
        return self.splits[name]

    @property
    def where(self) -> str:
        """Of the manifest, for messages."""
        return f"{self.url or self.path}/{MANIFEST}"

    @property
    def tokenizer_path(self) -> Path | None:
        return self.path / self.tokenizer if self.tokenizer else None


def open_folder(path: str | Path) -> TokenFolder:
    """Reads the manifest and checks the files' sizes. Raises TrainError (input) saying what does not fit.
    `path`: a folder, or one in a bucket, of which nothing else is read yet but the tokenizer."""
    if str(path).startswith(BUCKET):
        return _open_bucket(str(path).rstrip("/"))
    folder = Path(path)
    where = str(folder / MANIFEST)
    try:
        text = (folder / MANIFEST).read_bytes()
    except OSError as error:
        raise _bad(
            f"no token files here: {error.strerror or error}", where, "make them with mlpipe-corpus --out DIR"
        ) from error
    try:
        tokens = _parse(folder, json.loads(text), hashlib.sha256(text).hexdigest())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _bad(f"this is no manifest of token files: {error!r}", where, _REMAKE) from error
    for name, split in tokens.splits.items():
        _check_size(tokens, name, split)
    return tokens


def _open_bucket(url: str) -> TokenFolder:
    store = open_store(url)
    where = f"{url}/{MANIFEST}"
    text = store.get(MANIFEST)
    folder = cache_folder() / "tokens" / hashlib.sha256(url.encode()).hexdigest()[:32]
    try:
        tokens = _parse(folder, json.loads(text), hashlib.sha256(text).hexdigest(), SHARDED)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _bad(
            f"this is no manifest of token files in shards: {error!r}",
            where,
            "make the folder with mlpipe-corpus --shard '64 MB' --out DIR, and upload it",
        ) from error
    if tokens.tokenizer_path is not None and tokens.tokenizer is not None:
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f".{tokens.tokenizer}.{os.getpid()}"
        partial.write_bytes(store.get(tokens.tokenizer))
        partial.replace(tokens.tokenizer_path)
    return replace(tokens, url=url)


def verify(tokens: TokenFolder) -> None:
    """Reads every file and compares its SHA-256 (about 1 s a GB; for one process a node, not for each).
    Raises TrainError (input) naming the file that differs."""
    for split in tokens.splits.values():
        with (tokens.path / split.file).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != split.sha256:
            raise _bad("its bytes are not those of the manifest", str(tokens.path / split.file), _REMAKE)


class TokenDataset:
    """Sample i is the window of seq_len + 1 tokens at i * seq_len: inputs and the targets one further."""

    def __init__(self, tokens: TokenFolder, split: str, seq_len: int) -> None:
        where = str(tokens.path / MANIFEST)
        info = tokens.split(split)
        self.seq_len = seq_len
        self.vocab_size = tokens.vocab_size
        self.num_samples = (info.num_tokens - 1) // seq_len
        if self.num_samples < 1:
            raise _bad(
                f"{split} has {info.num_tokens} tokens: not one sample of {seq_len} + 1",
                where,
                "use a shorter seq_len or more text",
            )
        self._tokens = np.memmap(tokens.path / info.file, dtype=DTYPES[tokens.dtype], mode="r")
        self._window = np.arange(seq_len + 1, dtype=np.int64)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        """As of a data set of one's own."""
        import torch

        window = torch.from_numpy(self.windows(np.array([index], dtype=np.int64))[0])
        return {"inputs": window[:-1], "targets": window[1:]}

    def windows(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """(len(indices), seq_len + 1) token ids: `[:, :-1]` are the inputs, `[:, 1:]` the targets."""
        positions = indices[:, None] * self.seq_len + self._window
        tokens: NDArray[np.int64] = self._tokens[positions].astype(np.int64)
        return tokens


_REMAKE = "make the folder anew with mlpipe-corpus --out DIR"


def _parse(folder: Path, data: dict[str, Any], digest: str, form: int = FORMAT) -> TokenFolder:
    if data["format"] != form:
        raise ValueError(f"format {data['format']!r}, this mlpipe reads {form} here")
    if data["dtype"] not in DTYPES:
        raise ValueError(f"dtype {data['dtype']!r} is not one of {', '.join(DTYPES)}")
    splits = {name: _split(fields) for name, fields in data["splits"].items()}
    files = [split.file for split in splits.values() if form == FORMAT]
    files += [shard.file for split in splits.values() for shard in split.shards]
    for name in [data["tokenizer"], *files]:
        if name is not None and Path(name).name != name:
            raise ValueError(f"{name!r} is not the name of a file in this folder")
    return TokenFolder(folder, data["dtype"], int(data["vocab_size"]), data["tokenizer"], splits, digest)


def _split(fields: dict[str, Any]) -> Split:
    if "shards" not in fields:
        return Split(**fields)
    shards = tuple(Shard(**shard) for shard in fields["shards"])
    for shard in shards:
        if not re.fullmatch("[0-9a-f]{64}", shard.sha256):  # names the copy on this machine's disk
            raise ValueError(f"{shard.sha256!r} is no SHA-256")
    return Split("", fields["num_tokens"], fields["num_bytes"], "", shards)


def _check_size(tokens: TokenFolder, name: str, split: Split) -> None:
    path = tokens.path / split.file
    expected = split.num_tokens * np.dtype(DTYPES[tokens.dtype]).itemsize
    try:
        num_bytes = path.stat().st_size
    except OSError as error:
        raise _bad(f"the file of split {name} is missing", str(path), _REMAKE) from error
    if num_bytes != expected:
        raise _bad(f"{num_bytes} bytes, the manifest says {expected}", str(path), _REMAKE)


def _bad(message: str, where: str, hint: str) -> TrainError:
    return TrainError(message, where=where, hint=hint, kind="input")
