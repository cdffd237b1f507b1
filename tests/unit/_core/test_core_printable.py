"""What a terminal is shown of text that others wrote."""

from __future__ import annotations

import pytest

from mlpipe._core.errors import MlpipeError
from mlpipe._core.printable import printable

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\tb\n\u3000é \x1b[1;31mred\x1b[0m", "a\tb\n\u3000é \x1b[1;31mred\x1b[0m"),
        ("\x1b]52;c;aGk=\a", r"\x1b]52;c;aGk=\x07"),  # fills the clipboard
        ("\x1b[2Jdone", r"\x1b[2Jdone"),
        ("\x9b2J\rdone", r"\x9b2J\rdone"),
        ("\x1b[31\x1b[31m", "\\x1b[31\x1b[31m"),
        ("user\u202etxt.exe", r"user\u202etxt.exe"),
        ("\ud800", r"\ud800"),
    ],
)
def test_a_terminal_obeys_nothing_but_colours(text: str, shown: str):
    assert printable(text) == shown


def test_the_name_of_a_file_is_one_line_of_an_error():
    told = MlpipeError("is damaged\n  at 3", where="a\nb\r\ud800", hint="look").told
    assert told == r"a\nb\r\ud800" + ": is damaged\n  at 3"
