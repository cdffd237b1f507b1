"""One self-contained HTML page about a run: opens from a file, loads nothing, runs nothing."""

from __future__ import annotations

import time
from pathlib import Path

from mlpipe import __version__
from mlpipe._core.mfu import throughput
from mlpipe._core.records import Record, Unknown
from mlpipe._core.units import format_seconds
from mlpipe.observe.html import (
    Html,
    badge,
    details,
    element,
    facts,
    join,
    link,
    page,
    table,
    tiles,
    utc,
    when,
)
from mlpipe.observe.progress import format_count, format_loss, format_mfu
from mlpipe.observe.runview import RunView, view_run
from mlpipe.observe.sections import MOST_ROWS, SECTIONS, cut_note
from mlpipe.store.base import Store


def build_report(store: Store, run_id: str) -> str:
    """The page. Raises StoreError when the run does not exist or the store cannot be reached; what else is
    missing or broken is said on the page."""
    return page_of(view_run(store, run_id))


def page_of(view: RunView) -> str:
    parts: list[object] = [_header(view), _trouble(view), _stages(view)]
    for stage in view.stages:
        if stage.kind in SECTIONS:
            kind = "" if stage.kind == stage.name else f" {stage.kind}"
            title = join((stage.name, element("span", kind, "faint")))
            parts += [element("h2", title), SECTIONS[stage.kind](stage)]
    parts.append(_events(view))
    written = f"Written {utc(time.time())} UTC by mlpipe {__version__}. All times are UTC."
    return page(f"{view.run.pipeline} · {view.run.run_id}", join([*parts, element("footer", written)]))


def write_report(store: Store, view: RunView, out: Path | None = None) -> str:
    """Writes the page to `out`, or into the run in the store; returns the file's path or the store's key."""
    html = page_of(view)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(html, encoding="utf-8")
        return str(out)
    key = f"runs/{view.run.run_id}/report.html"
    store.put(key, html.encode())
    local = store.local_path(key)
    return str(local) if local is not None else f"{store.url}/{key}"


def _header(view: RunView) -> Html:
    run = view.run
    head = join((element("h1", run.run_id), badge(run.state)))
    seconds = view.seconds
    verb = "running for" if run.state == "running" else "took"
    took = f" · {verb} {format_seconds(seconds)}" if seconds is not None else ""
    line = join((f"Pipeline {run.pipeline} on {run.backend} · created ", when(run.created), took))
    meta: dict[str, object] = {
        str(key): ", ".join(map(str, value)) if isinstance(value, list) else value
        for key, value in run.meta.items()
        if key not in ("pipeline", "stages")  # both stand on the page already
    }
    if url := meta.get("jenkins_url"):
        meta["jenkins_url"] = link(str(url))
    return join(
        (
            element(
                "header", join((head, element("p", line, "faint"), run.message and element("p", run.message)))
            ),
            _highlights(view),
            facts(meta) if meta else "",
        )
    )


def _highlights(view: RunView) -> Html:
    """The numbers one looks for first: of the last training and the last evaluation."""
    shown: dict[str, object] = {}
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
            for name, value in (
                ("validation loss", result.val_loss),
                ("bits per byte", result.val_bits_per_byte),
            ):
                if value is not None:
                    shown[name] = format_loss(value)
    return tiles(shown)


def _trouble(view: RunView) -> Html:
    cards = []
    for stage in view.stages:
        if stage.state.state not in ("failed", "cancelled"):
            continue
        outcome = stage.outcome
        message = outcome.get("message") or stage.state.message or "no message was left"
        last = stage.checkpoints[-1].step if stage.checkpoints else None
        cards.append(
            join(
                (
                    element("h3", f"Stage {stage.name}: {stage.state.state}"),
                    element("pre", message),
                    facts(
                        {
                            "where": outcome.get("where"),
                            "hint": outcome.get("hint"),
                            "exit code": stage.state.exit_code,
                            "last step": stage.lead.steps[-1].step if stage.lead.steps else None,
                            "last checkpoint": last and f"step {last}",
                            "to go on": element("code", f"mlpipe resume {view.run.run_id}"),
                        }
                    ),
                )
            )
        )
    if view.problems:
        unread = join(element("p", problem) for problem in view.problems)
        cards.append(join((element("h3", "What this report could not read"), unread)))
    return join(element("div", card, "card trouble") for card in cards)


def _stages(view: RunView) -> Html:
    rows = [
        (
            stage.name,
            stage.kind or None,
            badge(stage.state.state),
            stage.state.attempt,
            when(stage.state.started),
            None if stage.seconds is None else format_seconds(stage.seconds),
            stage.state.message or "",
        )
        for stage in view.stages
    ]
    head = ("Stage", "Kind", "State", "Attempts", "Started", "Took", "")
    return join((element("h2", "Stages"), element("div", table(head, rows, {3, 5}), "card")))


def _events(view: RunView) -> Html:
    events = [
        (event, stage.name, attempt.number)
        for stage in view.stages
        for attempt in stage.attempts
        for event in attempt.events
    ]
    events += [(event, stage.name, attempt) for stage in view.stages for attempt, event in stage.lead.others]
    events.sort(key=lambda row: row[0].time)
    rows = [(when(event.time), stage, attempt, *describe_event(event)) for event, stage, attempt in events]
    if not rows:
        return Html("")
    shown = table(("Time", "Stage", "Attempt", "Event", ""), rows[-MOST_ROWS:], {2})
    return details(f"Events ({len(rows)})", join((shown, cut_note(len(rows)))), open_=len(rows) <= 12)


def describe_event(event: Record) -> tuple[str, str]:
    """Its kind, and in words what it says."""
    kind, known = (event.kind_name, event.line) if isinstance(event, Unknown) else (event.kind, vars(event))
    hidden = ("v", "kind", "time", "message")
    told = {name: value for name, value in known.items() if name not in hidden and value is not None}
    if told.get("rank") == -1:  # the launcher itself
        del told["rank"]
    rest = ", ".join(f"{name} {value}" for name, value in told.items())
    message = known.get("message")
    if not message:
        return kind, rest
    return kind, f"{message} ({rest})" if rest else str(message)
