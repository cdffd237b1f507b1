"""One self-contained HTML page about a run, which opens from a file, loads nothing and runs nothing; and a
short summary in Markdown, for a Jenkins build or a pull request. Both are made by the templates beside this
module, out of the same `Page`."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mlpipe import __version__
from mlpipe._core.mfu import throughput
from mlpipe._core.records import Fallback, Membership, Record, Unknown
from mlpipe._core.units import format_seconds
from mlpipe.observe import plots, preflights
from mlpipe.observe.blocks import (
    Badge,
    Card,
    Cell,
    Code,
    Details,
    Facts,
    Link,
    Paragraph,
    Piece,
    Preformatted,
    Section,
    Table,
    Tiles,
    Timestamp,
    timestamp,
    utc,
)
from mlpipe.observe.members import in_words
from mlpipe.observe.progress import format_count, format_loss, format_mfu
from mlpipe.observe.runview import RunView, StageView, view_run
from mlpipe.store.base import Store

if TYPE_CHECKING:
    import jinja2


@dataclass(frozen=True)
class StagePart:
    """A stage in both; `section` is None of one that left no plan."""

    name: str
    kind: str
    state: str
    attempt: int
    took: str
    section: Section | None


@dataclass(frozen=True)
class SummaryLine:
    """Of the summary: `about` what, in bold."""

    about: str
    text: str


@dataclass(frozen=True)
class Page:
    """What the templates are given."""

    run_id: str
    pipeline: str
    backend: str
    state: Badge
    created: Timestamp | None
    took: str
    message: str
    overview: list[Piece]
    stage_table: Piece
    stages: list[StagePart]
    events: list[Piece]
    lines: list[SummaryLine]
    written: str
    version: str = __version__


def build_report(store: Store, run_id: str) -> str:
    """The page. Raises StoreError when the run does not exist or the store cannot be reached; what else is
    missing or broken is said on the page."""
    return render_html(page_of(view_run(store, run_id)))


def build_markdown(store: Store, run_id: str) -> str:
    """A heading, a table of the stages, a line a result. Raises StoreError like `build_report`."""
    return render_markdown(page_of(view_run(store, run_id)))


def write_report(store: Store, view: RunView, out: Path | None = None) -> str:
    """As `write_page`."""
    return write_page(store, view.run.run_id, render_html(page_of(view)), out)


def write_page(store: Store, run_id: str, html: str, out: Path | None) -> str:
    """Writes the page to `out`, or into the run in the store; returns the file's path or the store's key."""
    page = html.encode(errors="replace")  # half of a pair, as "\\ud800" in JSON is, has no encoding
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(page)
        return str(out)
    key = f"runs/{run_id}/report.html"
    store.put(key, page)
    local = store.local_path(key)
    return str(local) if local is not None else f"{store.url}/{key}"


def render_html(page: Page) -> str:
    """Every text in it is escaped."""
    return render_page("report.html.jinja", page)


def render_markdown(page: Page) -> str:
    """Every text in it is made plain."""
    return _render("report.md.jinja", page, is_html=False)


def render_page(name: str, page: object) -> str:
    """By a template that makes HTML: every text is escaped."""
    return _render(name, page, is_html=True)


def _render(name: str, page: object, *, is_html: bool) -> str:
    return environment(is_html=is_html).get_template(name).render(page=page)


def environment(*, is_html: bool) -> jinja2.Environment:
    """What the templates beside this module are read in. A name that they are not given is an error."""
    import jinja2  # not before a report is written

    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=is_html,
        finalize=None if is_html else plain,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    made.globals["colours"] = plots.COLOURS
    made.globals["area"] = {
        "width": plots.WIDTH,
        "height": plots.HEIGHT,
        "left": plots.LEFT,
        "right": plots.RIGHT,
        "top": plots.TOP,
        "bottom": plots.BOTTOM,
    }
    return made


def plain(value: object) -> str:
    """A user's text as text: on one line, and without meaning to Markdown or HTML."""
    line = " ".join(str(value).split())
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|#~@])", r"\\\1", line)


def page_of(view: RunView) -> Page:
    """Everything that both say."""
    run = view.run
    verb = "running for " if run.state == "running" else "took "
    stages = [_stage_part(stage) for stage in view.stages]
    return Page(
        run_id=run.run_id,
        pipeline=run.pipeline,
        backend=run.backend,
        state=Badge(run.state),
        created=timestamp(run.created),
        took="" if view.seconds is None else verb + format_seconds(view.seconds),
        message=run.message,
        overview=[*_highlights(view), *_meta(view), *_trouble(view)],
        stage_table=_stages(view),
        stages=stages,
        events=_events(view),
        lines=[
            *(
                SummaryLine(part.name, ", ".join(part.section.facts))
                for part in stages
                if part.section is not None and part.section.facts
            ),
            *_trouble_lines(view),
            *(SummaryLine("", f"not readable: {problem}") for problem in view.problems),
        ],
        written=utc(time.time()) or "",
    )


def _stage_part(stage: StageView) -> StagePart:
    section = stage.plan.kind.part("report").section(stage) if stage.plan is not None else None
    if section is not None:
        section = replace(section, blocks=[*section.blocks, *preflights.pieces(stage)])
    return StagePart(
        name=stage.name,
        kind=stage.kind,
        state=stage.state.state,
        attempt=stage.state.attempt,
        took="" if stage.seconds is None else format_seconds(stage.seconds),
        section=section,
    )


def _meta(view: RunView) -> list[Piece]:
    """What whoever made the run said of it."""
    pairs: dict[str, Cell] = {
        str(name): ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        for name, value in view.run.meta.items()
        if name not in ("pipeline", "stages") and value is not None  # both stand on the page already
    }
    if url := view.run.meta.get("jenkins_url"):
        pairs["jenkins_url"] = Link(str(url))
    return [Facts(pairs)] if pairs else []


def _highlights(view: RunView) -> list[Piece]:
    """The numbers one looks for first: of the last training and the last evaluation."""
    shown: dict[str, Cell] = {}
    trained = [stage for stage in view.stages if stage.lead.steps]
    if trained:
        stage = trained[-1]
        last = stage.lead.steps[-1]
        rate, mfu = throughput(stage.lead.steps)
        shown["steps"] = f"{last.step}" + (f" / {stage.start.steps}" if stage.start.steps else "")
        shown["training loss"] = format_loss(last.loss)
        shown["tokens per second"] = None if rate is None else format_count(rate)
        shown["MFU"] = None if mfu is None else format_mfu(mfu)
    ledger = view.ledger
    if ledger is not None and ledger.goodput_ratio is not None:
        shown["goodput"] = f"{100 * ledger.goodput_ratio:.1f} %"
        shown["USD"] = None if ledger.cost_usd is None else f"{ledger.cost_usd:.4g}"
    for stage in view.stages:
        if (result := stage.evaluation) is not None:
            told = {"validation loss": result.val_loss, "bits per byte": result.val_bits_per_byte}
            shown |= {name: format_loss(value) for name, value in told.items() if value is not None}
    return [Tiles(shown)] if shown else []


def _stopped(view: RunView) -> list[tuple[StageView, str]]:
    """The stages that failed or were cancelled, and why."""
    return [
        (stage, str(stage.outcome.get("message") or stage.state.message or "no message was left"))
        for stage in view.stages
        if stage.state.state in ("failed", "cancelled")
    ]


def _trouble(view: RunView) -> list[Piece]:
    cards: list[Piece] = []
    for stage, message in _stopped(view):
        last = stage.checkpoints[-1].step if stage.checkpoints else None
        pairs: dict[str, Cell] = {
            "where": stage.outcome.get("where"),
            "hint": stage.outcome.get("hint"),
            "exit code": stage.state.exit_code,
            "last step": stage.lead.steps[-1].step if stage.lead.steps else None,
            "last checkpoint": None if last is None else f"step {last}",
            "to go on": Code(f"mlpipe resume {view.run.run_id}"),
        }
        heading = f"Stage {stage.name}: {stage.state.state}"
        cards.append(Card([Preformatted(message), Facts(pairs)], heading, is_trouble=True))
    if view.problems:
        unread = [Paragraph(problem) for problem in view.problems]
        cards.append(Card(unread, "What this report could not read", is_trouble=True))
    return cards


def _trouble_lines(view: RunView) -> list[SummaryLine]:
    lines = []
    for stage, message in _stopped(view):
        hint = stage.outcome.get("hint")
        lines.append(
            SummaryLine(f"{stage.name} {stage.state.state}", f"{message} ({hint})" if hint else message)
        )
    return lines


def _stages(view: RunView) -> Piece:
    rows: list[list[Cell]] = [
        [
            stage.name,
            stage.kind or None,
            Badge(stage.state.state),
            stage.state.attempt,
            timestamp(stage.state.started),
            None if stage.seconds is None else format_seconds(stage.seconds),
            stage.state.message or "",
        ]
        for stage in view.stages
    ]
    head = ("Stage", "Kind", "State", "Attempts", "Started", "Took", "")
    return Card([Table(head, rows, frozenset({3, 5}))])


def _events(view: RunView) -> list[Piece]:
    events = [
        (event, stage.name, attempt.number)
        for stage in view.stages
        for attempt in stage.attempts
        for event in attempt.events
    ]
    events += [(event, stage.name, attempt) for stage in view.stages for attempt, event in stage.lead.others]
    events.sort(key=lambda row: row[0].time)
    rows: list[list[Cell]] = [
        [timestamp(event.time), stage, attempt, *_describe(event)] for event, stage, attempt in events
    ]
    if not rows:
        return []
    table = Table(("Time", "Stage", "Attempt", "Event", ""), rows, frozenset({2}))
    return [Details(f"Events ({len(rows)})", [table], is_open=len(rows) <= 12)]


def _describe(event: Record) -> tuple[str, str]:
    """Its kind, and in words what it says."""
    if isinstance(event, Fallback):
        damaged = "; ".join(f"{key}: {why}" for key, why in zip(event.given_up, event.why, strict=False))
        return (
            event.kind,
            f"went back to the checkpoint of step {event.step}; damaged and given up: {damaged}",
        )
    if isinstance(event, Membership):
        return event.kind, in_words(event)
    kind, known = (
        (event.kind_name, event.line) if isinstance(event, Unknown) else (event.kind, event.values())
    )
    hidden = ("v", "kind", "time", "message")
    told = {name: value for name, value in known.items() if name not in hidden and value is not None}
    if told.get("rank") == -1:  # the launcher itself
        del told["rank"]
    rest = ", ".join(f"{name} {value}" for name, value in told.items())
    message = known.get("message")
    if not message:
        return kind, rest
    return kind, f"{message} ({rest})" if rest else str(message)
