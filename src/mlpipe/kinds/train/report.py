"""What the page says of a training."""

from __future__ import annotations

from collections.abc import Sequence

from mlpipe import __version__
from mlpipe._core.mfu import throughput
from mlpipe._core.records import Membership, Start, Step, Tracked
from mlpipe._core.units import format_bytes, format_seconds, format_step_seconds
from mlpipe.observe import experts, samples, validations
from mlpipe.observe.blocks import (
    Card,
    Cell,
    Details,
    Facts,
    Figure,
    Link,
    Paragraph,
    Piece,
    Section,
    Strong,
    Table,
    shares,
    timestamp,
)
from mlpipe.observe.buckets import BUCKETS
from mlpipe.observe.charts import PARTS, rank_means, stage_charts
from mlpipe.observe.goodput import Ledger
from mlpipe.observe.members import costs
from mlpipe.observe.predicted import comparison
from mlpipe.observe.profiles.piece import profile_piece
from mlpipe.observe.progress import format_count, format_flops, format_loss, format_mfu, split_words
from mlpipe.observe.runview import MOST_RANKS, StageView, worst_load
from mlpipe.plan.mesh import PipelinePlan
from mlpipe.plan.model import InitPlan
from mlpipe.plan.updates import CompressPlan, IslandsPlan, OptimizerPlan
from mlpipe.plan.work import TrainPlan


def section(stage: StageView) -> Section:
    """The plan, the charts, and where the time went."""
    plan = stage.part(TrainPlan)
    lead = stage.lead
    blocks: list[Piece | None] = [_chosen(stage, plan) if plan is not None else None]
    blocks.append(stage_charts(stage) if lead.steps else Paragraph("No step was finished."))
    if lead.num_rolled_back:
        words = f"{lead.num_rolled_back} steps were lost to restarts and done again."
        blocks.append(Paragraph(words, is_faint=True))
    for attempt, start in lead.starts:
        blocks += [Paragraph(f"Attempt {attempt}, restart {start.restart}: {note}.") for note in start.notes]
    blocks += [validations.table(stage)]
    blocks += [_goodput(stage), _mfu(stage), comparison(stage), _ranks(stage)]
    blocks += map(profile_piece, stage.profiles)
    blocks += [samples.table(stage), experts.table(stage), _starts(stage)]
    blocks += [_membership(stage), _checkpoints(stage)]
    return Section([block for block in blocks if block is not None], _facts(stage))


def _facts(stage: StageView) -> list[str]:
    """The training in a line."""
    if not stage.lead.steps:
        return []
    start, last = stage.start, stage.lead.steps[-1]
    rate, mfu = throughput(stage.lead.steps)
    facts = [f"step {last.step}" + (f" of {start.steps}" if start.steps else "")]
    facts.append(f"loss {format_loss(last.loss)}")
    facts += validations.facts(stage)
    if start.strategy:
        facts.append(f"{split_words(start)} on {start.world_size} x {start.device}")
    if rate is not None:
        facts.append(f"{format_count(rate)} tok/s")
    if mfu is not None:
        facts.append(f"MFU {format_mfu(mfu)} (of {start.peak_name or 'the peak'})")
    facts += _stragglers(stage)
    load = worst_load(stage)
    if load is not None and load.slowed_us:
        facts.append(f"not alone on the machine: {load}")
    if len(stage.lead.starts) > 1:
        facts.append(f"{len(stage.lead.starts) - 1} restarts, {stage.lead.num_rolled_back} steps done again")
    facts += [note for _, one in stage.lead.starts for note in one.notes]
    if stage.ledger is not None and stage.ledger.goodput_ratio is not None:
        facts.append(f"goodput {100 * stage.ledger.goodput_ratio:.1f} %")
        facts += [f"{name} {value}" for name, value in _costs(stage.ledger).items()]
    return facts


def _stragglers(stage: StageView) -> list[str]:
    """Each rank that was named: how slow it was at worst, and, where load is moved, what it had to do at the
    end."""
    slowest: dict[str, float] = {}
    for step in stage.lead.steps:
        for rank, ratio in (step.stragglers or {}).items():
            slowest[rank] = max(ratio, slowest.get(rank, 0.0))
    facts = []
    for rank, ratio in slowest.items():
        steps = stage.timelines[int(rank)].steps if int(rank) in stage.timelines else []
        share = steps[-1].share_ratio if steps else None
        had = "" if share is None else f" and had {share:.2f} of an even share at the end"
        facts.append(f"rank {rank} was {ratio:.1f} times slower than the others{had}")
    return facts


def _batch(plan: TrainPlan) -> str:
    num_tokens, num_ranks = plan.model.seq_len, plan.mesh.num_data_ranks
    if plan.groups:
        each = (f"{100 * one.share_ratio:.0f} % on {one.num_workers} x {one.name}" for one in plan.groups)
        return f"{plan.global_batch} samples of up to {num_tokens} tokens, by speed: {', '.join(each)}"
    if plan.data.packed is not None:
        return (
            f"{plan.global_batch} samples of up to {num_tokens} tokens, packed ({plan.data.packed}) into rows"
            f" of up to {plan.micro_batch * num_tokens}, over {num_ranks} data ranks"
        )
    return (
        f"{plan.global_batch} sequences of {'up to ' if plan.data.is_uneven else ''}{num_tokens} tokens = "
        f"micro-batch {plan.micro_batch} x {num_ranks} data ranks x {plan.accumulation} gradient "
        "accumulation steps"
    )


def _chosen(stage: StageView, plan: TrainPlan) -> Piece:
    """What the plan says, and on what it runs."""
    start, mesh = stage.start, plan.mesh
    sizes = " x ".join(f"{name} {size}" for name, size in mesh.axes.items() if size > 1) or "one worker"
    sizes += f", ep {mesh.ep}" if mesh.ep > 1 else ""
    sizes += ", keys and values in a ring" if plan.context_exchange == "ring" else ""
    batch = _batch(plan)
    every = (
        f"{plan.checkpoint.every_steps} steps"
        if plan.checkpoint.every_steps is not None
        else format_seconds(plan.checkpoint.every_seconds or 0.0)
    )
    optimizer = plan.optimizer
    pages = {
        one.tracker or "": Link(one.url)
        for _, one in stage.lead.others
        if isinstance(one, Tracked) and one.url
    }
    workers = start.world_size or mesh.world_size
    hardware = [f"{workers} x {start.device or 'worker'}", start.host]
    return Card(
        [
            Facts(
                {
                    "strategy": Strong(plan.strategy, f" ({sizes})"),
                    "why": plan.reason,
                    "pipeline": None if plan.pipeline is None else _pipeline(plan.pipeline),
                    "model": f"{plan.model.preset or plan.model.build.entry}"
                    + (f", {format_count(start.num_params)} parameters" if start.num_params else ""),
                    "starts from": _start(plan.init_from),
                    "frozen": ", ".join(plan.freeze) or None,
                    "batch": batch,
                    "precision": f"{plan.precision}, activation checkpointing"
                    f" {plan.activation_checkpointing}, compile {plan.compile}",
                    "loss scale": _loss_scale(stage),
                    "optimizer": f"{optimizer.name or optimizer.entry}, lr {optimizer.lr:g}"
                    f" ({_schedule(optimizer)}, {optimizer.warmup_steps} warm-up steps),"
                    f" {_clipping(optimizer)}",
                    "gradients": None if plan.compress is None else _compression(plan.compress),
                    "buckets of gradients": _buckets(start),
                    "islands": None if plan.islands is None else _islands(plan.islands),
                    "sent": _sent(stage.lead.steps, plan.compress is not None),
                    "average of weights": f"decay {plan.ema.decay:g}, every {plan.ema.every} steps"
                    if plan.ema
                    else None,
                    "checkpoints": f"every {every}, {plan.checkpoint.keep} kept",
                    "seed": f"{plan.seed}{', deterministic' if plan.deterministic else ''}",
                    "hardware": ", ".join(str(part) for part in hardware if part),
                    **pages,
                    "versions": f"mlpipe {__version__}, torch {start.torch}" if start.torch else None,
                }
            )
        ],
    )


def _sent(steps: Sequence[Step], compressed: bool) -> str | None:
    """By a worker, where that is not its gradients as they are. What is `compressed` nothing hides, so the
    waits of these steps are for what was sent."""
    steps = [step for step in steps if step.exchanged_plain_bytes]
    sent = sum(step.exchanged_bytes or 0 for step in steps)
    if not sent:
        return None
    ratio = sum(step.exchanged_plain_bytes or 0 for step in steps) / sent
    words = f"{format_bytes(sent // len(steps))} a step, {ratio:.3g} times less than gradients in fp32"
    more = sum(step.collective_seconds or 0.0 for step in steps) * (ratio - 1)
    if not compressed or more <= 0:
        return words
    share = more / (sum(step.seconds or 0.0 for step in steps) + more)
    return f"{words}, which saved {100 * share:.0f} % of the time at most"


def _loss_scale(stage: StageView) -> str | None:
    """In fp16: the last one, and what it took."""
    steps = [step for step in stage.lead.steps if step.loss_scale is not None]
    if not steps:
        return None
    num_skipped = sum(bool(step.skipped) for step in steps)
    skipped = f"{num_skipped} of {len(steps)} steps skipped, since a gradient overflowed"
    return f"{steps[-1].loss_scale:g}, {skipped if num_skipped else 'no step skipped'}"


def _compression(compress: CompressPlan) -> str:
    settings = ", ".join(f"{key} {value:g}" for key, value in compress.args.items())
    return f"sent as {compress.name}{f' ({settings})' if settings else ''}"


def _buckets(start: Start) -> str | None:
    """Where they were asked for: what was chosen, and what for."""
    measured = start.bucket_seconds
    if measured is None:
        return None if start.bucket_bytes is None else format_bytes(start.bucket_bytes)
    if not measured:
        return "default: there are too few gradients for others"
    chosen = "default" if start.bucket_bytes is None else str(start.bucket_bytes)
    words = {size: size if size == "default" else format_bytes(int(size)) for size in [chosen, *measured]}
    passes = [f"{words[size]} {format_step_seconds(seconds)}" for size, seconds in measured.items()]
    return f"{words[chosen]}, as measured: {', '.join(passes)} a pass"


def _islands(local: IslandsPlan) -> str:
    words = f"agree every {local.sync_every} steps, outer lr {local.outer_lr:g}"
    words += f", momentum {local.outer_momentum:g}" if local.outer_momentum else ""
    words += f", {local.fragments} fragments" if local.fragments > 1 else ""
    words += f", heard {local.staleness} steps later" if local.staleness else ""
    return words + (f", sent as {local.compress}" if local.compress else "")


def _pipeline(pipeline: PipelinePlan) -> str:
    if pipeline.cut:
        return f"{pipeline.schedule}, cut before {', '.join(pipeline.cut)}"
    if not pipeline.num_blocks:
        return f"{pipeline.schedule}, cut by FLOPs"
    return f"{pipeline.schedule}, stages of {', '.join(map(str, pipeline.num_blocks))} blocks"


def _start(init: InitPlan | None) -> str | None:
    if init is None or init.found is None:
        return None
    digest = f", sha256 {init.found.digest[:12]}" if init.found.digest else ""
    revision = f", revision {init.found.revision[:12]}" if init.found.revision else ""
    return f"{init.found.words}{revision}{digest}"


def _schedule(optimizer: OptimizerPlan) -> str:
    return optimizer.own_schedule.entry if optimizer.own_schedule else optimizer.schedule


def _clipping(optimizer: OptimizerPlan) -> str:
    if optimizer.clip_value is not None:
        return f"values clipped to {optimizer.clip_value:g}"
    return f"clip {optimizer.grad_clip:g}"


def _goodput(stage: StageView) -> Piece | None:
    ledger = stage.ledger
    if ledger is None or not ledger.total or ledger.goodput_ratio is None:
        return None
    spent = [(bucket, ledger.seconds[bucket.name]) for bucket in BUCKETS]
    rows: list[list[Cell]] = [
        [bucket.name, format_seconds(seconds), f"{100 * seconds / ledger.total:.1f} %", bucket.words]
        for bucket, seconds in spent
        if seconds > 0
    ]
    whole = f"{100 * ledger.goodput_ratio:.1f} % of {format_seconds(ledger.total)} over all ranks"
    blocks: list[Piece] = [
        Facts({"goodput": whole, **_costs(ledger)}),
        Figure(shares([(bucket.colour, seconds) for bucket, seconds in spent])),
        Table(("", "Rank-seconds", "Share", ""), rows, frozenset({1, 2})),
    ]
    return Details("Where the time went", blocks)


def _costs(ledger: Ledger) -> dict[str, str]:
    """Empty where nobody said what a device costs."""
    cost, bad, per_token = ledger.cost_usd, ledger.badput_usd, ledger.usd_per_million_tokens
    if cost is None or bad is None:
        return {}
    facts = {"cost": f"{cost:.4g} USD at {ledger.price_usd_per_device_hour:.4g} a device-hour"}
    facts["lost to badput"] = f"{bad:.4g} USD"
    if per_token is not None:
        facts["per million tokens"] = f"{per_token:.4g} USD"
    return facts


def _mfu(stage: StageView) -> Piece | None:
    start = stage.start
    needed, world = start.num_flops_per_token, start.world_size
    measured = stage.lead.steps[-1].peak_flops if stage.lead.steps else None
    peak = start.peak_flops or measured
    first = start.start_step or 0  # earlier steps may have run on other hardware
    rate, mfu = throughput(step for step in stage.lead.steps if step.step > first)
    if not needed or not peak or not world or rate is None or mfu is None:
        return None
    line = (
        f"{format_count(rate)} tok/s x {format_flops(needed)}/token / ({world} x {format_flops(peak)}/s)"
        f" = {format_mfu(mfu)}"
    )
    known: dict[str, Cell] = {
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
    return Details("How MFU was computed", [Facts(known)])


def _ranks(stage: StageView) -> Piece | None:
    rows: list[list[Cell]] = [
        [
            row.rank,
            *(f"{1000 * seconds:.1f}" for seconds in (row.seconds, *row.parts, row.other)),
            shares(row.shares),
            None if row.peak_bytes is None else format_bytes(row.peak_bytes),
        ]
        for row in rank_means(stage)
    ]
    if not rows:
        return None
    head = ("Rank", "step, ms", *(name for name, _, _ in PARTS), "other", "Shares", "Peak memory")
    blocks: list[Piece] = [Table(head, rows, frozenset({0, 1, 2, 3, 4, 5, 6, 8}))]
    if stage.num_ranks > len(stage.timelines):
        blocks.append(Paragraph(f"The first {MOST_RANKS} of {stage.num_ranks} ranks.", is_faint=True))
    blocks += [Paragraph(f"{fact[0].upper()}{fact[1:]}.") for fact in _stragglers(stage)]
    load = worst_load(stage)
    if load is not None and load.slowed_us:
        blocks.append(Paragraph(f"The machine was not this run's alone: {load}."))
    return Details("Ranks: mean of a step, by cause", blocks, is_open=len(rows) <= 8)


def _starts(stage: StageView) -> Piece | None:
    rows: list[list[Cell]] = [
        [
            attempt, start.restart, timestamp(start.time), start.start_step, split_words(start),
            start.world_size, start.device, start.host, start.precision, start.torch,
        ]
        for attempt, start in stage.lead.starts
    ]  # fmt: skip
    if not rows:
        return None
    head = (
        "Attempt", "Restart", "Started", "From step", "Strategy", "Workers", "Device", "Host", "Precision",
        "torch",
    )  # fmt: skip
    table = Table(head, rows, frozenset({0, 1, 3, 5}))
    return Details(f"Attempts and restarts ({len(rows)})", [table], is_open=len(rows) > 1)


def _membership(stage: StageView) -> Piece | None:
    """Of an elastic training: who took part from when on, and what each change cost the first replica."""
    rows: list[list[Cell]] = []
    for attempt in stage.attempts:
        changes = [event for event in attempt.events if isinstance(event, Membership)]
        for change, seconds in zip(changes, costs(changes, stage.lead.steps), strict=True):
            members = ", ".join(map(str, change.members or []))
            cost = "" if seconds is None else format_seconds(seconds)
            rows.append([timestamp(change.time), change.step, members, change.why or "", cost])
    if not rows:
        return None
    table = Table(("When", "After step", "Nodes", "Why", "Cost"), rows, frozenset({1, 4}))
    return Details(f"Nodes that took part ({len(rows)} changes)", [table], is_open=True)


def _checkpoints(stage: StageView) -> Piece | None:
    """Of the records, which know how long a save took, and of the catalogue, which knows what is there."""
    there = {checkpoint.key: checkpoint for checkpoint in stage.checkpoints}
    saved = {save.key: save for save in stage.lead.saves if save.key}
    rows: list[list[Cell]] = []
    for key in [*saved, *(key for key in there if key not in saved)]:
        save, checkpoint = saved.get(key), there.get(key)
        either = checkpoint or save
        stall = save.stall_seconds if save is not None else None
        took = save.save_seconds if save is not None else None
        rows.append(
            [
                either.step if either is not None else None,
                timestamp(either.time if either is not None else None),
                None if checkpoint is None else format_bytes(checkpoint.size_bytes),
                None if stall is None else f"{1000 * stall:.0f} ms",
                None if took is None else format_seconds(took),
                "pruned" if checkpoint is None else "kept, the best" if checkpoint.best else "kept",
                key.rpartition("/checkpoints/")[2],
            ]
        )
    if not rows:
        return None
    head = ("Step", "Committed", "Size", "Stall", "Save", "State", "Key under checkpoints/")
    table = Table(head, rows, frozenset({0, 2, 3, 4}))
    return Details(f"Checkpoints ({len(rows)})", [table], is_open=len(rows) <= 12)
