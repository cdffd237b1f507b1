"""What is wrong in a pipeline file: every mistake with its place, all of them in one error."""

from collections.abc import Sequence
from typing import NamedTuple

from mlpipe._core.errors import SpecError

SHOWN = 50
_LONGEST = 1000  # characters of a message
_LONGEST_PLACE = 300


def shortened(text: str, longest: int) -> str:
    """Without its middle, where it has more than `longest` characters."""
    return text if len(text) <= longest else f"{text[: longest // 2]} ... {text[-longest // 2 :]}"


class Place(NamedTuple):
    """`line` and `col` count from 1; line 0: the whole of `file`, or a `--set KEY=VALUE`."""

    file: str
    line: int = 0
    col: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.col}" if self.line else shortened(self.file, _LONGEST_PLACE)


class Problem(NamedTuple):
    """`message`: what is wrong and why. `hint`: what to write instead."""

    file: str
    line: int
    col: int
    message: str
    hint: str | None = None

    @staticmethod
    def at(place: Place, message: str, hint: str | None = None) -> "Problem":
        return Problem(place.file, place.line, place.col, message, hint)

    @property
    def place(self) -> Place:
        return Place(self.file, self.line, self.col)

    def __str__(self) -> str:
        text = f"{self.place}: {shortened(self.message, _LONGEST)}"  # it quotes what was written
        text = f"{text}; {self.hint}" if self.hint else text
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class SpecErrors(SpecError):
    """All mistakes of one file. `str()` is one line a problem, in the order of the file; `message` and `hint`
    are of the first."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = sorted(problems, key=lambda p: (p.line == 0, p.file, p.line, p.col))
        first, num_more = self.problems[0], len(self.problems) - 1
        more = f"; and {num_more} more problem{'s' * (num_more > 1)}" if num_more else ""
        message = f"{shortened(first.message, _LONGEST)}{more}"
        super().__init__(message, where=str(first.place), hint=first.hint)

    def __str__(self) -> str:
        lines = [str(problem) for problem in self.problems[:SHOWN]]
        if len(self.problems) > SHOWN:
            lines.append(f"{self.problems[0].file}: and {len(self.problems) - SHOWN} more problems")
        return "\n".join(lines)


def closest(word: str, known: Sequence[str]) -> str:
    """`; did you mean ...` in words, or what is known."""
    import difflib  # of mistakes only

    near = difflib.get_close_matches(word.lower()[:64], known, n=1, cutoff=0.6)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"write one of {', '.join(known)}" if known else "there is none to name"
