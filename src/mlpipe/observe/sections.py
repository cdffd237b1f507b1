"""The page's section of one stage, by its kind."""

from __future__ import annotations

import shlex

from mlpipe import __version__
from mlpipe._core.mfu import throughput
from mlpipe._core.units import format_bytes, format_seconds
from mlpipe.observe.buckets import BUCKETS
from mlpipe.observe.charts import PARTS, rank_rows, stage_charts
from mlpipe.observe.goodput import Ledger
from mlpipe.observe.html import Html, details, element, facts, join, table, when
from mlpipe.observe.predicted import predicted_section
from mlpipe.observe.progress import format_count, format_flops, format_loss, format_mfu
from mlpipe.observe.runview import MOST_RANKS, StageView, worst_load
from mlpipe.observe.svg import share_bar
from mlpipe.plan.plan import TrainPlan

MOST_ROWS = 100  # of a table; the last ones are shown


def train_section(stage: StageView) -> Html:
    plan = stage.plan.train if stage.plan is not None else None
    parts: list[object] = [_chosen(stage, plan) if plan is not None else ""]
    parts.append(stage_charts(stage) if stage.lead.steps else element("p", "No step was finished."))
    if stage.lead.num_rolled_back:
        parts.append(
            element("p", f"{stage.lead.num_rolled_back} steps were lost to restarts and done again.", "faint")
        )
    measured = [_mfu(stage), predicted_section(stage), _ranks(stage), _starts(stage), _checkpoints(stage)]
    parts += [_goodput(stage), *measured]
    return join(parts)


def _chosen(stage: StageView, plan: TrainPlan) -> Html:
    start, mesh = stage.start, plan.mesh
    axes = {name: getattr(mesh, name) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}
    sizes = " x ".join(f"{name} {size}" for name, size in axes.items() if size > 1) or "one worker"
    batch = (
        f"{plan.global_batch} sequences of {plan.model.seq_len} tokens = {plan.micro_batch} x"
        f" {mesh.num_data_ranks} data ranks x {plan.accumulation} accumulated"
    )
    every = (
        f"{plan.checkpoint.every_steps} steps"
        if plan.checkpoint.every_steps is not None
        else format_seconds(plan.checkpoint.every_seconds or 0.0)
    )
    optimizer = plan.optimizer
    workers = start.world_size or mesh.world_size
    hardware = [f"{workers} x {start.device or 'worker'}", start.host]
    return element(
        "div",
        facts(
            {
                "strategy": join((element("b", plan.strategy), f" ({sizes})")),
                "why": plan.reason,
                "model": f"{plan.model.preset or plan.model.build.entry}"
                + (f", {format_count(start.num_params)} parameters" if start.num_params else ""),
                "batch": batch,
                "precision": f"{plan.precision}, activation checkpointing {plan.activation_checkpointing},"
                f" compile {plan.compile}",
                "optimizer": f"{optimizer.name}, lr {optimizer.lr:g} ({optimizer.schedule},"
                f" {optimizer.warmup_steps} warm-up steps), clip {optimizer.grad_clip:g}",
                "checkpoints": f"every {every}, {plan.checkpoint.keep} kept",
                "seed": f"{plan.seed}{', deterministic' if plan.deterministic else ''}",
                "hardware": ", ".join(str(part) for part in hardware if part),
                "versions": f"mlpipe {__version__}, torch {start.torch}" if start.torch else None,
            }
        ),
        "card",
    )


def _goodput(stage: StageView) -> Html:
    ledger = stage.ledger
    if ledger is None or not ledger.total or ledger.goodput_ratio is None:
        return Html("")
    spent = [(one.name, one.colour, one.words, ledger.seconds[one.name]) for one in BUCKETS]
    rows = [
        (name, format_seconds(seconds), f"{100 * seconds / ledger.total:.1f} %", words)
        for name, _, words, seconds in spent
        if seconds > 0
    ]
    bar = Html(share_bar([(colour, seconds) for _, colour, _, seconds in spent]))
    known = {
        "goodput": f"{100 * ledger.goodput_ratio:.1f} % of {format_seconds(ledger.total)} over all ranks",
        **cost_facts(ledger),
    }
    content = join((facts(known), bar, table(("", "Rank-seconds", "Share", ""), rows, {1, 2})))
    return details("Where the time went", content, open_=True)


def cost_facts(ledger: Ledger) -> dict[str, str]:
    """Empty where nobody said what a device costs."""
    cost, bad, per_token = ledger.cost_usd, ledger.badput_usd, ledger.usd_per_million_tokens
    if cost is None or bad is None:
        return {}
    facts = {"cost": f"{cost:.4g} USD at {ledger.price_usd_per_device_hour:.4g} a device-hour"}
    facts["lost to badput"] = f"{bad:.4g} USD"
    if per_token is not None:
        facts["per million tokens"] = f"{per_token:.4g} USD"
    return facts


def _mfu(stage: StageView) -> Html:
    start = stage.start
    needed, world = start.num_flops_per_token, start.world_size
    measured = stage.lead.steps[-1].peak_flops if stage.lead.steps else None
    peak = start.peak_flops or measured
    first = start.start_step or 0  # earlier steps may have run on other hardware
    rate, mfu = throughput(step for step in stage.lead.steps if step.step > first)
    if not needed or not peak or not world or rate is None or mfu is None:
        return Html("")
    line = (
        f"{format_count(rate)} tok/s x {format_flops(needed)}/token / ({world} x {format_flops(peak)}/s)"
        f" = {format_mfu(mfu)}"
    )
    known = {
        (f"since step {first}" if first else "over all steps"): line,
        "FLOPs per token": f"{needed:,.0f}, by the convention: {start.flops_convention}",
        "parameters": None if not start.num_params else f"{start.num_params:,}",
        "peak": f"{format_flops(peak)}/s a worker: {start.peak_name}",
    }
    if mfu > 1:
        known["over 100 %"] = "the peak is too low: of another device, or measured while others used this one"
    hardware = start.num_hardware_flops_per_token
    if hardware and hardware != needed:
        known["HFU"] = f"{100 * mfu * hardware / needed:.1f} %, with what activation checkpointing does again"
    best = stage.lead.steps[-1].achievable_flops
    if best and best != peak:
        share = f"{100 * mfu * peak / best:.1f} % of {format_flops(best)}/s"
        known["of achievable"] = f"{share} a worker, the best matrix product measured on it"
    return details("How MFU was computed", facts(known), open_=True)


def _ranks(stage: StageView) -> Html:
    rows = [
        (
            row.rank,
            *(f"{1000 * seconds:.1f}" for seconds in (row.seconds, *row.parts, row.other)),
            Html(share_bar(row.shares)),
            None if row.peak_bytes is None else format_bytes(row.peak_bytes),
        )
        for row in rank_rows(stage)
    ]
    if not rows:
        return Html("")
    head = ("Rank", "step, ms", *(name for name, _, _ in PARTS), "other", "Shares", "Peak memory")
    more = stage.num_ranks - len(stage.timelines)
    note = f"The first {MOST_RANKS} of {stage.num_ranks} ranks." if more > 0 else ""
    load = worst_load(stage)
    busy = f"The machine was not this run's alone: {load}." if load is not None and load.slowed_us else ""
    parts = (table(head, rows, {0, 1, 2, 3, 4, 5, 6, 8}), element("p", note, "faint"), element("p", busy))
    content = join(parts)
    return details("Ranks: mean of a step, by cause", content, open_=len(rows) <= 8)


def _starts(stage: StageView) -> Html:
    rows = [
        (
            attempt, start.restart, when(start.time), start.start_step,
            start.strategy, start.world_size, start.device, start.host,
            start.precision, start.torch,
        )
        for attempt, start in stage.lead.starts
    ]  # fmt: skip
    head = (
        "Attempt",
        "Restart",
        "Started",
        "From step",
        "Strategy",
        "Workers",
        "Device",
        "Host",
        "Precision",
    )
    content = table((*head, "torch"), rows, {0, 1, 3, 5})
    return details(f"Attempts and restarts ({len(rows)})", content, open_=len(rows) > 1) if rows else Html("")


def _checkpoints(stage: StageView) -> Html:
    """Of the records, which know how long a save took, and of the catalogue, which knows what is there."""
    there = {checkpoint.key: checkpoint for checkpoint in stage.checkpoints}
    saved = {save.key: save for save in stage.lead.saves if save.key}
    rows = []
    for key in [*saved, *(key for key in there if key not in saved)]:
        save, checkpoint = saved.get(key), there.get(key)
        stall = save.stall_seconds if save is not None else None
        took = save.save_seconds if save is not None else None
        size = checkpoint.size_bytes if checkpoint is not None else None
        rows.append(
            (
                checkpoint.step if checkpoint is not None else save.step if save is not None else None,
                when(checkpoint.time if checkpoint is not None else save.time if save is not None else None),
                None if size is None else format_bytes(size),
                None if stall is None else f"{1000 * stall:.0f} ms",
                None if took is None else format_seconds(took),
                "kept" if checkpoint is not None else "pruned",
                key.rpartition("/checkpoints/")[2],
            )
        )
    if not rows:
        return Html("")
    head = ("Step", "Committed", "Size", "Stall", "Save", "State", "Key under checkpoints/")
    shown = table(head, rows[-MOST_ROWS:], {0, 2, 3, 4})
    return details(f"Checkpoints ({len(rows)})", join((shown, cut_note(len(rows)))), open_=len(rows) <= 12)


def evaluate_section(stage: StageView) -> Html:
    result = stage.evaluation
    if result is None:
        waiting = stage.state.state in ("pending", "running")
        return element("div", element("p", "No result yet." if waiting else "No result was left."), "card")
    plan = stage.plan.evaluate if stage.plan is not None else None
    verdict = {True: "passed", False: "not passed", None: "not decided"}[result.passed]
    in_nats = result.val_perplexity is not None  # else a loss of the model's own
    numbers = {
        "checkpoint of": plan.train_stage if plan is not None else None,
        "validation loss": _number(result.val_loss, " nats per token" if in_nats else ""),
        "perplexity": _number(result.val_perplexity),
        "bits per byte": _number(result.val_bits_per_byte),
        "over": f"{result.num_tokens:,.0f} {'tokens' if in_nats else 'targets'}"
        if result.num_tokens
        else None,
        "gate": f"{result.gate}: {verdict}" if result.gate else None,
        "prompt": plan.prompt if plan is not None else None,
    }
    parts: list[object] = [facts(numbers)]
    if result.sample:
        parts += [element("h4", "Generated text"), element("pre", result.sample)]
    return element("div", join(parts), "card")


def command_section(stage: StageView) -> Html:
    argv = stage.plan.command.argv if stage.plan is not None and stage.plan.command is not None else ()
    known = {"argv": element("code", shlex.join(argv)), "exit code": stage.state.exit_code}
    return element("div", facts(known), "card")


def promote_section(stage: StageView) -> Html:
    plan = stage.plan.promote if stage.plan is not None else None
    if plan is None:
        return Html("")
    known = {"model": plan.model_name, "alias": plan.alias, "from": plan.train_stage}
    return element("div", facts({**known, "outcome": stage.outcome.get("message")}), "card")


def cut_note(num_rows: int) -> Html:
    return element("p", f"The last {MOST_ROWS} of {num_rows}." if num_rows > MOST_ROWS else "", "faint")


def _number(value: float | None, unit: str = "") -> str | None:
    return None if value is None else f"{format_loss(value)}{unit}"


SECTIONS = {
    "train": train_section,
    "evaluate": evaluate_section,
    "command": command_section,
    "promote": promote_section,
}
