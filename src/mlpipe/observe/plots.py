"""Small charts over steps as data: lines and stacked bars. `templates/plot.svg.jinja` draws them.

Every colour stands in the drawing too, not only in the page's style sheet (which adds the dark variant):
Jenkins serves pages with style sheets switched off.

Values are given in the unit that the axis shows. A value that is None or not finite leaves a gap. Many
points are put into as many bins as there is room for: the line is their mean, the band behind it their
minimum and maximum. Hovering a column shows its numbers (`<title>`; no script).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from mlpipe.observe.axes import HUGE, Bin, LinearScale, Point, domain, into_bins, label, ticks

WIDTH, HEIGHT = 560, 220
LEFT, RIGHT, TOP, BOTTOM = 46, 538, 12, 188  # of the area that holds the values
_MOST_BINS = 280
_MOST_COLUMNS = 100  # that can be hovered

# name: (on light, on dark). The first five also read apart for the colour-blind.
COLOURS = {
    "blue": ("#2f6fde", "#6ea0ff"), "amber": ("#d98a00", "#f0b04a"), "teal": ("#0f9d8a", "#35c9b3"),
    "violet": ("#7a52d6", "#a98bf5"), "grey": ("#a3abb6", "#68717d"), "pink": ("#c2498f", "#f08bc4"),
    "brown": ("#8a5a35", "#c99b74"), "green": ("#4f8f2f", "#8fca6b"), "red": ("#d1383d", "#ff6b6e"),
    "line": ("#e3e6ea", "#2d333b"), "faint": ("#6b7480", "#98a2ae"),
}  # fmt: skip


@dataclass(frozen=True)
class Series:
    """`colour` is a key of COLOURS. `points` ascend in x."""

    name: str
    colour: str
    points: Sequence[Point]


@dataclass(frozen=True)
class Mark:
    """Something that happened at a step, shown on every chart of the stage."""

    x: float
    kind: Literal["checkpoint", "restart", "bad"]
    text: str


# Below, positions and sizes are in pixels of the drawing, from its upper left corner.


@dataclass(frozen=True)
class Curve:
    """`d` as SVG has it."""

    colour: str
    d: str


@dataclass(frozen=True)
class Dot:
    """A point without neighbours, or one of a column that is hovered."""

    colour: str
    x: float
    y: float


@dataclass(frozen=True)
class Bar:
    """A part of a stack."""

    colour: str
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class Column:
    """What is shown when the pointer is over it; `text` has a line a series."""

    left: float
    width: float
    text: str
    dots: Sequence[Dot] = ()
    bars: Sequence[Bar] = ()


@dataclass(frozen=True)
class Plot:
    """A whole drawing. `x_ticks`, `y_ticks`: (position, label). `marks`: with their x in pixels."""

    unit: str
    x_ticks: Sequence[tuple[float, str]]
    y_ticks: Sequence[tuple[float, str]]
    marks: Sequence[Mark]
    columns: Sequence[Column]
    bands: list[Curve] = field(default_factory=list)
    lines: list[Curve] = field(default_factory=list)
    dots: list[Dot] = field(default_factory=list)


def line_plot(series: Sequence[Series], marks: Sequence[Mark], *, unit: str, zero: bool = False) -> Plot:
    """Lines over steps. `unit` stands in the hover text; `zero`: the axis begins there."""
    binned = [(one, into_bins(one.points, _MOST_BINS)) for one in series]
    known = [b for _, bins in binned for b in bins if b.mean is not None]
    x = _x_scale([step for _, bins in binned for b in bins for step in (b.first, b.last)])
    low, high = domain([y for b in known for y in (b.low, b.high)], zero=zero)
    y = LinearScale(low, high, BOTTOM, TOP)
    plot = Plot(unit, _x_ticks(x), _y_ticks(y), list(_apart(marks, x)), _hover_columns(series, x, y, unit))
    for one, bins in binned:
        if len(series) == 1 and len(one.points) > len(bins):
            plot.bands.append(_band(bins, x, y, one.colour))
        _add_lines(plot, bins, x, y, one.colour)
    return plot


def stacked_plot(series: Sequence[Series], marks: Sequence[Mark], *, unit: str) -> Plot:
    """One bar a step (or a bin of steps), stacked in the order of `series`, which share their x."""
    columns = [into_bins(one.points, _MOST_COLUMNS) for one in series]
    rows = list(zip(*columns, strict=True)) if columns else []
    totals = [sum(max(b.mean or 0.0, 0.0) for b in row) for row in rows]
    x = _x_scale([step for row in rows for b in row[:1] for step in (b.first, b.last)])
    y = LinearScale(*domain(totals, zero=True), BOTTOM, TOP)
    edges = _edges([row[0] for row in rows], x)
    thick = min([24.0, *(0.85 * (right - left) for left, right in edges)])
    stacks = []
    for row, total, (left, right) in zip(rows, totals, edges, strict=True):
        base, bars, lines = 0.0, [], [_steps_text(row[0])]
        for one, part in zip(series, row, strict=True):
            value = max(part.mean or 0.0, 0.0)
            share = f" ({100 * value / total:.0f} %)" if total > 0 else ""
            lines.append(f"{one.name}: {_number(value)} {unit}{share}")
            if value > 0:
                top = y(base + value)
                at = _px(x(row[0].middle) - thick / 2)
                bars.append(Bar(one.colour, at, _px(top), _px(thick), _px(y(base) - top)))
            base += value
        stacks.append(Column(_px(left), _px(right - left), "\n".join(lines), bars=bars))
    return Plot(unit, _x_ticks(x), _y_ticks(y), list(_apart(marks, x)), stacks)


def share_bars(parts: Sequence[tuple[str, float]], *, width: float, height: float) -> list[Bar]:
    """(colour, value) side by side in one thin row; the values together fill it."""
    total, at, bars = sum(value for _, value in parts), 0.0, []
    for colour, value in parts:
        wide = width * value / total if total > 0 else 0.0
        bars.append(Bar(colour, _px(at), 0.0, _px(wide), height))
        at += wide
    return bars


def _px(value: float) -> float:
    return round(value, 1)


def _x_scale(steps: Sequence[float]) -> LinearScale:
    low, high = (min(steps), max(steps)) if steps else (0.0, 1.0)
    if low == 1 and high > 10:
        low = 0.0  # a round beginning for the ticks
    least = max(1.0, abs(high) * 1e-9)  # that can be told apart, whoever wrote the records
    room = least / 2 if high - low < least else 0.0
    return LinearScale(low - room, high + room, LEFT + 6, RIGHT - 6)


def _y_ticks(y: LinearScale) -> list[tuple[float, str]]:
    values = ticks(y.low, y.high)
    step = values[1] - values[0] if len(values) > 1 else abs(values[0])
    return [(_px(y(value)), label(value, step)) for value in values]


def _x_ticks(x: LinearScale) -> list[tuple[float, str]]:
    """At whole steps."""
    steps = sorted({round(tick) for tick in ticks(x.low, x.high, 7) if x.low <= round(tick) <= x.high})
    return [(_px(x(step)), label(step, 1)) for step in steps]


def _add_lines(plot: Plot, bins: Sequence[Bin], x: LinearScale, y: LinearScale, colour: str) -> None:
    """One path for each run of finite bins; a lone one is a dot."""
    run: list[tuple[float, float]] = []
    for one in (*bins, None):
        if one is not None and one.mean is not None:
            run.append((x(one.middle), y(one.mean)))
            continue
        if len(run) == 1:
            plot.dots.append(Dot(colour, _px(run[0][0]), _px(run[0][1])))
        elif run:
            plot.lines.append(Curve(colour, f"M{_path(run)}"))
        run = []


def _band(bins: Sequence[Bin], x: LinearScale, y: LinearScale, colour: str) -> Curve:
    known = [one for one in bins if one.mean is not None]
    upper = [(x(one.middle), y(one.high)) for one in known]
    lower = [(x(one.middle), y(one.low)) for one in reversed(known)]
    return Curve(colour, f"M{_path(upper + lower)}Z" if known else "")


def _path(points: Iterable[tuple[float, float]]) -> str:
    return "L".join(f"{px:.1f} {py:.1f}" for px, py in points)


def _hover_columns(series: Sequence[Series], x: LinearScale, y: LinearScale, unit: str) -> list[Column]:
    binned = [into_bins(one.points, _MOST_COLUMNS) for one in series]
    longest = max(binned, key=len, default=[])
    columns = []
    for place, (left, right) in zip(longest, _edges(longest, x), strict=True):
        lines, dots = [_steps_text(place)], []
        for one, bins in zip(series, binned, strict=True):
            there = next((b for b in bins if b.first <= place.last and b.last >= place.first), None)
            if there is None:
                continue
            mean = there.mean
            name = f"{one.name}: " if one.name else ""
            lines.append(f"{name}{'not finite' if mean is None else f'{_number(mean)} {unit}'}")
            if mean is not None:
                dots.append(Dot(one.colour, _px(x(place.middle)), _px(y(mean))))
        columns.append(Column(_px(left), _px(right - left), "\n".join(lines), dots=dots))
    return columns


def _edges(bins: Sequence[Bin], x: LinearScale) -> list[tuple[float, float]]:
    """Pixel columns around the bins that touch each other and fill the plot."""
    middles = [x(one.middle) for one in bins]
    between = [(left + right) / 2 for left, right in pairwise(middles)]
    return list(zip([LEFT, *between], [*between, RIGHT], strict=True)) if bins else []


def _steps_text(one: Bin) -> str:
    if one.first == one.last:
        return f"step {one.first:.0f}"
    return f"steps {one.first:.0f} to {one.last:.0f}, mean"


def _number(value: float) -> str:
    return f"{value:,.0f}".replace(",", " ") if abs(value) >= 1000 else f"{value:.4g}"


def _apart(marks: Sequence[Mark], x: LinearScale) -> Iterator[Mark]:
    """Marks within the axis; of those of one kind that would lie over each other, the first."""
    room = {"checkpoint": 14, "restart": 2, "bad": 3}
    last: dict[str, float] = {}
    for mark in sorted(marks, key=lambda mark: mark.x):
        at = x(mark.x)
        if x.low <= mark.x <= x.high and at - last.get(mark.kind, -HUGE) >= room[mark.kind]:
            last[mark.kind] = at
            yield Mark(_px(at), mark.kind, mark.text)
