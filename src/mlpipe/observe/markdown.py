"""A short summary of a run in Markdown, for a Jenkins build or a pull request."""

from __future__ import annotations

import re

from mlpipe._core.mfu import throughput
from mlpipe._core.units import format_seconds
from mlpipe.observe.progress import format_count, format_loss, format_mfu
from mlpipe.observe.runview import RunView, StageView, view_run, worst_load
from mlpipe.observe.sections import cost_facts
from mlpipe.store.base import Store


def build_markdown(store: Store, run_id: str) -> str:
    """A heading, a table of the stages, a line a result. Raises StoreError like `build_report`."""
    view = view_run(store, run_id)
    took = "" if view.seconds is None else f", took {format_seconds(view.seconds)}"
    parts = [f"### {plain(run_id)}: {view.run.state}{took}\n"]
    if view.run.message:
        parts.append(f"{plain(view.run.message)}\n")
    parts.append(_stages(view))
    results = [line for stage in view.stages for line in (*_training(stage), *_evaluation(stage))]
    results += [line for stage in view.stages for line in _trouble(stage)]
    results += [f"- not readable: {plain(problem)}" for problem in view.problems]
    if results:
        parts.append("\n".join(results) + "\n")
    return "\n".join(parts)


def plain(value: object) -> str:
    """A user's text as text: on one line, and without meaning to Markdown or HTML."""
    line = " ".join(str(value).split())
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|#~!@])", r"\\\1", line)


def _stages(view: RunView) -> str:
    rows = [
        f"| {plain(stage.name)} | {stage.kind} | {stage.state.state} | {stage.state.attempt} |"
        f" {'' if stage.seconds is None else format_seconds(stage.seconds)} |"
        for stage in view.stages
    ]
    return "\n".join(["| Stage | Kind | State | Attempts | Took |", "|---|---|---|---:|---:|", *rows, ""])


def _training(stage: StageView) -> list[str]:
    if not stage.lead.steps:
        return []
    start, last = stage.start, stage.lead.steps[-1]
    rate, mfu = throughput(stage.lead.steps)
    facts = [f"step {last.step}" + (f" of {start.steps}" if start.steps else "")]
    facts.append(f"loss {format_loss(last.loss)}")
    if start.strategy:
        facts.append(f"{plain(start.strategy)} on {start.world_size} x {plain(start.device)}")
    if rate is not None:
        facts.append(f"{format_count(rate)} tok/s")
    if mfu is not None:
        facts.append(f"MFU {format_mfu(mfu)} (of {plain(start.peak_name or 'the peak')})")
    load = worst_load(stage)
    if load is not None and load.slowed_us:
        facts.append(f"not alone on the machine: {load}")
    if len(stage.lead.starts) > 1:
        facts.append(f"{len(stage.lead.starts) - 1} restarts, {stage.lead.num_rolled_back} steps done again")
    if stage.ledger is not None and stage.ledger.goodput_ratio is not None:
        facts.append(f"goodput {100 * stage.ledger.goodput_ratio:.1f} %")
        facts += [f"{name} {value}" for name, value in cost_facts(stage.ledger).items()]
    return [f"- **{plain(stage.name)}**: {', '.join(facts)}"]


def _evaluation(stage: StageView) -> list[str]:
    result = stage.evaluation
    if result is None:
        return []
    named = {
        "validation loss": result.val_loss,
        "perplexity": result.val_perplexity,
        "bits per byte": result.val_bits_per_byte,
    }
    facts = [f"{name} {format_loss(value)}" for name, value in named.items() if value is not None]
    if result.gate:
        facts.append(f"gate {plain(result.gate)} {'passed' if result.passed else 'not passed'}")
    return [f"- **{plain(stage.name)}**: {', '.join(facts)}"]


def _trouble(stage: StageView) -> list[str]:
    if stage.state.state not in ("failed", "cancelled"):
        return []
    message = stage.outcome.get("message") or stage.state.message or "no message was left"
    hint = stage.outcome.get("hint")
    return [
        f"- **{plain(stage.name)} {stage.state.state}**: {plain(message)}"
        + (f" ({plain(hint)})" if hint else "")
    ]
