"""What a page about a run consists of, as data: `templates/` says how each looks as HTML.

A cell is text, a number, nothing, or one of the inline pieces. Whatever text stands in one is a user's: the
templates escape it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

from mlpipe.observe.plots import Bar, Plot, share_bars

MOST_ROWS = 100  # of a table; the last ones are shown


@dataclass(frozen=True)
class Inline:
    """`form`: the name of its macro in templates/blocks.html.jinja. `rest`: plain text behind it."""

    form: ClassVar[str]
    text: str
    rest: str = ""


class Badge(Inline):
    """A state."""

    form = "badge"


class Code(Inline):
    """A command."""

    form = "code"


class Strong(Inline):
    """The word that matters."""

    form = "strong"


class Link(Inline):
    """To be clicked on; only what a browser fetches by HTTP is one, the rest stays text."""

    form = "link"


class Timestamp(Inline):
    """A time in a table, on one line however narrow."""

    form = "timestamp"


@dataclass(frozen=True)
class Shares:
    """Coloured parts side by side, in a row of 200 by 10 pixels that is stretched to its place."""

    form = "shares"
    bars: Sequence[Bar]
    width: int = 200
    height: int = 10
    rest: str = ""


Cell = str | int | float | Inline | Shares | None


def utc(seconds: float | None) -> str | None:
    """Unix seconds as `2026-11-21 12:30:05`, in UTC, with a space that does not break; None also for what no
    calendar has."""
    if seconds is None:
        return None
    with suppress(OverflowError, ValueError, OSError):
        return time.strftime("%Y-%m-%d\u00a0%H:%M:%S", time.gmtime(seconds))
    return None


def timestamp(seconds: float | None) -> Timestamp | None:
    """The same for a table."""
    text = utc(seconds)
    return None if text is None else Timestamp(text)


def shares(parts: Sequence[tuple[str, float]]) -> Shares:
    """(colour, value) side by side; the values together fill the row."""
    return Shares(share_bars(parts, width=Shares.width, height=Shares.height))


@dataclass(frozen=True)
class Piece:
    """`form`: the name of its macro."""

    form: ClassVar[str]


@dataclass(frozen=True)
class Paragraph(Piece):
    """`is_faint`: a remark."""

    form = "paragraph"
    content: Cell
    is_faint: bool = False


@dataclass(frozen=True)
class Figure(Piece):
    """Something drawn, by itself."""

    form = "figure"
    content: Shares


@dataclass(frozen=True)
class Preformatted(Piece):
    """Text whose spaces and lines count; `heading` above it."""

    form = "preformatted"
    text: str
    heading: str = ""


@dataclass(frozen=True)
class Facts(Piece):
    """Name and value, one a line; what is None or empty is left out."""

    form = "facts"
    pairs: Mapping[str, Cell]


@dataclass(frozen=True)
class Tiles(Piece):
    """Few large numbers side by side; what is None is left out."""

    form = "tiles"
    pairs: Mapping[str, Cell]


@dataclass(frozen=True)
class Table(Piece):
    """`numbers`: columns that hold numbers, aligned to the right. Of many rows the last ones are shown,
    unless the `whole` table is wanted."""

    form = "table"
    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    numbers: frozenset[int] = frozenset()
    whole: bool = False

    @property
    def shown(self) -> Sequence[Sequence[Cell]]:
        """The last MOST_ROWS of them, or all."""
        return self.rows if self.whole else self.rows[-MOST_ROWS:]


@dataclass(frozen=True)
class Card(Piece):
    """Blocks in a box; `is_trouble`: with a red edge. `heading` above them."""

    form = "card"
    blocks: Sequence[Piece]
    heading: str = ""
    is_trouble: bool = False


@dataclass(frozen=True)
class Details(Piece):
    """A box that can be opened and closed."""

    form = "details"
    summary: str
    blocks: Sequence[Piece]
    is_open: bool = True


@dataclass(frozen=True)
class Chart:
    """`legend`: (colour, name)."""

    title: str
    unit: str
    plot: Plot
    legend: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Charts(Piece):
    """Side by side, with one legend of what is marked on all of them."""

    form = "charts"
    charts: Sequence[Chart]
    legend: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Section:
    """What a page says of one stage. `facts`: the same in a line, for the short summary."""

    blocks: Sequence[Piece]
    facts: Sequence[str] = ()
