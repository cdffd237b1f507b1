"""The charts of one training stage, out of its timelines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mlpipe._core.records import Step
from mlpipe.observe import validations
from mlpipe.observe.axes import HUGE, Point, finite
from mlpipe.observe.blocks import Chart, Charts, utc
from mlpipe.observe.buckets import BUCKETS
from mlpipe.observe.plots import Mark, Series, line_plot, stacked_plot
from mlpipe.observe.progress import split_words
from mlpipe.observe.runview import StageView

Field = Callable[[Step], float | None]

# What a step's time is made of: name, colour, seconds of a step. "other" is the rest of `seconds`.
PARTS: tuple[tuple[str, str, Field], ...] = tuple(
    (bucket.name, bucket.colour, bucket.of_step) for bucket in BUCKETS if bucket.of_step is not None
)
_RANK_COLOURS = ("blue", "amber", "teal", "violet", "pink", "brown", "green", "red")


def stage_charts(stage: StageView) -> Charts:
    """Charts side by side, each over steps; those without a value are left out."""
    steps, marks = stage.lead.steps, stage_marks(stage)
    rate, rate_unit = _unit(_known(steps, lambda step: step.tokens_per_second), _COUNTS)
    throughput = _Line(lambda step: step.tokens_per_second, rate, f"{rate_unit}tok/s", "teal")
    norm = _Line(lambda step: step.grad_norm, 1.0, "", "amber")
    charts = [
        _loss(stage, marks),
        *validations.charts(stage.lead.validations, marks),
        _single(steps, marks, "Throughput", throughput),
        _single(steps, marks, "MFU", _Line(lambda step: step.mfu_ratio, 0.01, "%", "violet")),
        _breakdown(steps, marks),
        _memory(stage, marks),
        _single(steps, marks, "Gradient norm, before clipping", norm),
    ]
    return Charts([chart for chart in charts if chart is not None], _marks_legend(marks))


def stage_marks(stage: StageView) -> list[Mark]:
    """What happened to the training: checkpoints, restarts, losses that were not finite."""
    lead = stage.lead
    marks = [
        Mark(save.step, "checkpoint", f"checkpoint of step {save.step}, {utc(save.time)} UTC")
        for save in lead.saves
        if save.step is not None
    ]
    for attempt, start in lead.starts[1:]:
        at = start.start_step or 0
        words = (
            f"attempt {attempt}, restart {start.restart}: from step {at},"
            f" {split_words(start)} on {start.world_size}, {utc(start.time)} UTC"
        )
        words = "; ".join([words, *start.notes])
        marks.append(Mark(max(at, 1), "restart", words))
    marks += [
        Mark(step.step, "bad", f"step {step.step}: the loss is not finite")
        for step in lead.steps
        if not finite(step.loss)
    ]
    return marks


@dataclass(frozen=True)
class RankMeans:
    """Means over a rank's steps, in seconds: of the whole step, of each of PARTS, and of what is left."""

    rank: int
    seconds: float
    parts: tuple[float, ...]
    other: float
    peak_bytes: float | None

    @property
    def shares(self) -> list[tuple[str, float]]:
        """(colour, seconds) of the parts and the rest."""
        colours = [colour for _, colour, _ in PARTS]
        return [*zip(colours, self.parts, strict=True), ("grey", self.other)]


def rank_means(stage: StageView) -> list[RankMeans]:
    """One a rank that finished a step."""
    rows = []
    for rank, timeline in stage.timelines.items():
        if timeline.steps:
            parts = tuple(_mean(_known(timeline.steps, field)) for _, _, field in PARTS)
            seconds = _mean(_known(timeline.steps, lambda step: step.seconds))
            peak = max(_known(timeline.steps, lambda step: step.memory_bytes), default=None)
            rows.append(RankMeans(rank, seconds, parts, max(seconds - sum(parts), 0.0), peak))
    return rows


def points(steps: Iterable[Step], field: Field, unit: float = 1.0) -> list[Point]:
    """(step, value in `unit`), with None where the record has none."""
    return [(step.step, None if (value := field(step)) is None else value / unit) for step in steps]


def _loss(stage: StageView, marks: Sequence[Mark]) -> Chart | None:
    """Of the training, and beside it that of the validations."""
    steps, held_out = stage.lead.steps, validations.points(stage.lead.validations, "loss")
    if not steps:
        return None
    lines = [Series("", "blue", points(steps, lambda step: step.loss))]
    if not held_out:
        return Chart("Loss", "nats per token", line_plot(lines, marks, unit="nats"))
    lines = [Series("training", "blue", lines[0].points), Series("validation", "green", held_out)]
    legend = [(one.colour, one.name) for one in lines]
    return Chart("Loss", "nats per token", line_plot(lines, marks, unit="nats"), legend)


@dataclass(frozen=True)
class _Line:
    """`unit`: what is drawn as 1, which is called `name`."""

    field: Field
    unit: float
    name: str
    colour: str


def _single(steps: Sequence[Step], marks: Sequence[Mark], title: str, line: _Line) -> Chart | None:
    if not any(finite(line.field(step)) for step in steps):
        return None
    series = [Series("", line.colour, points(steps, line.field, line.unit))]
    return Chart(title, line.name, line_plot(series, marks, unit=line.name, zero=True))


def _breakdown(steps: Sequence[Step], marks: Sequence[Mark]) -> Chart | None:
    if not any(finite(step.seconds) for step in steps):
        return None
    unit, name = _unit(_known(steps, lambda step: step.seconds), _SECONDS)
    series = [
        Series(part, colour, points(steps, field, unit))
        for part, colour, field in PARTS
        if part not in ("bubble", "membership") or any(field(step) is not None for step in steps)
    ]
    other: list[Point] = []
    for step in steps:
        rest = (step.seconds or 0.0) - sum(field(step) or 0.0 for _, _, field in PARTS)
        other.append((step.step, max(rest, 0.0) / unit))
    series.append(Series("other", "grey", other))
    totals = {one.name: sum(y or 0.0 for _, y in one.points) for one in series}
    whole = sum(totals.values()) or 1.0
    legend = [(one.colour, f"{one.name} {_percent(totals[one.name] / whole)}") for one in series]
    plot = stacked_plot(series, marks, unit=name)
    return Chart("Time of a step, rank 0", name, plot, legend)


def _memory(stage: StageView, marks: Sequence[Mark]) -> Chart | None:
    steps = {rank: timeline.steps for rank, timeline in stage.timelines.items()}
    peaks = [peak for one in steps.values() for peak in _known(one, lambda step: step.memory_bytes)]
    if not peaks:
        return None
    unit, name = _unit(peaks, _BYTES)
    series = [
        Series(
            f"rank {rank}",
            _RANK_COLOURS[rank % len(_RANK_COLOURS)],
            points(one, lambda step: step.memory_bytes, unit),
        )
        for rank, one in steps.items()
        if any(finite(step.memory_bytes) for step in one)
    ]
    legend = [(one.colour, one.name) for one in series]
    plot = line_plot(series, marks, unit=name, zero=True)
    return Chart("Memory, peak so far", name, plot, legend)


def _marks_legend(marks: Sequence[Mark]) -> list[tuple[str, str]]:
    """Only of the kinds that occur."""
    meanings = {
        "checkpoint": ("green", "triangle: checkpoint committed"),
        "restart": ("red", "dashed line: restart or new attempt"),
        "bad": ("red", "dot: the loss was not finite"),
    }
    return [meanings[kind] for kind in meanings if any(mark.kind == kind for mark in marks)]


_COUNTS = ((1e9, "G "), (1e6, "M "), (1e3, "k "), (1.0, ""))
_SECONDS = ((1.0, "s"), (1e-3, "ms"))
_BYTES = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"))


def _unit(values: Iterable[float], units: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """The largest unit in which the largest value is at least 1, or the smallest unit."""
    most = max(values, default=0.0)
    return next((unit for unit in units if most >= unit[0]), units[-1])


def _percent(share: float) -> str:
    return "<1 %" if 0 < share < 0.005 else f"{100 * share:.0f} %"


def _known(steps: Iterable[Step], field: Field) -> list[float]:
    return [value for step in steps if (value := field(step)) is not None and -HUGE < value < HUGE]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
