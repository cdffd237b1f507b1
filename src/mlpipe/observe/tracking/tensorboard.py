"""TensorBoard's event files, without its package.

A file is a row of records, each `length, crc(length), event, crc(event)` with masked CRC32C sums
(tensorflow/core/lib/io/record_writer.h); an event is a message of protocol buffers
(tensorflow/core/util/event.proto, framework/summary.proto), of which only the few fields below are written. A
restart goes on in a file of its own, whose first event says from which step on what other files have counts
no more (SessionLog.START).
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator, Sequence

from mlpipe._core.errors import StoreError
from mlpipe._core.records import Record, Save, Start
from mlpipe._core.retry import AwayError
from mlpipe.observe.tracking.tracker import TrackedRun, scalars
from mlpipe.store.base import LogWriter, Store
from mlpipe.store.checksum import crc32c

FOLDER = "tensorboard"
_UPLOAD_SECONDS = 15.0
_FULL_BYTES = 2 * 2**20  # of a file on S3, which every upload replaces as a whole
_STRING = 7  # DT_STRING of tensorflow/core/framework/types.proto


class TensorBoard:
    """Of one process of rank 0: files in the stage's folder of the store."""

    name = "tensorboard"

    def __init__(self, store: Store, run: TrackedRun) -> None:
        self._store = store
        self._run = run
        self._folder = f"{run.stage_key}/{FOLDER}"
        self.where = f"{store.url}/{self._folder}"
        self.url: str | None = None
        self._prefix = ""
        self._number = 0
        self._log: LogWriter | None = None  # where the store is a folder
        self._file = bytearray()  # elsewhere: the whole of the open file
        self._pending = b""
        self._told: Sequence[Record] = ()
        self._uploaded = 0.0

    def begin(self, start: Start) -> int:
        """A new file, behind those that there are."""
        try:
            keys = sorted(info.key for info in self._store.list(self._folder, recursive=False))
            known = next((step for key in reversed(keys) if (step := last_step(self._store.get(key)))), 0)
        except StoreError as error:
            raise AwayError(error.message, applied=False) from None
        at = start.start_step or 0
        # by attempt and restart, not by time: clocks differ from machine to machine, and TensorBoard sorts
        self._prefix = f"{self._folder}/events.out.tfevents.{self._run.attempt:06d}.{start.restart:09d}"
        self._number = sum(key.startswith(self._prefix) for key in keys)
        head = [event(start.time, version=True)]
        if keys:
            head.append(event(start.time, step=at + 1, restarts=True))
        texts = {"config": self._run.config, "plan": self._run.plan}
        head.append(event(start.time, texts={name: _code(text) for name, text in texts.items()}))
        self._pending = b"".join(map(framed, head))
        self._write()
        return min(known, at)

    def log(self, records: Sequence[Record]) -> None:
        """An event a record."""
        if records is not self._told:  # else they are pending since the call that failed
            self._pending += b"".join(framed(one) for record in records if (one := _event_of(record)))
            self._told = records
        self._write()

    def end(self, outcome: str) -> None:
        """All is stored."""
        self._uploaded = 0.0
        self._write()

    def _write(self) -> None:
        key = f"{self._prefix}.{self._number:05d}"
        try:
            if self._store.local_path(self._folder) is not None:
                self._log = self._log or self._store.open_log(key)
                self._log.write(self._pending)
                self._pending = b""
                return
            self._file += self._pending
            self._pending = b""
            if time.monotonic() - self._uploaded < _UPLOAD_SECONDS and len(self._file) < _FULL_BYTES:
                return
            self._store.put(key, bytes(self._file))
            self._uploaded = time.monotonic()
            if len(self._file) >= _FULL_BYTES:
                self._number += 1
                self._file = bytearray(framed(event(time.time(), version=True)))
        except StoreError as error:
            self._number += self._log is not None  # the last event of the file may be half one
            self._log = None
            raise AwayError(error.message, applied=True) from None


def _event_of(record: Record) -> bytes | None:
    values = scalars(record)
    texts = {}
    if isinstance(record, Save) and record.error is None and record.key:
        texts["checkpoint"] = f"`{record.key}`"
    if sample := getattr(record, "sample", None):
        texts["sample"] = _code(sample)
    if not values and not texts:
        return None
    return event(record.time, step=getattr(record, "step", None) or 0, values=values, texts=texts)


def _code(text: str) -> str:
    """As Markdown, which the plugin for text shows."""
    return "".join(f"    {line}\n" for line in text.splitlines())


def event(
    at: float,
    *,
    step: int = 0,
    version: bool = False,
    restarts: bool = False,
    values: dict[str, float] | None = None,
    texts: dict[str, str] | None = None,
) -> bytes:
    """An Event. `at`: Unix seconds. `version`: the first of a file; `restarts`: what other files have of
    `step` and later counts no more."""
    message = _tag(1, 1) + struct.pack("<d", at) + _tag(2, 0) + _varint(step)
    if version:
        message += _bytes(3, b"brain.Event:2")
    if restarts:
        message += _bytes(7, _tag(1, 0) + _varint(1))
    summary = b"".join(
        _bytes(1, _bytes(1, name.encode()) + _tag(2, 5) + struct.pack("<f", value))
        for name, value in (values or {}).items()
    )
    summary += b"".join(_bytes(1, _text(name, text)) for name, text in (texts or {}).items())
    return message + (_bytes(5, summary) if summary else b"")


def _text(name: str, text: str) -> bytes:
    """A Summary.Value for the plugin `text`: a tensor of one string."""
    shape = _bytes(2, _bytes(2, _tag(1, 0) + _varint(1)))
    tensor = _tag(1, 0) + _varint(_STRING) + shape + _bytes(8, text.encode())
    metadata = _bytes(1, _bytes(1, b"text"))
    return _bytes(1, f"{name}/text_summary".encode()) + _bytes(9, metadata) + _bytes(8, tensor)


def _tag(field: int, wire: int) -> bytes:
    return _varint(field << 3 | wire)


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def _bytes(field: int, data: bytes) -> bytes:
    return _tag(field, 2) + _varint(len(data)) + data


def framed(data: bytes) -> bytes:
    """A record of the file."""
    length = struct.pack("<Q", len(data))
    return length + _masked(length) + data + _masked(data)


def _masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _records(data: bytes) -> Iterator[bytes]:
    """Up to one that is not whole: of a process that was killed while it wrote."""
    at = 0
    while at + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        if at + 16 + length > len(data):
            return
        yield data[at + 12 : at + 12 + length]
        at += 16 + length


def last_step(data: bytes) -> int:
    """The last step of an event file of ours; 0: of none."""
    last = 0
    for message in _records(data):
        step, shift, at = 0, 0, 10  # behind the wall time and the tag of the step
        while at < len(message):
            byte = message[at]
            step |= (byte & 0x7F) << shift
            shift, at = shift + 7, at + 1
            if byte < 0x80:
                break
        if message[at : at + 1] == b"\x2a":  # of events with a summary: field 5
            last = max(last, step)
    return last
