"""Lines of JSON from a file that may hold anything: a line at a time, in bounded memory, and every line that
is none of ours is told by its number."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from mlpipe._core.errors import TrainError

MAX_LINE_BYTES = 16 * 2**20  # as Python objects it may be twenty times as much
_MAX_TOLD = 20  # of bad lines, with their reasons
_MAX_NUMBERS = 1000  # of more bad lines
_MAX_REASON = 500  # characters, since a line says what stands in it
_PIECE_BYTES = 2**20


class BadLine(ValueError):
    """Why a line gives no sample, in words."""


def read_lines(path: Path) -> Iterator[tuple[int, bytes | BadLine]]:
    """The lines with their numbers, from 1; blank ones are left out. One that is too long is a BadLine, and
    never in memory."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
                while (rest := file.readline(_PIECE_BYTES)) and not rest.endswith(b"\n"):
                    pass
                yield number, too_long()
            elif not line.isspace():
                yield number, line


def too_long() -> BadLine:
    """Of a line of more than MAX_LINE_BYTES."""
    return BadLine(f"the line is longer than {MAX_LINE_BYTES // 2**20} MiB")


def parsed(line: bytes) -> dict[str, Any]:
    """Raises BadLine."""
    try:
        value = json.loads(line.decode("utf-8"), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise BadLine(f"byte {error.start + 1} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise BadLine(f"no JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise BadLine("JSON that is nested too deep") from None
    except BadLine:
        raise
    except ValueError as error:  # a number of thousands of digits
        raise BadLine(f"no JSON that can be read: {error}") from None
    if not isinstance(value, dict):
        raise BadLine(f"expected an object with 'messages', got {kind_of(value)}")
    return value


def _no_constant(name: str) -> NoReturn:
    raise BadLine(f"{name} is no JSON")


def kind_of(value: Any) -> str:
    """In JSON's words."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    names = {dict: "an object", list: "a list", str: "text", int: "a number", float: "a number"}
    return names.get(type(value), type(value).__name__)


def printable(text: str) -> str:
    """What a line says, without signs that a terminal obeys."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


class BadLines:
    """Those of a file, of which the first are kept with their reasons."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.count = 0
        self._told: list[str] = []
        self._numbers: list[int] = []

    def add(self, number: int, why: BadLine) -> None:
        """Of line `number`."""
        self.count += 1
        if len(self._told) < _MAX_TOLD:
            reason = str(why)
            if len(reason) > _MAX_REASON:
                reason = reason[:_MAX_REASON] + "..."
            self._told.append(f"{self.path}:{number}: {printable(reason)}")
        elif len(self._numbers) < _MAX_NUMBERS:
            self._numbers.append(number)

    def refuse(self) -> None:
        """Raises TrainError (input) that names them all, if there are any."""
        if not self.count:
            return
        lines = list(self._told)
        if self._numbers:
            left = self.count - len(self._told) - len(self._numbers)
            more = f" and {left} others" if left else ""
            lines.append(f"and lines {', '.join(map(str, self._numbers))}{more}")
        noun = "line gives" if self.count == 1 else "lines give"
        raise TrainError(
            "\n".join([f"{self.count} {noun} no sample", *lines]),
            where=str(self.path),
            hint="mend or remove them; `mlpipe data preview` reads the file without a training",
            kind="input",
        )
