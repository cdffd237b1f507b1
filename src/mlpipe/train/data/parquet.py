"""Parquet files as they are: a map-style set of their rows, of which a row group is read at a time.

From a bucket only what is needed is fetched: of each file its footer, and the bytes of a row group's columns
when it is its turn, into the node's cache (shard_cache.py).
"""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mlpipe._core.errors import MlpipeError, TrainError
from mlpipe.plan.data import FilesPlan
from mlpipe.train.data.fields import Fields
from mlpipe.train.data.files import DataFile, RangeFile, cache_of, find_files, is_remote
from mlpipe.train.data.shard_cache import CachedFile, check_room
from mlpipe.train.data.windows import WINDOW, Windowed

_AT_ONCE = 16


@dataclass(frozen=True)
class _RowGroup:
    """`part`: its bytes in a bucket; None: the file is at hand."""

    file: int
    number: int
    num_rows: int
    part: CachedFile | None


class ParquetRows(Windowed):
    """One sample a row. Order and numbering are by row groups (windows.py), of which each process holds at
    most eight. `path`: of these files; the rest as the plan has it."""

    def __init__(self, plan: FilesPlan, path: str, fields: Fields, limit_bytes: int) -> None:
        self._pq = _pyarrow()
        self.fields = fields
        self.vocab_size = fields.vocab_size
        self.url, self.files = find_files(path, ".parquet")
        self.is_remote = is_remote(path)
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            self._metadata = list(threads.map(self._read_metadata, self.files))
        names = [*dict.fromkeys(plan.columns.values())] or self._names(0)
        for number in range(len(self.files)):
            self._check_columns(number, names)
        self.names = names
        self.groups = [group for number in range(len(self.files)) for group in self._groups_of(number)]
        super().__init__([group.num_rows for group in self.groups])
        if not self.num_samples:
            raise TrainError("there are no rows in these files", where=path, kind="input")
        parts = [group.part for group in self.groups if group.part is not None]
        smaller = "smaller row groups"
        check_room(parts, WINDOW, limit_bytes if self.is_remote else 1, where=path, smaller=smaller)
        self.cache = cache_of(self.url, limit_bytes)
        self._tables: OrderedDict[int, Any] = OrderedDict()

    def __getitem__(self, index: int) -> dict[str, Any]:
        piece, row = self.place_of(index)
        group = self.groups[piece]
        try:
            table = self._table(piece)
            return self.fields.sample({name: table[name][row].as_py() for name in self.names})
        except MlpipeError:
            raise
        except Exception as error:
            raise TrainError(
                f"row {row} of row group {group.number}: {str(error) or type(error).__name__}",
                where=self.where(index),
                kind="infrastructure" if getattr(error, "errno", None) else "input",  # pyarrow's have none
            ) from error

    def where(self, index: int) -> str:
        """The file of a sample."""
        return self._where(self.files[self.groups[self.place_of(index)[0]].file])

    def _where(self, file: DataFile) -> str:
        return f"{self.url.rstrip('/')}/{file.name}"

    def expect(self, pieces: list[int]) -> None:
        """Fetches them meanwhile."""
        parts = [part for piece in pieces if (part := self.groups[piece].part) is not None]
        if parts:
            self.cache.expect(parts)

    def _table(self, piece: int) -> Any:
        if piece in self._tables:
            self._tables.move_to_end(piece)
        else:
            while len(self._tables) >= WINDOW:
                self._tables.popitem(last=False)
            self._tables[piece] = self._read(self.groups[piece])
        return self._tables[piece]

    def _read(self, group: _RowGroup) -> Any:
        file, metadata = self.files[group.file], self._metadata[group.file]
        source: Any = file.path
        if group.part is not None:
            source = self._fetched(file, group.part)
        with self._pq.ParquetFile(source, metadata=metadata, memory_map=file.path is not None) as parquet:
            # by this thread: threads of a pool do not outlive the fork of a data worker
            table = parquet.read_row_group(group.number, columns=self.names, use_threads=False)
        return table.combine_chunks()

    def _fetched(self, file: DataFile, part: CachedFile) -> RangeFile:
        with suppress(FileNotFoundError):
            return self.cache.opened(part, lambda path: RangeFile(self.url, file, path, part.start))
        return RangeFile(self.url, file)

    def _read_metadata(self, file: DataFile) -> Any:
        try:
            return self._pq.read_metadata(file.path or RangeFile(self.url, file))
        except MlpipeError:
            raise
        except Exception as error:  # pyarrow's are many
            words = f"this is no Parquet file: {error}"
            raise TrainError(words, where=self._where(file), kind="input") from error

    def _names(self, number: int) -> list[str]:
        return list(self._metadata[number].schema.to_arrow_schema().names)

    def _check_columns(self, number: int, names: list[str]) -> None:
        there = self._names(number)
        odd = next((name for name in names if name not in there), None)
        if odd is not None:
            raise TrainError(
                f"there is no column {odd!r}",
                where=self._where(self.files[number]),
                hint=f"it has {', '.join(there) or 'none'}; data.columns is {{KEY: COLUMN}}",
                kind="input",
            )

    def _groups_of(self, number: int) -> list[_RowGroup]:
        file, metadata = self.files[number], self._metadata[number]
        groups = []
        for i in range(metadata.num_row_groups):
            group = metadata.row_group(i)
            part = file.part(*_span(group, set(self.names))) if self.is_remote else None
            groups.append(_RowGroup(number, i, group.num_rows, part))
        return groups


def _span(group: Any, names: set[str]) -> tuple[int, int]:
    """The first byte of the columns of these names, and how many there are up to the last one's end."""
    begins, ends = [], []
    for i in range(group.num_columns):
        column = group.column(i)
        if any(f"{column.path_in_schema}.".startswith(f"{name}.") for name in names):
            begin = column.data_page_offset
            if column.has_dictionary_page and column.dictionary_page_offset:
                begin = min(begin, column.dictionary_page_offset)
            begins.append(begin)
            ends.append(begin + column.total_compressed_size)
    return min(begins), max(ends) - min(begins)


def _pyarrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise TrainError(
            "Parquet files are read by pyarrow, which is not installed here",
            where="data.parquet",
            hint="pip install 'mlpipe[parquet]'",
            kind="input",
        ) from error
    return pyarrow.parquet
