"""Validation loss and other metrics of a checkpoint, under the strategy that trained it, and a line of
generated text."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from mlpipe._core.errors import DamagedError, TrainError
from mlpipe._core.gate import BUILT_IN, METRICS, check, parse_gate
from mlpipe._core.records import End, Evaluation, Record, Start
from mlpipe._core.serial import from_plain
from mlpipe.kinds.evaluate.plan import EvaluatePlan
from mlpipe.plan.model import InitPlan
from mlpipe.plan.plan import Plan
from mlpipe.plan.work import TrainPlan
from mlpipe.store import catalogue
from mlpipe.store.catalogue import Checkpoint
from mlpipe.store.manifest import Manifest
from mlpipe.train.data.datasets import open_dataset
from mlpipe.train.data.microbatch import collate
from mlpipe.train.model import build_model
from mlpipe.train.optim.ema import averaged
from mlpipe.train.outcome import Outcome
from mlpipe.train.parallel.apply import parallelize
from mlpipe.train.parallel.parallelized_model import ParallelizedModel
from mlpipe.train.resuming import load_or_damage
from mlpipe.train.schedules.make import make_schedule
from mlpipe.train.session import Session
from mlpipe.train.shards import LocalShard
from mlpipe.train.validation import HeldOut

Values = dict[str, float | None]
Tell = Callable[[Record], None]


def evaluate(session: Session, plan: EvaluatePlan) -> Outcome:
    """Raises nothing for a gate that does not hold: that is an outcome "failed" of kind "failed"."""
    part = plan.train
    stage_key = f"runs/{session.plan.run_id}/stages/{plan.train_stage}"
    find = catalogue.best if plan.checkpoint == "best" else catalogue.latest
    chosen = find(session.store, stage_key)
    if chosen is None:
        committed = "best" if plan.checkpoint == "best" else "committed"
        raise TrainError(
            f"stage {plan.train_stage} has no {committed} checkpoint to evaluate",
            where=stage_key,
            kind="input",
        )
    if plan.data.chat is not None and plan.data.chat.validation is not None:
        from mlpipe.train.data.chat.tokenised import tokenise  # with tokenizers and jinja2

        beat = session.watchdog.beat
        tokenise(plan.data.chat, plan.data.chat.validation, lambda: beat("tokenising conversations", 0))
    built = build_model(part.model, seed=part.seed, device_type=session.device.type, precision=part.precision)
    if part.pipeline is not None and not part.pipeline.num_blocks:
        from mlpipe.train.parallel.even_stages import with_cut

        held_out = open_dataset(plan.data, split="validation", seq_len=part.model.seq_len)
        sample = collate(held_out, np.zeros(1, dtype=np.int64))
        part = part._replace(pipeline=with_cut(part, built.model, sample))
    model = parallelize(built, session.world, part)
    key = chosen.key
    if part.adapter is not None:
        _read_base(session, part, model, key)

    def weights_of(manifest: Manifest) -> list[LocalShard]:
        own = model.stored()
        return averaged(own, manifest, key) if plan.weights == "ema" else own

    _, damage = load_or_damage(session.store, key, weights_of)
    if damage:
        run = session.plan.run_id
        raise DamagedError(
            f"the checkpoint of step {chosen.step} is damaged: {damage}",
            where=chosen.key,
            hint=f"train again from the one before: mlpipe checkpoints discard {run} {chosen.step}, "
            f"then mlpipe resume {run}",
        )
    for item in model.shards:
        item.local.requires_grad_(False)
    built.module.eval()
    start = session.record_start(part, start_step=chosen.step, resumed_from=chosen.key, num_params=None)
    with _told(session, plan, start) as tell:
        return _measured(session, plan, model, chosen, tell)


def _read_base(session: Session, part: TrainPlan, model: ParallelizedModel, key: str) -> None:
    """The weights that the adapters of the checkpoint `key` lie beside, by what it says of them."""
    from mlpipe.train.starting import read

    scalars = catalogue.load_manifest(session.store, key)["scalars"]
    read(session, part, model, from_plain(InitPlan, scalars["init_from"]))


def _told(session: Session, plan: EvaluatePlan, start: Start) -> AbstractContextManager[Tell]:
    if not plan.track:
        return nullcontext(lambda _: None)
    from mlpipe.train.tracking import told  # for those who asked for it

    return told(session, plan.track, start)


def _measured(
    session: Session, plan: EvaluatePlan, model: ParallelizedModel, chosen: Checkpoint, tell: Tell
) -> Outcome:
    part = plan.train
    held_out = HeldOut(session, part, plan.data, model, plan.metrics, plan.max_tokens)
    with torch.no_grad():
        schedule = make_schedule(part, model, session.world)
        measured = held_out.measure(schedule, "evaluating", 0)
    values = measured.values
    metrics: Values = {name: values.get(name.removeprefix("val_")) for name in METRICS}
    metrics["num_tokens"] = measured.num_targets
    asked = {one.name for one in plan.metrics}
    more = {name: value for name, value in values.items() if name not in BUILT_IN or name in asked}
    metrics |= more
    sample = None
    if plan.prompt is not None:
        sample = held_out.sample(schedule, plan.prompt, plan.generate_tokens, 0)
    passed = _passes(plan, metrics)
    record = session.recorder.write(
        Evaluation(
            val_loss=metrics["val_loss"],
            val_perplexity=metrics["val_perplexity"],
            val_bits_per_byte=metrics["val_bits_per_byte"],
            num_tokens=metrics["num_tokens"],
            gate=plan.gate,
            passed=passed,
            sample=sample,
            metrics=more or None,
            step=chosen.step,
        )
    )
    tell(record)
    message = "" if passed else _failed_gate(plan, metrics)
    session.recorder.write(End(outcome="done" if passed else "failed", step=chosen.step, message=message))
    return Outcome(
        "done" if passed else "failed",
        chosen.step,
        session.rank,
        kind=None if passed else "failed",
        message=message,
        hint=None if passed else _how_to_pass(session.plan, plan, chosen.step, metrics),
        checkpoint=chosen.key,
        time=time.time(),
        details={"metrics": _finite(metrics), "passed": passed, "sample": sample},
    )


def _finite(metrics: Values) -> Values:
    """None for what is not, as in records and checkpoints: JSON has no NaN."""
    return {
        name: value if value is not None and math.isfinite(value) else None for name, value in metrics.items()
    }


def _passes(plan: EvaluatePlan, metrics: Values) -> bool:
    if plan.gate is None:
        return True
    gate = parse_gate(plan.gate)
    value = metrics.get(gate.metric)
    if value is None:
        raise TrainError(
            f"the gate asks for {gate.metric}, which this evaluation does not have",
            where="evaluate.gate",
            hint="val_perplexity needs mlpipe's cross-entropy, val_bits_per_byte also token files; there are "
            + ", ".join(name for name, value in metrics.items() if value is not None),
            kind="input",
        )
    return check(gate, {gate.metric: value})


def _how_to_pass(plan: Plan, part: EvaluatePlan, step: int, metrics: Values) -> str:
    """Commands, from any folder."""
    resume = f"mlpipe resume {plan.run_id} --store {shlex.quote(plan.store_url)} --set"
    hint = f"train longer: {resume} stages.{part.train_stage}.train.steps={2 * max(step, part.train.steps)}"
    gate = parse_gate(part.gate or "")
    value = metrics[gate.metric]
    if value is None or not math.isfinite(value):
        return hint
    slack = abs(value) * (0.01 if gate.op.startswith("<") else -0.01)
    limit = float(f"{value + slack:.3g}")
    change = f"stages.{plan.stage}.evaluate.gate={gate.metric} {gate.op} {limit}"
    return f"{hint}\n  or ask for less: {resume} {shlex.quote(change)}"


def _failed_gate(plan: EvaluatePlan, metrics: Values) -> str:
    values = ", ".join(f"{name} = {value:.4f}" for name, value in metrics.items() if value is not None)
    return f"the gate `{plan.gate}` does not hold: {values}"
