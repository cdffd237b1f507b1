"""Validation loss of a checkpoint, under the strategy that trained it, and a line of generated text."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mlpipe._core.errors import DamagedError, TrainError
from mlpipe._core.gate import check, parse_gate
from mlpipe._core.records import End, Evaluation
from mlpipe.kinds.evaluate.plan import EvaluatePlan
from mlpipe.plan.plan import Plan, TrainPlan
from mlpipe.store import catalogue
from mlpipe.store.manifest import Manifest
from mlpipe.train.contract import check_call
from mlpipe.train.data import Microbatch, collate, num_tokens, open_dataset
from mlpipe.train.generate import generate
from mlpipe.train.model import build_model
from mlpipe.train.optim.ema import averaged
from mlpipe.train.outcome import Outcome
from mlpipe.train.parallel.apply import parallelize
from mlpipe.train.parallel.parallelized_model import ParallelizedModel
from mlpipe.train.resuming import load_or_damage
from mlpipe.train.schedules.accumulate import Accumulate
from mlpipe.train.session import Session
from mlpipe.train.shards import LocalShard
from mlpipe.train.tokenizer import load_tokenizer
from mlpipe.train.tokens import open_folder


def evaluate(session: Session, plan: EvaluatePlan) -> Outcome:
    """Raises nothing for a gate that does not hold: that is an outcome "failed" of kind "failed"."""
    part = plan.train
    stage_key = f"runs/{session.plan.run_id}/stages/{plan.train_stage}"
    latest = catalogue.latest(session.store, stage_key)
    if latest is None:
        raise TrainError(
            f"stage {plan.train_stage} has no committed checkpoint to evaluate",
            where=stage_key,
            kind="input",
        )
    bf16 = part.precision == "bf16"
    built = build_model(part.model, seed=part.seed, device_type=session.device.type, bf16=bf16)
    model = parallelize(built, session.world, part)
    key = latest.key

    def weights_of(manifest: Manifest) -> list[LocalShard]:
        return averaged(model.shards, manifest, key) if plan.weights == "ema" else model.shards

    _, damage = load_or_damage(session.store, key, weights_of)
    if damage:
        run = session.plan.run_id
        raise DamagedError(
            f"the checkpoint of step {latest.step} is damaged: {damage}",
            where=latest.key,
            hint=f"train again from the one before: mlpipe checkpoints discard {run} {latest.step}, "
            f"then mlpipe resume {run}",
        )
    for item in model.shards:
        item.local.requires_grad_(False)
    built.module.eval()
    session.record_start(part, start_step=latest.step, resumed_from=latest.key, num_params=None)
    metrics = _validation_loss(session, plan, model)
    sample = _sample(session, plan, model)
    passed = _passes(plan, metrics)
    session.recorder.write(
        Evaluation(
            val_loss=metrics["val_loss"],
            val_perplexity=metrics["val_perplexity"],
            val_bits_per_byte=metrics["val_bits_per_byte"],
            num_tokens=metrics["num_tokens"],
            gate=plan.gate,
            passed=passed,
            sample=sample,
        )
    )
    message = "" if passed else _failed_gate(plan, metrics)
    session.recorder.write(End(outcome="done" if passed else "failed", step=latest.step, message=message))
    return Outcome(
        "done" if passed else "failed",
        latest.step,
        session.rank,
        kind=None if passed else "failed",
        message=message,
        hint=None if passed else _how_to_pass(session.plan, plan, latest.step, metrics),
        checkpoint=latest.key,
        time=time.time(),
        details={"metrics": metrics, "passed": passed, "sample": sample},
    )


def _passes(plan: EvaluatePlan, metrics: dict[str, float | None]) -> bool:
    if plan.gate is None:
        return True
    gate = parse_gate(plan.gate)
    value = metrics[gate.metric]
    if value is None:
        raise TrainError(
            f"the gate asks for {gate.metric}, which this evaluation does not have",
            where="evaluate.gate",
            hint="val_perplexity needs mlpipe's cross-entropy, val_bits_per_byte also token files; ask for "
            "val_loss",
            kind="input",
        )
    return check(gate, {gate.metric: value})


def _how_to_pass(plan: Plan, part: EvaluatePlan, step: int, metrics: dict[str, float | None]) -> str:
    """Commands, from any folder."""
    resume = f"mlpipe resume {plan.run_id} --store {shlex.quote(plan.store_url)} --set"
    hint = f"train longer: {resume} stages.{part.train_stage}.train.steps={2 * max(step, part.train.steps)}"
    gate = parse_gate(part.gate or "")
    value = metrics[gate.metric]
    if value is None or not math.isfinite(value):
        return hint
    limit = float(f"{value * (1.01 if gate.op.startswith('<') else 0.99):.3g}")
    change = f"stages.{plan.stage}.evaluate.gate={gate.metric} {gate.op} {limit}"
    return f"{hint}\n  or ask for less: {resume} {shlex.quote(change)}"


def _failed_gate(plan: EvaluatePlan, metrics: dict[str, float | None]) -> str:
    values = ", ".join(f"{name} = {value:.4f}" for name, value in metrics.items() if value is not None)
    return f"the gate `{plan.gate}` does not hold: {values}"


def _validation_loss(
    session: Session, plan: EvaluatePlan, model: ParallelizedModel
) -> dict[str, float | None]:
    """Of the first `max_tokens` of the split, each sample once."""
    part, module = plan.train, model.built.model
    dataset = open_dataset(plan.data, split="validation", seq_len=part.model.seq_len)
    sample = collate(dataset, np.zeros(1, dtype=np.int64))
    check_call(module, sample, part.model.build.entry)
    # mlpipe's cross-entropy, in nats a token; what a loss of one's own is of, nobody knows
    in_nats = not hasattr(module, "loss") and "inputs" in sample
    num_samples = min(len(dataset), max(1, plan.max_tokens // part.model.seq_len))
    sums = Accumulate(model, session.world).forward(_dealt(session, part, dataset, num_samples))
    totals = torch.stack([sums.loss_sum, sums.num_targets]).cpu()
    dist.all_reduce(totals)
    total, num_targets = totals.tolist()
    loss = total / max(1.0, num_targets)
    bits_per_byte = None
    if in_nats and plan.data.tokens is not None:
        split = open_folder(plan.data.tokens).splits["validation"]
        bits_per_byte = loss / math.log(2) * split.num_tokens / split.num_bytes
    return {
        "val_loss": loss,
        "val_perplexity": math.exp(min(loss, 700.0)) if in_nats else None,
        "val_bits_per_byte": bits_per_byte,
        "num_tokens": int(num_targets),
    }


def _dealt(session: Session, part: TrainPlan, dataset: Any, num_samples: int) -> Iterator[Microbatch]:
    """The first `num_samples` cut into microbatches in order, which are dealt to the data ranks. All ranks
    run the same number of forwards, since a sharded model gathers its parameters and DDP sends its buffers
    there: where there is nothing left for a rank, one that does not count."""
    world, seq_len = session.world, part.model.seq_len
    for turn in range(math.ceil(num_samples / (part.micro_batch * world.num_data_ranks))):
        session.watchdog.beat("evaluating", turn)
        first = (turn * world.num_data_ranks + world.data_rank) * part.micro_batch
        indices = np.arange(first, min(first + part.micro_batch, num_samples))
        batch = collate(dataset, indices if len(indices) else np.zeros(1, dtype=np.int64))
        yield Microbatch(batch, num_tokens(batch, seq_len), counts=bool(len(indices)))


def _sample(session: Session, plan: EvaluatePlan, model: ParallelizedModel) -> str | None:
    """A line of text. Every rank generates the same, since a sharded model needs all of them."""
    if plan.prompt is None or plan.data.tokens is None or hasattr(model.built.model, "loss"):
        return None
    path = open_folder(plan.data.tokens).tokenizer_path
    if path is None:
        return None
    session.watchdog.beat("generating a sample", 0)
    return generate(
        lambda inputs: model.module({"inputs": inputs}),
        load_tokenizer(path),
        plan.prompt,
        max_new_tokens=plan.generate_tokens,
        max_context=plan.train.model.seq_len,
        seed=plan.train.seed,
        device=session.device,
    )
