"""Several runs side by side: in what they differed, and what came of it; as rows, and as one HTML page with
their curves over each other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from mlpipe import __version__
from mlpipe._core.errors import MlpipeError
from mlpipe._core.mfu import throughput
from mlpipe._core.records import Step
from mlpipe._core.serial import leaves
from mlpipe._core.units import format_seconds
from mlpipe.observe.axes import finite
from mlpipe.observe.blocks import Card, Chart, Charts, Code, Details, Paragraph, Piece, Table, utc
from mlpipe.observe.charts import points
from mlpipe.observe.plots import Series, line_plot
from mlpipe.observe.progress import format_count, format_loss, format_mfu
from mlpipe.observe.report import render_page
from mlpipe.observe.runview import RunView, StageView, view_run
from mlpipe.observe.validations import best_of, names
from mlpipe.observe.validations import points as validation_points
from mlpipe.plan.work import TrainPlan
from mlpipe.spec.load import load_pipeline_text
from mlpipe.store.base import Store
from mlpipe.store.runs import read_pipeline

Group = Literal["pipeline", "code", "data", "hardware", "plan", "versions", "outcome"]
_COLOURS = ("blue", "amber", "teal", "violet", "pink", "brown", "green", "red")
_MOST_TEXT = 60  # characters of a value in a table


@dataclass(frozen=True)
class Row:
    """One thing of all runs; a run that has none has None. `values`: plain JSON. `texts`: the same for
    people."""

    group: Group
    key: str
    values: tuple[Any, ...]
    texts: tuple[str, ...]

    @property
    def differs(self) -> bool:
        """Whether the runs are not alike in it."""
        return any(value != self.values[0] for value in self.values)

    def document(self) -> dict[str, Any]:
        """For machines."""
        return {
            **{key: value for key, value in asdict(self).items() if key != "texts"},
            "differs": self.differs,
        }


@dataclass(frozen=True)
class Comparison:
    """`rows`: all of them, the outcome last. `problems`: what could not be read."""

    run_ids: tuple[str, ...]
    rows: tuple[Row, ...]
    views: tuple[RunView, ...]
    problems: tuple[str, ...]

    def shown(self, *, every: bool) -> list[Row]:
        """Those that differ, and the whole outcome; `every`: all."""
        return [row for row in self.rows if every or row.differs or row.group == "outcome"]


Fact = tuple[Any, str]  # a value, and how it is shown


def compare_runs(runs: Sequence[tuple[Store, str]]) -> Comparison:
    """Raises StoreError when a run does not exist or its store cannot be reached; what else cannot be read is
    told in `problems`."""
    views = tuple(view_run(store, run_id) for store, run_id in runs)
    facts: list[dict[tuple[Group, str], Fact]] = []
    problems = []
    for (store, run_id), view in zip(runs, views, strict=True):
        problems += [f"{run_id}: {problem}" for problem in view.problems]
        try:
            asked = _pipeline(store, view)
        except MlpipeError as error:
            problems.append(f"{run_id}: its pipeline cannot be read: {error.message}")
            asked = {}
        facts.append({**asked, **_code(view), **_trainings(view), **_outcome(view)})
    order = {group: number for number, group in enumerate(Group.__args__)}  # type: ignore[attr-defined]
    keys = sorted(dict.fromkeys(key for one in facts for key in one), key=lambda key: order[key[0]])
    rows = [_row(group, key, [one.get((group, key)) for one in facts]) for group, key in keys]
    return Comparison(tuple(run_id for _, run_id in runs), tuple(rows), views, tuple(problems))


def _row(group: Group, key: str, facts: Sequence[Fact | None]) -> Row:
    values = tuple(None if fact is None else fact[0] for fact in facts)
    return Row(group, key, values, tuple("-" if fact is None else fact[1] for fact in facts))


def _pipeline(store: Store, view: RunView) -> dict[tuple[Group, str], Fact]:
    """Key by key, with all overrides and defaults."""
    run = view.run
    overrides = [str(one) for one in run.meta.get("set", [])]
    name = f"runs/{run.run_id}/pipeline.yaml"
    pipeline = load_pipeline_text(read_pipeline(store, run.run_id), name, overrides=overrides)
    keys = leaves(pipeline.model_dump(mode="json", by_alias=True, exclude_none=True))
    return {("pipeline", key): (value, _text(value)) for key, value in keys.items()}


def _code(view: RunView) -> dict[tuple[Group, str], Fact]:
    """Of the user's repository, and of mlpipe itself."""
    facts: dict[tuple[Group, str], Fact] = {}
    if commit := view.run.meta.get("git_commit"):
        facts["code", "git commit"] = (commit, str(commit)[:12])
    digests = sorted({stage.plan.code_digest for stage in view.stages if stage.plan is not None})
    if digests:
        facts["code", "mlpipe's source"] = (digests, ", ".join(digest[:12] for digest in digests))
    for stage in view.stages:
        if (digest := (stage.state.outcome or {}).get("digest")) is not None:
            facts["data", f"{stage.name}.output"] = (digest, str(digest)[:12])
    return facts


def _trainings(view: RunView) -> dict[tuple[Group, str], Fact]:
    facts: dict[tuple[Group, str], Fact] = {}
    for stage in view.stages:
        plan, start = stage.part(TrainPlan), stage.start
        if plan is None:
            continue
        mesh = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.larger_axes.items())
        batch = f"{plan.micro_batch} x {plan.mesh.num_data_ranks} x {plan.accumulation}"
        shares = ", ".join(f"{one.name} {100 * one.share_ratio:.0f} %" for one in plan.groups)
        told: list[tuple[Group, str, Any]] = [
            ("data", "tokens", plan.data.digest and plan.data.digest[:12]),
            ("hardware", "device", start.device),
            ("hardware", "host", start.host),
            ("hardware", "workers", plan.mesh.world_size),
            ("plan", "strategy", plan.strategy),
            ("plan", "mesh", mesh or "one worker"),
            ("plan", "micro-batch x data ranks x accumulation", batch),
            ("plan", "shares of a batch", shares or None),
            ("plan", "precision", plan.precision),
            ("plan", "activation checkpointing", plan.activation_checkpointing),
            ("plan", "compile", plan.compile),
            ("versions", "torch", start.torch),
        ]
        facts |= {(group, f"{stage.name}.{key}"): (value, str(value)) for group, key, value in told if value}
    return facts


def _outcome(view: RunView) -> dict[tuple[Group, str], Fact]:
    facts: dict[tuple[Group, str], Fact] = {("outcome", "state"): (view.run.state, view.run.state)}

    def say(key: str, value: float | None, words: Callable[[float], str]) -> None:
        if value is not None:
            facts["outcome", key] = (value if finite(value) else None, words(value))

    say("time", view.seconds, format_seconds)
    for stage in view.stages:
        steps = stage.lead.steps
        if steps:
            rate, mfu = throughput(steps)
            say(f"{stage.name}.step", steps[-1].step, str)
            say(f"{stage.name}.loss", steps[-1].loss, format_loss)
            say(f"{stage.name}.tokens per second", rate, format_count)
            say(f"{stage.name}.MFU", mfu, format_mfu)
            for name, last, best in validated(stage):
                say(f"{stage.name}.validation {name}", last, format_loss)
                say(f"{stage.name}.best {name}", best, format_loss)
        told = stage.outcome.get("metrics")
        for name, value in told.items() if isinstance(told, dict) else ():
            if isinstance(value, int | float):
                say(f"{stage.name}.{name}", value, lambda value: f"{value:.6g}")
        if stage.ledger is not None:
            say(f"{stage.name}.goodput", stage.ledger.goodput_ratio, lambda ratio: f"{100 * ratio:.1f} %")
            say(f"{stage.name}.USD", stage.ledger.cost_usd, lambda usd: f"{usd:.4g}")
    return facts


def validated(stage: StageView) -> list[tuple[str, float | None, float | None]]:
    """Name, last value and the value at the best step, of each metric of validations in the training."""
    validations = stage.lead.validations
    ends = (validations[-1] if validations else None, best_of(stage))
    last, best = ((one.metrics if one is not None else None) or {} for one in ends)
    return [(name, last.get(name), best.get(name)) for name in names(validations)]


def _text(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _MOST_TEXT else f"{text[: _MOST_TEXT - 3]}..."


# The page


@dataclass(frozen=True)
class Page:
    """What the template is given."""

    title: str
    blocks: list[Piece]
    written: str
    version: str = __version__


def build_page(comparison: Comparison) -> str:
    """One self-contained HTML page, which loads nothing and runs nothing."""
    ids = comparison.run_ids
    blocks: list[Piece] = [_table("What came of it", ids, _of(comparison, "outcome"), is_open=True)]
    charts = _charts(comparison)
    if charts.charts:
        blocks.append(charts)
    asked = [row for row in comparison.rows if row.group != "outcome"]
    differing = [row for row in asked if row.differs]
    if differing:
        blocks.append(_table("In what they differed", ids, differing, is_open=True))
    else:
        blocks.append(Card([Paragraph("They were asked for alike, and ran alike.")]))
    same = [row for row in asked if not row.differs]
    blocks.append(_table(f"In what they were alike ({len(same)})", ids, same, is_open=False))
    if comparison.problems:
        unread: list[Piece] = [Paragraph(problem) for problem in comparison.problems]
        blocks.append(Card(unread, "What could not be read", is_trouble=True))
    title = " · ".join(ids)
    return render_page("compare.html.jinja", Page(title, blocks, utc(time.time()) or ""))


def _of(comparison: Comparison, group: Group) -> list[Row]:
    return [row for row in comparison.rows if row.group == group]


def _table(heading: str, ids: Sequence[str], rows: Iterable[Row], *, is_open: bool) -> Piece:
    body = [[row.group, Code(row.key), *row.texts] for row in rows]
    return Details(heading, [Table(("", "", *ids), body, whole=True)], is_open=is_open)


def _charts(comparison: Comparison) -> Charts:
    """Each over steps, a line a run and training stage. The legend stands on each: hover texts name runs."""
    lines: list[tuple[str, StageView]] = []
    for run_id, view in zip(comparison.run_ids, comparison.views, strict=True):
        trained = [stage for stage in view.stages if stage.lead.steps]
        lines += [(run_id if len(trained) == 1 else f"{run_id} {stage.name}", stage) for stage in trained]
    fields: list[tuple[str, str, Callable[[Step], float | None], float]] = [
        ("Loss", "nats", lambda step: step.loss, 1.0),
        ("Throughput", "tok/s", lambda step: step.tokens_per_second, 1.0),
        ("MFU", "%", lambda step: step.mfu_ratio, 0.01),
        ("Gradient norm, before clipping", "", lambda step: step.grad_norm, 1.0),
    ]
    charts = []
    for title, unit, field, scale in fields:
        series = [
            Series(name, _COLOURS[number % len(_COLOURS)], points(stage.lead.steps, field, scale))
            for number, (name, stage) in enumerate(lines)
            if any(finite(field(step)) for step in stage.lead.steps)
        ]
        charts += _chart(title, unit, series)
    for metric in dict.fromkeys(name for _, stage in lines for name, _, _ in validated(stage)):
        series = [
            Series(
                name,
                _COLOURS[number % len(_COLOURS)],
                validation_points(stage.lead.validations, metric),
            )
            for number, (name, stage) in enumerate(lines)
            if metric in names(stage.lead.validations)
        ]
        charts += _chart(f"Validation {metric}", "", series)
    return Charts(charts, [])


def _chart(title: str, unit: str, series: list[Series]) -> list[Chart]:
    legend = [(one.colour, one.name) for one in series]
    return [Chart(title, unit, line_plot(series, [], unit=unit), legend)] if series else []
