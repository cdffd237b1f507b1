"""Validation loss of a checkpoint, under the strategy that trained it, and a line of generated text."""

from __future__ import annotations

import math
import shlex
import time

import numpy as np
import torch
import torch.distributed as dist

from mlpipe._core.errors import DamagedError, TrainError
from mlpipe._core.records import End, Evaluation
from mlpipe.kinds.evaluate.plan import EvaluatePlan
from mlpipe.plan.gate import check, parse_gate
from mlpipe.plan.plan import Plan
from mlpipe.store import catalogue
from mlpipe.train.contract import check_call
from mlpipe.train.data import collate, open_dataset, to_device
from mlpipe.train.generate import generate
from mlpipe.train.model import build_model
from mlpipe.train.outcome import Outcome
from mlpipe.train.parallel.apply import parallelize
from mlpipe.train.resuming import load_or_damage
from mlpipe.train.session import Session
from mlpipe.train.tokenizer import load_tokenizer
from mlpipe.train.tokens import open_folder


def evaluate(session: Session, plan: EvaluatePlan) -> Outcome:
    """Raises nothing for a gate that does not hold: that is an outcome "failed" of kind "failed"."""
    part = plan.train
    stage_key = f"runs/{session.plan.run_id}/stages/{plan.train_stage}"
    found = catalogue.latest(session.store, stage_key)
    if found is None:
        raise TrainError(
            f"stage {plan.train_stage} has no committed checkpoint to evaluate",
            where=stage_key,
            kind="input",
        )
    bf16 = part.precision == "bf16"
    built = build_model(part.model, seed=part.seed, device_type=session.device.type, bf16=bf16)
    parallel = parallelize(built, session.world, part)
    _, damage = load_or_damage(session.store, found.key, parallel.owned)
    if damage:
        run = session.plan.run_id
        raise DamagedError(
            f"the checkpoint of step {found.step} is damaged: {damage}",
            where=found.key,
            hint=f"train again from the one before: mlpipe checkpoints discard {run} {found.step}, "
            f"then mlpipe resume {run}",
        )
    for item in parallel.owned:
        item.local.requires_grad_(False)
    built.module.eval()
    session.record_start(part, start_step=found.step, resumed_from=found.key, num_params=None)
    metrics = _validation_loss(session, plan, built.model, parallel.module)
    sample = _sample(session, plan, built.model, parallel.module)
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
    session.recorder.write(End(outcome="done" if passed else "failed", step=found.step, message=message))
    return Outcome(
        "done" if passed else "failed",
        found.step,
        session.rank,
        kind=None if passed else "failed",
        message=message,
        hint=None if passed else _how_to_pass(session.plan, plan, found.step, metrics),
        checkpoint=found.key,
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


@torch.no_grad()
def _validation_loss(
    session: Session, plan: EvaluatePlan, model: torch.nn.Module, module: torch.nn.Module
) -> dict[str, float | None]:
    """Of the first `max_tokens` of the split, each sample once: the split is cut into microbatches in order,
    which are dealt to the data ranks. All ranks run the same number of forwards, since a sharded model
    gathers its parameters and DDP sends its buffers there; the result of a forward for the others' sake is
    dropped."""
    part = plan.train
    dataset = open_dataset(plan.data, split="validation", seq_len=part.model.seq_len)
    one = collate(dataset, np.zeros(1, dtype=np.int64))
    check_call(model, one, part.model.build.entry)
    # mlpipe's cross-entropy, in nats a token; what a loss of one's own is of, nobody knows
    in_nats = not hasattr(model, "loss") and "inputs" in one
    num_samples = min(len(dataset), max(1, plan.max_tokens // part.model.seq_len))
    num_batches = math.ceil(num_samples / part.micro_batch)
    num_ranks = session.world.num_data_ranks
    totals = torch.zeros(2, dtype=torch.float64)
    for number in range(math.ceil(num_batches / num_ranks)):
        session.watchdog.beat("evaluating", number)
        first = (number * num_ranks + session.world.data_rank) * part.micro_batch
        indices = np.arange(first, min(first + part.micro_batch, num_samples))
        if not len(indices):
            module(to_device(one, session.device))
            continue
        loss, count = module(to_device(collate(dataset, indices), session.device))
        totals += torch.tensor([float(loss), float(count)], dtype=torch.float64)
    dist.all_reduce(totals)
    total, num_tokens = totals.tolist()
    loss = total / max(1.0, num_tokens)
    bits_per_byte = None
    if in_nats and plan.data.tokens is not None:
        split = open_folder(plan.data.tokens).splits["validation"]
        bits_per_byte = loss / math.log(2) * split.num_tokens / split.num_bytes
    return {
        "val_loss": loss,
        "val_perplexity": math.exp(min(loss, 700.0)) if in_nats else None,
        "val_bits_per_byte": bits_per_byte,
        "num_tokens": int(num_tokens),
    }


def _sample(
    session: Session, plan: EvaluatePlan, model: torch.nn.Module, module: torch.nn.Module
) -> str | None:
    """A line of text. Every rank generates the same, since a sharded model needs all of them."""
    if plan.prompt is None or plan.data.tokens is None or hasattr(model, "loss"):
        return None
    path = open_folder(plan.data.tokens).tokenizer_path
    if path is None:
        return None
    session.watchdog.beat("generating a sample", 0)
    return generate(
        lambda inputs: module({"inputs": inputs}),
        load_tokenizer(path),
        plan.prompt,
        max_new_tokens=plan.generate_tokens,
        max_context=plan.train.model.seq_len,
        seed=plan.train.seed,
        device=session.device,
    )
