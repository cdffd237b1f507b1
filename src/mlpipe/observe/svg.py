"""Small charts as SVG text: lines and stacked bars over steps.

Every colour stands in the drawing too, not only in the page's style sheet (which adds the dark variant):
Jenkins serves pages with style sheets switched off.

Values are given in the unit that the axis shows. A value that is None or not finite leaves a gap. Many
points are put into as many buckets as there is room for: the line is their mean, the band behind it their
minimum and maximum. Hovering a column shows its numbers (`<title>`; no script).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Literal

WIDTH, HEIGHT = 560, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 538, 12, 188
_MOST_BUCKETS = 280
_MOST_COLUMNS = 100  # that can be hovered
HUGE = 1e100  # beyond it arithmetic on the axis overflows; no measurement gets there

# name: (on light, on dark). The first five also read apart for the colour-blind.
COLOURS = {
    "blue": ("#2f6fde", "#6ea0ff"), "amber": ("#d98a00", "#f0b04a"), "teal": ("#0f9d8a", "#35c9b3"),
    "violet": ("#7a52d6", "#a98bf5"), "grey": ("#a3abb6", "#68717d"), "pink": ("#c2498f", "#f08bc4"),
    "brown": ("#8a5a35", "#c99b74"), "green": ("#4f8f2f", "#8fca6b"), "red": ("#d1383d", "#ff6b6e"),
    "line": ("#e3e6ea", "#2d333b"), "faint": ("#6b7480", "#98a2ae"),
}  # fmt: skip

Point = tuple[float, float | None]


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


@dataclass(frozen=True)
class Bucket:
    """Points with x in [first, last]. `mean` is None when none of them was finite."""

    first: float
    last: float
    mean: float | None
    low: float
    high: float

    @property
    def middle(self) -> float:
        """Where it is drawn."""
        return (self.first + self.last) / 2


@dataclass(frozen=True)
class Scale:
    """Maps [low, high] onto [start, end], linearly."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def finite(value: float | None) -> bool:
    """Whether it can be drawn."""
    return value is not None and -HUGE < value < HUGE  # false for NaN


def domain(values: Iterable[float], *, zero: bool) -> tuple[float, float]:
    """Bounds for an axis that holds all `values`: never empty, with a little air; from 0 up if `zero`."""
    known = list(values)
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    air = (high - low) * 0.05
    if air <= abs(high) * 1e-9:  # all equal, or too near to tell apart
        air = abs(high) * 0.1 or 1.0
    return (low if zero and low == 0 else low - air), high + air


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers within [low, high], evenly spaced by 1, 2 or 5 times a power of ten: at least 2, at most
    `most`, which is 5 or more."""
    if not low < high:
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    for step in (power * factor for factor in (1, 2, 5, 10, 20, 50)):
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first < most:
            break
    return [number * step for number in range(first, last + 1)]


def label(value: float, step: float) -> str:
    """As many digits as ticks `step` apart need."""
    digits = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 0
    if digits > 6 or abs(value) >= 1e7:
        return f"{value:.3g}"
    text = f"{value:,.{digits}f}"
    return text.replace(",", " ") if abs(value) >= 10_000 else text.replace(",", "")


def bucketize(points: Sequence[Point], most: int) -> list[Bucket]:
    """At most `most` buckets of equally many points; every point is in exactly one."""
    size = max(1, -(-len(points) // most))
    buckets = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        known = [y for _, y in part if y is not None and -HUGE < y < HUGE]
        mean = sum(known) / len(known) if known else None
        buckets.append(
            Bucket(part[0][0], part[-1][0], mean, min(known, default=0.0), max(known, default=0.0))
        )
    return buckets


def line_chart(series: Sequence[Series], marks: Sequence[Mark], *, unit: str, zero: bool = False) -> str:
    """Lines over steps. `unit` stands in the hover text, and, for one series, at the axis."""
    per_series = [(one, bucketize(one.points, _MOST_BUCKETS)) for one in series]
    known = [b for _, buckets in per_series for b in buckets if b.mean is not None]
    x = _x_scale([b.first for _, bs in per_series for b in bs] + [b.last for _, bs in per_series for b in bs])
    low, high = domain([y for b in known for y in (b.low, b.high)], zero=zero)
    y = Scale(low, high, _BOTTOM, _TOP)
    body = []
    for one, buckets in per_series:
        if len(series) == 1 and len(one.points) > len(buckets):
            body.append(_band(buckets, x, y, one.colour))
        body.extend(_lines(buckets, x, y, one.colour))
    hover = _hover_columns(series, x, y, unit)
    return _frame(x, y, unit, marks, "".join(body), hover)


def stacked_chart(series: Sequence[Series], marks: Sequence[Mark], *, unit: str) -> str:
    """One bar a step (or a bucket of steps), stacked in the order of `series`, which share their x."""
    columns = [bucketize(one.points, _MOST_COLUMNS) for one in series]
    rows = list(zip(*columns, strict=True)) if columns else []
    totals = [sum(max(b.mean or 0.0, 0.0) for b in row) for row in rows]
    x = _x_scale([b.first for row in rows for b in row[:1]] + [b.last for row in rows for b in row[:1]])
    y = Scale(*domain(totals, zero=True), _BOTTOM, _TOP)
    columns_px = _edges([row[0] for row in rows], x)
    thick = min([24.0, *(0.85 * (right - left) for left, right in columns_px)])
    hover = []
    for row, total, (left, right) in zip(rows, totals, columns_px, strict=True):
        at = x(row[0].middle) - thick / 2
        base, bars, lines = 0.0, [], [_steps_text(row[0])]
        for one, bucket in zip(series, row, strict=True):
            value = max(bucket.mean or 0.0, 0.0)
            share = f" ({100 * value / total:.0f} %)" if total > 0 else ""
            lines.append(f"{one.name}: {_number(value)} {unit}{share}")
            if value > 0:
                top, height = y(base + value), y(base) - y(base + value)
                bars.append(
                    f'<rect {_fill(one.colour)} x="{at:.1f}" y="{top:.1f}"'
                    f' width="{thick:.1f}" height="{height:.1f}"/>'
                )
            base += value
        hover.append(f'<g class="b">{_zone(left, right)}{"".join(bars)}{_title(lines)}</g>')
    return _frame(x, y, unit, marks, "", "".join(hover))


def share_bar(parts: Sequence[tuple[str, float]]) -> str:
    """(colour, value) side by side as one thin bar; the values together fill it."""
    total, at, bars = sum(value for _, value in parts), 0.0, []
    for colour, value in parts:
        width = 200 * value / total if total > 0 else 0.0
        bars.append(f'<rect {_fill(colour)} x="{at:.1f}" y="0" width="{width:.1f}" height="10"/>')
        at += width
    return (
        f'<svg class="bar" width="200" height="10" viewBox="0 0 200 10" preserveAspectRatio="none">'
        f"{''.join(bars)}</svg>"
    )


def _x_scale(values: Sequence[float]) -> Scale:
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if low == 1 and high > 10:
        low = 0.0  # a round beginning for the ticks
    room = 0.5 if high - low < 1 else 0.0
    return Scale(low - room, high + room, _LEFT + 6, _RIGHT - 6)


def _lines(buckets: Sequence[Bucket], x: Scale, y: Scale, colour: str) -> list[str]:
    """One path for each run of finite buckets; a lone one is a dot."""
    parts: list[str] = []
    run: list[tuple[float, float]] = []
    for bucket in (*buckets, None):
        if bucket is not None and bucket.mean is not None:
            run.append((x(bucket.middle), y(bucket.mean)))
            continue
        if len(run) == 1:
            parts.append(f'<circle {_fill(colour)} cx="{run[0][0]:.1f}" cy="{run[0][1]:.1f}" r="2.5"/>')
        elif run:
            parts.append(f'<path {_stroke(colour)} stroke-width="1.6" fill="none" d="M{_path(run)}"/>')
        run = []
    return parts


def _band(buckets: Sequence[Bucket], x: Scale, y: Scale, colour: str) -> str:
    known = [bucket for bucket in buckets if bucket.mean is not None]
    upper = [(x(bucket.middle), y(bucket.high)) for bucket in known]
    lower = [(x(bucket.middle), y(bucket.low)) for bucket in reversed(known)]
    return f'<path {_fill(colour)} opacity="0.2" d="M{_path(upper + lower)}Z"/>' if known else ""


def _fill(colour: str) -> str:
    return f'class="f-{colour}" fill="{COLOURS[colour][0]}"'


def _stroke(colour: str) -> str:
    return f'class="s-{colour}" stroke="{COLOURS[colour][0]}"'


def _path(points: Iterable[tuple[float, float]]) -> str:
    return "L".join(f"{px:.1f} {py:.1f}" for px, py in points)


def _hover_columns(series: Sequence[Series], x: Scale, y: Scale, unit: str) -> str:
    columns = [bucketize(one.points, _MOST_COLUMNS) for one in series]
    longest = max(columns, key=len, default=[])
    parts = []
    for index, (bucket, (left, right)) in enumerate(zip(longest, _edges(longest, x), strict=True)):
        lines, dots = [_steps_text(bucket)], []
        for one, buckets in zip(series, columns, strict=True):
            if index >= len(buckets):
                continue
            mean = buckets[index].mean
            name = f"{one.name}: " if one.name else ""
            lines.append(f"{name}{'not finite' if mean is None else f'{_number(mean)} {unit}'}")
            if mean is not None:
                dots.append(
                    f'<circle {_fill(one.colour)} opacity="0" cx="{x(bucket.middle):.1f}"'
                    f' cy="{y(mean):.1f}" r="3.2"/>'
                )
        parts.append(f'<g class="h">{_zone(left, right)}{"".join(dots)}{_title(lines)}</g>')
    return "".join(parts)


def _edges(buckets: Sequence[Bucket], x: Scale) -> list[tuple[float, float]]:
    """Pixel columns around the buckets that touch each other and fill the plot."""
    middles = [x(bucket.middle) for bucket in buckets]
    between = [(left + right) / 2 for left, right in pairwise(middles)]
    return list(zip([_LEFT, *between], [*between, _RIGHT], strict=True)) if buckets else []


def _zone(left: float, right: float) -> str:
    return (
        f'<rect class="z" fill="transparent" x="{left:.1f}" y="{_TOP}" width="{right - left:.1f}"'
        f' height="{_BOTTOM - _TOP}"/>'
    )


def _title(lines: Iterable[str]) -> str:
    return f"<title>{escape(chr(10).join(lines))}</title>"


def _steps_text(bucket: Bucket) -> str:
    if bucket.first == bucket.last:
        return f"step {bucket.first:.0f}"
    return f"steps {bucket.first:.0f} to {bucket.last:.0f}, mean"


def _number(value: float) -> str:
    return f"{value:,.0f}".replace(",", " ") if abs(value) >= 1000 else f"{value:.4g}"


def _frame(x: Scale, y: Scale, unit: str, marks: Sequence[Mark], body: str, hover: str) -> str:
    y_ticks = ticks(y.low, y.high)
    y_step = y_ticks[1] - y_ticks[0] if len(y_ticks) > 1 else abs(y_ticks[0])
    x_ticks = sorted({round(tick) for tick in ticks(x.low, x.high, 7) if x.low <= round(tick) <= x.high})
    grid = "".join(
        f'<line {_stroke("line")} x1="{_LEFT}" x2="{_RIGHT}" y1="{y(t):.1f}" y2="{y(t):.1f}"/>'
        f"{_text(_LEFT - 6, y(t) + 3.5, 'end', label(t, y_step))}"
        for t in y_ticks
    )
    below = "".join(_text(x(t), _BOTTOM + 18, "middle", label(t, 1)) for t in x_ticks)
    axis = f'<line {_stroke("faint")} x1="{_LEFT}" x2="{_RIGHT}" y1="{_BOTTOM}" y2="{_BOTTOM}"/>'
    end = _text(_RIGHT, HEIGHT - 2, "end", "step")
    drawn = "".join(_mark(mark, x) for mark in _apart(marks, x))
    return (
        f'<svg class="chart" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
        ' font-size="11" role="img"'
        f' aria-label="{escape(unit)} over steps">'
        f"{grid}{axis}{below}{end}{body}{hover}{drawn}</svg>"
    )


def _text(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text {_fill("faint")} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _apart(marks: Sequence[Mark], x: Scale) -> Iterator[Mark]:
    """Marks within the axis; of those of one kind that would lie over each other, the first."""
    room = {"checkpoint": 14, "restart": 2, "bad": 3}
    last: dict[str, float] = {}
    for mark in sorted(marks, key=lambda mark: mark.x):
        if x.low <= mark.x <= x.high and x(mark.x) - last.get(mark.kind, -HUGE) >= room[mark.kind]:
            last[mark.kind] = x(mark.x)
            yield mark


def _mark(mark: Mark, x: Scale) -> str:
    at = x(mark.x)
    if mark.kind == "checkpoint":
        shape = f'<path {_fill("green")} d="M{at:.1f} {_BOTTOM - 4}l4.5 8h-9Z"/>'
    elif mark.kind == "restart":
        shape = (
            f'<line {_stroke("red")} stroke-dasharray="3 3"'
            f' x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{_BOTTOM}"/>'
            f'<rect {_fill("red")} x="{at - 3:.1f}" y="{_TOP - 6}" width="6" height="10" rx="2"/>'
        )
    else:
        shape = f'<circle {_fill("red")} cx="{at:.1f}" cy="{_TOP + 4}" r="4"/>'
    return f"<g>{shape}{_title([mark.text])}</g>"
