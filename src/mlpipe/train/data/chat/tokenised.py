"""What the lines of a file are as tokens, kept on the node: made once for one content, tokenizer and
template, and mapped into memory by whoever reads it.

    <cache>/chat/<digest>/manifest.json {"dtype", "vocab_size", "num_samples", "num_tokens", "num_learnt"}
                          tokens.bin    all samples, one after the other
                          learnt.bin    a byte for each token: 1, the model is to give it
                          ends.bin      int64: where each sample ends
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlpipe._core.errors import StoreError, TrainError
from mlpipe._core.files import locked
from mlpipe.plan.data import ChatPlan
from mlpipe.store.outputs import cache_folder
from mlpipe.train.data.chat.encode import Encoder, Sample
from mlpipe.train.data.chat.jsonl import BadLine, BadLines, parsed, read_lines, too_long

_FORMAT = 1
_MANIFEST = "manifest.json"
_BATCH_CHARACTERS = 1_000_000  # of text that is encoded at a time: what bounds memory
_LINE_CHARACTERS = 100  # that an empty one counts for, since it takes memory, too
_WAIT_SECONDS, _LOOK_SECONDS = 4 * 3600.0, 10.0  # for another process of the node that makes it
_CHUNK_BYTES = 2**20
_NO_LINE_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Numbers:
    """The manifest."""

    dtype: str
    vocab_size: int
    num_samples: int
    num_tokens: int
    num_learnt: int


@dataclass(frozen=True)
class Tokenised:
    """Sample `i` has the tokens from `ends[i - 1]` to `ends[i]`. `digest`: of all that it was made of."""

    digest: str
    numbers: Numbers
    tokens: NDArray[Any]
    learnt: NDArray[np.uint8]
    ends: NDArray[np.int64]

    def num_cut(self, seq_len: int) -> tuple[int, int]:
        """How many samples are longer than `seq_len` tokens; and of how many of these nothing is learnt."""
        begins = np.concatenate([np.zeros(1, np.int64), self.ends[:-1]])
        cut = begins[self.ends - begins - 1 > seq_len].tolist()
        learnt = np.asarray(self.learnt)
        return len(cut), sum(not learnt[begin + 1 : begin + seq_len + 1].any() for begin in cut)


def _nothing() -> None:
    pass


def tokenise(plan: ChatPlan, path: str, beat: Callable[[], None] = _nothing) -> Tokenised:
    """Of the lines of the file `path`. `beat` is called while it takes time. Raises TrainError (input) that
    names every bad line; StoreError."""
    source = _file(path)
    encoder = Encoder(plan)
    content = _sha256(source, beat)
    digest = hashlib.sha256(json.dumps([_FORMAT, content, encoder.identity]).encode()).hexdigest()[:32]
    base = cache_folder() / "chat"
    folder, deadline = base / digest, time.monotonic() + _WAIT_SECONDS
    base.mkdir(parents=True, exist_ok=True)
    while (made := _opened(folder, digest)) is None:
        beat()
        turn = False
        try:
            with locked(base / f".{digest}.lock", _LOOK_SECONDS, "been tokenising this"):
                turn = True
                if _opened(folder, digest) is None:
                    _make(source, content, encoder, folder, beat)
        except StoreError:
            if turn or time.monotonic() > deadline:
                raise
    return made


def tokenise_all(plan: ChatPlan, beat: Callable[[], None]) -> None:
    """The files of all splits, before they are opened."""
    for path in (*plan.paths, plan.validation):
        if path is not None:
            tokenise(plan, path, beat)


def _opened(folder: Path, digest: str) -> Tokenised | None:
    """None: it is not there; or not whole, after a disk was full or a machine lost power."""
    try:
        numbers = Numbers(**json.loads((folder / _MANIFEST).read_bytes()))
        tokens, learnt, ends = (
            np.memmap(folder / f"{name}.bin", dtype, "r") for name, dtype in _files(numbers.dtype).items()
        )
    except (OSError, ValueError, TypeError):
        return None
    sizes = len(tokens), len(learnt), len(ends), int(ends[-1])
    if sizes != (numbers.num_tokens, numbers.num_tokens, numbers.num_samples, numbers.num_tokens):
        return None
    return Tokenised(digest, numbers, tokens, learnt, ends)


def _files(dtype: str) -> dict[str, Any]:
    return {"tokens": np.dtype(dtype), "learnt": np.uint8, "ends": np.int64}


def _file(path: str) -> Path:
    source = Path(path)
    if not source.is_file():
        raise TrainError(
            "this is a folder, not a file of JSON lines" if source.is_dir() else "there is no such file",
            where=path,
            hint="write the path of a file with a JSON object on each line",
            kind="input",
        )
    return source


def _sha256(path: Path, beat: Callable[[], None]) -> str:
    """Raises TrainError (input) at a line so long that the file is something else, and reads no further."""
    summed, number, begun = hashlib.sha256(), 1, 0  # of the line that a piece begins within, its bytes so far
    with path.open("rb") as file:
        while piece := file.read(64 * _CHUNK_BYTES):  # no line within is so long
            beat()
            end = piece.find(b"\n")
            if begun + (len(piece) if end < 0 else end) > _NO_LINE_BYTES:
                bad = BadLines(path)
                bad.add(number, too_long())
                bad.refuse()
            begun = begun + len(piece) if end < 0 else len(piece) - piece.rfind(b"\n") - 1
            number += piece.count(b"\n")
            summed.update(piece)
    return summed.hexdigest()


def _make(source: Path, content: str, encoder: Encoder, folder: Path, beat: Callable[[], None]) -> None:
    """Whole or not at all; by one process of the node at a time."""
    dtype = "uint16" if encoder.vocab_size <= 2**16 else "uint32"
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    partial.mkdir()
    num_tokens = num_learnt = num_samples = 0
    bad = BadLines(source)
    try:
        with (
            (partial / "tokens.bin").open("wb") as tokens,
            (partial / "learnt.bin").open("wb") as learnt,
            (partial / "ends.bin").open("wb") as ends,
        ):
            for sample in _samples(source, encoder, bad, beat):
                num_samples += 1
                num_tokens += len(sample.ids)
                num_learnt += int(sample.learnt.sum())
                if not bad.count:
                    tokens.write(sample.ids.astype(dtype).tobytes())
                    learnt.write(sample.learnt.astype(np.uint8).tobytes())
                    ends.write(np.int64(num_tokens).tobytes())
        bad.refuse()
        if not num_samples:
            raise TrainError("there are no lines in it", where=str(source), kind="input")
        if _sha256(source, beat) != content:
            raise TrainError("it changed while it was read", where=str(source), kind="input")
        numbers = Numbers(dtype, encoder.vocab_size, num_samples, num_tokens, num_learnt)
        (partial / _MANIFEST).write_text(json.dumps(asdict(numbers), indent=2) + "\n")
        shutil.rmtree(folder, ignore_errors=True)  # not whole, of nobody
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _samples(source: Path, encoder: Encoder, bad: BadLines, beat: Callable[[], None]) -> Iterator[Sample]:
    """In the order of the file; bad lines are added to `bad`."""
    waiting: list[tuple[int, Any]] = []
    characters = 0

    def encoded() -> Iterator[Sample]:
        beat()
        for (number, _), made in zip(waiting, encoder.encode([one for _, one in waiting]), strict=True):
            if isinstance(made, BadLine):
                bad.add(number, made)
            else:
                yield made

    for number, line in read_lines(source):
        try:
            if isinstance(line, BadLine):
                raise line
            spoken = encoder.spoken(parsed(line))
        except BadLine as why:
            bad.add(number, why)
            continue
        waiting.append((number, spoken))
        characters += len(spoken.text) + _LINE_CHARACTERS
        if characters >= _BATCH_CHARACTERS:
            yield from encoded()
            waiting, characters = [], 0
    yield from encoded()
