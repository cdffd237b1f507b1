"""`mlpipe-corpus`: text files -> a tokenizer and memory-mapped token files (see `train/data/tokens.py`).

By default the source text of Python's own standard library, which every machine has. Files are ordered by
the hash of their path; the first of them are held out, the tokenizer sees only the others. The same Python,
files and options give the same bytes.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from mlpipe._core.errors import TrainError
from mlpipe._core.units import format_bytes, parse_bytes
from mlpipe.train.data.tokenizer import END_OF_TEXT, MIN_VOCAB_SIZE, train_tokenizer
from mlpipe.train.data.tokens import DTYPES, FORMAT, MANIFEST, SHARDED, Shard, Split
from mlpipe.train.script import exit_code

_NOT_SOURCE = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_TOKENIZER_BYTES = 8_000_000  # of text that the merges are learnt from
_BATCH_BYTES = 1_000_000  # of text encoded at a time: what bounds memory


@dataclass(frozen=True)
class Document:
    """Bytes `start` to `end` of a file."""

    path: Path
    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start

    def pieces(self) -> Iterator[tuple[str, bool]]:
        """The text in whole lines of about `_BATCH_BYTES`, and whether each piece is the last."""
        left = self.size
        with self.path.open("rb") as file:
            file.seek(self.start)
            while left:
                data = file.read(min(left, _BATCH_BYTES))
                data += file.readline(left - len(data)) if len(data) < left else b""
                if not data:
                    raise TrainError(
                        "it became shorter while it was read", where=str(self.path), kind="input"
                    )
                left -= len(data)
                yield data.decode("utf-8"), left == 0


def build_corpus(
    out: Path,
    *,
    source: Path | None = None,
    vocab_size: int = 4096,
    max_bytes: int | None = None,
    tokenizer_kind: str = "bpe",
    validation_fraction: float = 0.05,
    seed: int = 0,
    shard_bytes: int | None = None,
) -> dict[str, Split]:
    """Writes tokenizer.json, train.bin, validation.bin and last manifest.json into `out`.

    `source`: a folder of text files or one file; None: the standard library. `max_bytes`: of text to use.
    `shard_bytes`: cuts the two into files of at most so many, train-00000.bin and so on, for a bucket.
    Raises TrainError, of kind input when the source or the numbers are unfit.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise _bad(f"vocab_size {vocab_size} cannot hold the 256 bytes", f"use at least {MIN_VOCAB_SIZE}")
    if not 0 < validation_fraction < 1:
        raise _bad(f"validation_fraction {validation_fraction} is not between 0 and 1", "use 0.05")
    train, validation = _split(_find(source, max_bytes, seed, out.resolve()), validation_fraction)
    _say(f"{len(train) + len(validation)} documents, {format_bytes(_size(train) + _size(validation))}")
    out.mkdir(parents=True, exist_ok=True)
    with _alone(out):
        size = vocab_size if tokenizer_kind == "bpe" else MIN_VOCAB_SIZE
        return _write(out, train, validation, size, shard_bytes)


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """One process at a time writes into the folder: of two the one's tokens would stand beside the other's
    tokenizer. Raises TrainError (input)."""
    folder = os.open(out, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(folder)
        raise TrainError(
            "another mlpipe-corpus is writing into this folder",
            where=str(out),
            hint="wait for it, or give another --out",
            kind="input",
        ) from None
    except OSError:
        pass  # a file system whose folders cannot be locked, as some of the network
    try:
        yield
    finally:
        os.close(folder)


def _write(
    out: Path, train: list[Document], validation: list[Document], vocab_size: int, shard_bytes: int | None
) -> dict[str, Split]:
    (out / MANIFEST).unlink(missing_ok=True)  # whoever reads a half-written folder finds no manifest
    tokenizer = train_tokenizer(_head(train, _TOKENIZER_BYTES), vocab_size)
    tokenizer.save(str(out / "tokenizer.json"))
    _say(f"tokenizer of {tokenizer.get_vocab_size()} tokens")
    tokenizer.encode_special_tokens = True  # a document that spells END_OF_TEXT does not end there
    dtype = "uint16" if tokenizer.get_vocab_size() <= 2**16 else "uint32"
    splits = {
        name: _encode(tokenizer, documents, out / f"{name}.bin", dtype)
        for name, documents in (("train", train), ("validation", validation))
    }
    if shard_bytes is not None:
        splits = {name: _cut(out, name, split, dtype, shard_bytes) for name, split in splits.items()}
    manifest = {
        "format": FORMAT if shard_bytes is None else SHARDED,
        "dtype": dtype,
        "vocab_size": tokenizer.get_vocab_size(),
        "tokenizer": "tokenizer.json",
        "splits": {name: _described(split) for name, split in splits.items()},
    }
    temporary = out / f"{MANIFEST}.tmp"
    temporary.write_text(json.dumps(manifest, indent=2) + "\n")
    temporary.replace(out / MANIFEST)
    return splits


def _cut(out: Path, name: str, split: Split, dtype: str, shard_bytes: int) -> Split:
    width = np.dtype(DTYPES[dtype]).itemsize
    size, shards = max(1, shard_bytes // width) * width, list[Shard]()
    with (out / split.file).open("rb") as file:
        while data := file.read(size):
            shard = f"{name}-{len(shards):05d}.bin"
            (out / shard).unlink(missing_ok=True)
            (out / shard).write_bytes(data)
            shards.append(Shard(shard, len(data) // width, hashlib.sha256(data).hexdigest()))
    (out / split.file).unlink()
    return replace(split, file="", sha256="", shards=tuple(shards))


def _described(split: Split) -> dict[str, Any]:
    """As the manifest has it."""
    described = asdict(split)
    for name in ("file", "sha256") if split.shards else ("shards",):
        del described[name]
    return described


def _find(source: Path | None, max_bytes: int | None, seed: int, out: Path) -> list[Document]:
    """Readable text files, but for those in `out`, in the order of their paths' hashes, up to `max_bytes`."""
    root = source or Path(sysconfig.get_path("stdlib"))
    if not root.exists():
        raise TrainError("there is nothing here", where=str(root), hint="give --source DIR", kind="input")
    paths = [root] if root.is_file() else list(_walk(root, out, python_only=source is None))
    names = {path: path.relative_to(root.parent if root.is_file() else root).as_posix() for path in paths}
    paths.sort(key=lambda path: hashlib.sha256(f"{seed}:{names[path]}".encode()).digest())
    documents, total, skipped = [], 0, 0
    for path in paths:
        data = path.read_bytes()
        if not _is_text(data):
            skipped += 1
            continue
        size = len(data) if max_bytes is None else _line_end(data, max_bytes - total)
        if size:
            documents.append(Document(path, 0, size))
            total += size
        if total == max_bytes or size < len(data):
            break
    if skipped:
        _say(f"skipped {skipped} files that are not UTF-8 text")
    if not documents:
        raise TrainError("no text files here", where=str(root), hint="give --source DIR", kind="input")
    return documents


def _walk(root: Path, out: Path, *, python_only: bool) -> Iterator[Path]:
    skip = _NOT_SOURCE if python_only else set()
    for folder, subfolders, files in os.walk(root):
        if Path(folder).resolve() == out:
            subfolders.clear()
            continue
        subfolders[:] = [name for name in subfolders if name not in skip and not name.startswith(".")]
        for name in files:
            path = Path(folder, name)
            if not name.startswith(".") and (name.endswith(".py") or not python_only) and path.is_file():
                yield path


def _is_text(data: bytes) -> bool:
    if not data or b"\0" in data:
        return False
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _line_end(data: bytes, limit: int) -> int:
    """Length of the longest run of whole lines of `data` that is at most `limit` bytes."""
    return len(data) if len(data) <= limit else data.rfind(b"\n", 0, max(0, limit)) + 1


def _split(documents: list[Document], fraction: float) -> tuple[list[Document], list[Document]]:
    """(train, validation): whole documents; a single one is cut at the end of a line."""
    if len(documents) == 1:
        (whole,) = documents
        data = whole.path.read_bytes()[: whole.end]
        cut = _line_end(data, int(whole.size * (1 - fraction)))
        if cut in (0, whole.end):
            raise TrainError("one line cannot be split into train and validation", where=str(whole.path),
                             hint="give more text, in lines", kind="input")  # fmt: skip
        return [Document(whole.path, 0, cut)], [Document(whole.path, cut, whole.end)]
    wanted, total, num_held_out = fraction * _size(documents), 0, 0
    while num_held_out < len(documents) - 1 and total < wanted:
        total += documents[num_held_out].size
        num_held_out += 1
    return documents[num_held_out:], documents[:num_held_out]


def _size(documents: list[Document]) -> int:
    return sum(document.size for document in documents)


def _head(documents: list[Document], max_bytes: int) -> Iterator[str]:
    total = 0
    for document in documents:
        for text, _ in document.pieces():
            if total >= max_bytes:
                return
            yield text
            total += len(text)


def _encode(tokenizer: Tokenizer, documents: list[Document], target: Path, dtype: str) -> Split:
    end = tokenizer.token_to_id(END_OF_TEXT)
    digest, num_tokens = hashlib.sha256(), 0
    target.unlink(missing_ok=True)  # a training that has mapped the former file goes on with that
    with target.open("xb") as file:
        for batch in _batches(documents):
            encodings = tokenizer.encode_batch_fast([text for text, _ in batch], add_special_tokens=False)
            for encoding, (_, is_last) in zip(encodings, batch, strict=True):
                ids = encoding.ids
                data = np.array([*ids, end] if is_last else ids, dtype=DTYPES[dtype]).tobytes()
                file.write(data)
                digest.update(data)
                num_tokens += len(ids) + is_last
    _say(f"{target.name}: {num_tokens:,} tokens of {format_bytes(_size(documents))}")
    return Split(target.name, num_tokens, _size(documents), digest.hexdigest())


def _batches(documents: list[Document]) -> Iterator[list[tuple[str, bool]]]:
    batch: list[tuple[str, bool]] = []
    size = 0
    for piece in (piece for document in documents for piece in document.pieces()):
        batch.append(piece)
        size += len(piece[0])
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _bad(message: str, hint: str) -> TrainError:
    return TrainError(message, hint=hint, kind="input")


def _say(line: str) -> None:
    sys.stderr.write(f"corpus: {line}\n")
    sys.stderr.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlpipe-corpus",
        description="Text files to a tokenizer and token files that mlpipe trains on.",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument(
        "--source", type=Path, help="folder of text files, or one (default: Python's library)"
    )
    parser.add_argument("--tokenizer", choices=("bpe", "bytes"), default="bpe")
    parser.add_argument("--vocab-size", type=int, default=4096, help="of the bpe tokenizer (default: 4096)")
    parser.add_argument("--max-bytes", metavar="SIZE", help="of text to use, like '4 MB' (default: all)")
    parser.add_argument("--validation-fraction", type=float, default=0.05, help="of the text (default: 0.05)")
    parser.add_argument(
        "--shard", metavar="SIZE", help="of the files for a bucket, like '64 MB' (default: one)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the order of the files (default: 0)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """As `script.exit_code`."""
    args = _parser().parse_args(argv)
    started = time.monotonic()

    def work() -> None:
        build_corpus(
            args.out,
            source=args.source,
            vocab_size=args.vocab_size,
            max_bytes=_bytes("--max-bytes", args.max_bytes),
            shard_bytes=_bytes("--shard", args.shard),
            tokenizer_kind=args.tokenizer,
            validation_fraction=args.validation_fraction,
            seed=args.seed,
        )
        _say(f"{args.out} written in {time.monotonic() - started:.0f} s")

    return exit_code("mlpipe-corpus", work, args.out)


def _bytes(option: str, text: str | None) -> int | None:
    try:
        return None if text is None else parse_bytes(text)
    except ValueError as error:
        raise _bad(f"{option}: {error}", f"write like {option} '4 MB'") from None


if __name__ == "__main__":
    sys.exit(main())
