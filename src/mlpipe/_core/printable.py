"""Text that others wrote, such as a stage's last lines, for a terminal, which obeys some signs in it."""

from __future__ import annotations

import re

_COLOUR = r"\x1b\[[0-9;]*m"
_OBEYED = (
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"  # controls, and what turns the reading order
)
_UNENCODABLE = r"[\ud800-\udfff]"  # half of a pair, as "\ud800" in JSON is
_SIGNS = re.compile(f"({_COLOUR})|{_OBEYED}|{_UNENCODABLE}")


def printable(text: str) -> str:
    """`text` with its colours, tabs and ends of lines; all else that a terminal obeys (it moves the cursor,
    sets titles, fills the clipboard) or no encoding has is spelled out, as in Python: `\\x1b`."""
    return _SIGNS.sub(lambda found: found[1] or repr(found[0])[1:-1], text)


def as_argument(path: str) -> str:
    """Of a file or folder, as whoever pastes a command needs it: quoted for a shell, and no option."""
    from shlex import quote  # of few verbs

    return quote(f"./{path}" if path.startswith("-") else path)


def in_one_line(name: str) -> str:
    """Of a file or folder, which may have ends of lines in it."""
    return printable(name).replace("\n", "\\n")
