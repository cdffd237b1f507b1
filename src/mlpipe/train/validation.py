"""Measuring a model on held-out samples: while it trains (`Validation`) and afterwards (train/evaluate.py).

Nothing that a training consists of is touched: no gradients, evaluation mode only as long as it measures, and
buffers, randomness and what a forward pass leaves behind are put back. So the losses with and without it are
equal, bit for bit.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mlpipe._core import records
from mlpipe._core.errors import TrainError
from mlpipe._core.gate import BUILT_IN, is_better
from mlpipe.plan.data import DataPlan
from mlpipe.plan.validation import BestPlan, MetricPlan, StopPlan, ValidatePlan
from mlpipe.plan.work import TrainPlan
from mlpipe.store import catalogue
from mlpipe.train.contract import check_call
from mlpipe.train.data.datasets import open_dataset, tokenizer_of
from mlpipe.train.data.microbatch import Microbatch, collate, own_part, uncounted
from mlpipe.train.data.tokens import open_folder
from mlpipe.train.metrics import Metrics
from mlpipe.train.model import Batch
from mlpipe.train.parallel.parallelized_model import ParallelizedModel
from mlpipe.train.parallel.rank_group import send_together
from mlpipe.train.schedules import Schedule
from mlpipe.train.seeding import seed_step
from mlpipe.train.session import Session


@dataclass(frozen=True)
class Measured:
    """Over all ranks. `values`: by name; what this model or its data do not have is absent. `num_targets`:
    those that the loss is a mean over."""

    values: dict[str, float]
    num_targets: int
    num_samples: int


class HeldOut:
    """The first `max_tokens` of the split `validation`, and what is measured on them. The loss, and where it
    is mlpipe's the perplexity and the bits per byte, are always."""

    def __init__(
        self,
        session: Session,
        plan: TrainPlan,
        data: DataPlan,
        model: ParallelizedModel,
        metrics: tuple[MetricPlan, ...],
        max_tokens: int,
    ) -> None:
        """Raises TrainError (input) for data and metrics that the model does not fit."""
        self.session, self.plan, self.data, self.model = session, plan, data, model
        module, seq_len = model.built.model, plan.model.seq_len
        self.dataset = open_dataset(data, split="validation", seq_len=seq_len)
        sample = collate(self.dataset, np.zeros(1, dtype=np.int64))
        check_call(module, sample, plan.model.build.entry)
        # mlpipe's cross-entropy, in nats a token; what a loss of one's own is of, nobody knows
        self.in_nats = not hasattr(module, "loss") and "inputs" in sample
        self.num_samples = min(len(self.dataset), max(1, max_tokens // seq_len))
        self.metrics = Metrics(metrics, session.world)
        for name in {one.name for one in metrics if one.entry is None} & {"perplexity", "bits_per_byte"}:
            if not self.in_nats or (name == "bits_per_byte" and data.tokens is None):
                raise TrainError(
                    f"this training has no {name}: its loss is not the cross-entropy of tokens",
                    where=f"metrics: {name}",
                    hint="ask for loss, or write a metric of your own",
                    kind="input",
                )

    def measure(self, schedule: Schedule, doing: str, step: int) -> Measured:
        """Every rank has the result. `doing`, `step`: for the watchdog."""
        self.metrics.begin()
        with _Outputs(self.model, bool(self.metrics.metrics)) as outputs:

            def count(microbatch: Microbatch, batch: Batch) -> None:
                if microbatch.counts:
                    self.metrics.update(outputs.taken(self.plan.model.build.entry), batch)

            after = count if self.metrics.metrics else None
            sums = schedule.forward(self._dealt(doing, step), after)
        self.session.watchdog.beat(f"{doing}: waiting for the other ranks", step, waiting=True)
        totals = torch.stack([sums.loss_sum, sums.num_targets]).cpu()
        dist.all_reduce(totals)
        total, num_targets = totals.tolist()
        loss = total / num_targets if num_targets else math.nan  # which passes no gate
        values = {"loss": loss}
        if self.in_nats:
            values["perplexity"] = math.exp(min(loss, 700.0)) if loss == loss else math.nan
        if self.in_nats and self.data.tokens is not None:
            split = open_folder(self.data.tokens).splits["validation"]
            values["bits_per_byte"] = loss / math.log(2) * split.num_tokens / split.num_bytes
        values |= self.metrics.values(lambda name: self.session.watchdog.beat(f"computing {name}", step))
        return Measured(values, int(num_targets), self.num_samples)

    def sample(self, schedule: Schedule, prompt: str, num_tokens: int, step: int) -> str | None:
        """Text that begins with `prompt`, of conversations the answer to it; None without a tokenizer, and of
        a model with a loss of its own. Every rank generates the same, since a sharded model needs all."""
        path = tokenizer_of(self.data)
        if path is None or hasattr(self.model.built.model, "loss"):
            return None
        from mlpipe.train.data.tokenizer import load_tokenizer
        from mlpipe.train.generate import (  # tokenizers costs every rank a while
            Model,
            Sampling,
            answer,
            generate,
        )

        def forward(inputs: torch.Tensor) -> torch.Tensor | None:
            self.session.watchdog.beat("generating a sample", step)
            return schedule.logits(inputs)

        world = self.session.world

        def agreed(token: int) -> int:
            told = torch.tensor([token])
            dist.broadcast(told, world.first_with_loss)
            return int(told)

        model = Model(forward, self.session.device, agreed if world.size > 1 else int)
        sampling = Sampling(num_tokens, self.plan.model.seq_len, self.plan.seed)
        if self.data.chat is not None:
            return answer(model, self.data.chat, prompt, sampling)
        return generate(model, load_tokenizer(path), prompt, sampling)

    def _dealt(self, doing: str, step: int) -> Iterator[Microbatch]:
        """The samples cut into microbatches in order, which are dealt to the data ranks. All ranks run the
        same number of forwards, since a sharded model gathers its parameters and DDP sends its buffers there:
        where there is nothing left for a rank, one that does not count."""
        world, size = self.session.world, self.plan.micro_batch
        for turn in range(math.ceil(self.num_samples / (size * world.num_data_ranks))):
            self.session.watchdog.beat(doing, step or turn)
            first = (turn * world.num_data_ranks + world.data_rank) * size
            indices = np.arange(first, min(first + size, self.num_samples))
            batch = collate(self.dataset, indices if len(indices) else np.zeros(1, dtype=np.int64))
            microbatch = own_part(batch, world, self.plan.model.seq_len)
            yield microbatch if len(indices) else uncounted(microbatch)


class _Outputs:
    """What the user's model returned last, while this is entered: its `loss` calls it, or LossModule does."""

    def __init__(self, model: ParallelizedModel, wanted: bool) -> None:
        self.model = model.built.model
        self.whole = model.built.module.whole_logits
        self.wanted = wanted
        self.last: Any = None

    def __enter__(self) -> _Outputs:
        if self.wanted:
            self.hook = self.model.register_forward_hook(self._keep)
        return self

    def __exit__(self, *_: object) -> None:
        if self.wanted:
            self.hook.remove()

    def _keep(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self.last = output

    def taken(self, entry: str) -> Any:
        """Once: the next batch has its own."""
        outputs, self.last = self.last, None
        if outputs is None:
            raise TrainError(
                "its model's `loss` does not call the model, so there are no outputs for metrics",
                where=entry,
                hint="call `self(...)` in `loss`, or measure the loss only",
                kind="input",
            )
        return self.whole(outputs)


@contextmanager
def undisturbed(model: ParallelizedModel, world_size: int) -> Iterator[None]:
    """Evaluation mode without gradients, under the buffers of rank 0, as a checkpoint has them. Afterwards
    all is as it was before."""
    training = [module for module in model.module.modules() if module.training]
    buffers = [(buffer, buffer.clone()) for buffer in model.built.module.buffers()]
    stored = [item.local for item in model.shards if item.is_buffer]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    try:
        model.module.eval()
        with torch.no_grad():
            if stored and world_size > 1:
                send_together(stored)
            yield
    finally:
        for module in training:
            module.training = True
        for buffer, before in buffers:
            buffer.copy_(before)
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)
        model.after_evaluation()
        model.waits.take()


class Judge:
    """Which validation was the best, and whether there is hope. Its state lies in every checkpoint."""

    def __init__(self, best: BestPlan | None, stop: StopPlan | None) -> None:
        self.best, self.stop = best, stop
        self.value: float | None = None  # of the best one
        self.step: int | None = None
        self.reference: float | None = None  # what has to be beaten by more than `min_delta`
        self.num_without = 0  # validations in a row that did not
        self._before: tuple[float | None, int | None] = (None, None)

    def judge(self, step: int, value: float) -> bool:
        """Whether this one is the best."""
        assert self.best is not None
        mode = self.best.mode
        if is_better(value, self.reference, mode, by=self.stop.min_delta if self.stop is not None else 0.0):
            self.reference, self.num_without = value, 0
        else:
            self.num_without += 1
        if not is_better(value, self.value, mode):
            return False
        self._before = self.value, self.step
        self.value, self.step = value, step
        return True

    def forget(self, step: int) -> None:
        """The checkpoint of the best one could not be saved: the next one need not be better than that."""
        if self.step == step:
            self.value, self.step = self._before

    @property
    def why_stop(self) -> str | None:
        """In words, or None."""
        if self.stop is None or self.best is None or self.num_without < self.stop.patience:
            return None
        than = "anything finite" if self.reference is None else f"{self.reference:.4g}"
        if self.reference is not None and self.stop.min_delta:  # the best one may be among them
            than += f" by more than {self.stop.min_delta:g}"
        elif self.value is not None:
            than = f"{self.value:.4g} at step {self.step}"
        what = "validation was" if self.num_without == 1 else "validations were"
        return f"{self.best.metric}: the last {self.num_without} {what} no better than {than}"

    def state(self) -> dict[str, Any]:
        """JSON."""
        if self.best is None:
            return {}
        return {
            "metric": self.best.metric,
            "mode": self.best.mode,
            "value": self.value,
            "step": self.step,
            "reference": self.reference,
            "num_without": self.num_without,
        }

    def load(self, state: dict[str, Any]) -> None:
        """From what `state` gave; of another metric nothing is known."""
        if self.best is None or (state.get("metric"), state.get("mode")) != (
            self.best.metric,
            self.best.mode,
        ):
            return
        self.value, self.step = state["value"], state["step"]
        self.reference, self.num_without = state["reference"], state["num_without"]


class Validation:
    """Of a training: when, and what follows. `stopped`: why the training is over before its last step."""

    def __init__(
        self, session: Session, plan: TrainPlan, validate: ValidatePlan, model: ParallelizedModel
    ) -> None:
        self.session, self.plan, self.validate, self.model = session, plan, validate, model
        self.held_out = HeldOut(session, plan, plan.data, model, validate.metrics, validate.max_tokens)
        self.judge = Judge(validate.best, validate.stop)
        self.last_step = 0
        self.last_values: dict[str, float] = {}
        self.stopped: str | None = None

    def load(self, scalars: dict[str, Any]) -> None:
        """Of the checkpoint that is gone on from."""
        state = scalars.get("validation") or {}
        self.last_step = state.get("step", 0)
        self.last_values = {
            name: math.nan if value is None else value for name, value in state.get("metrics", {}).items()
        }
        self.judge.load(state.get("judge", {}))
        if self.session.world.rank == 0 and self.judge.step is not None:  # whose word holds
            self._look_for_best()
        self.stopped = self.judge.why_stop
        self._again_without_best(scalars.get("step"))

    def _again_without_best(self, step: int | None) -> None:
        """Where nothing is left to train and no best checkpoint is there any more, what there is is measured
        again, and is the best. Rank 0 has looked."""
        if self.judge.best is None or step is None or (step < self.plan.steps and self.stopped is None):
            return
        told = torch.tensor([float(self.judge.step is None)])
        dist.broadcast(told, 0)
        if told.item():
            self.last_step = 0

    def _look_for_best(self) -> None:
        """The best checkpoint may be gone, or never have been saved: then the one that is there counts, and
        without any the next validation is the best. Of patience nothing comes back."""
        store, judge = self.session.store, self.judge
        there = catalogue.best(store, self.session.plan.stage_key)
        if there is not None and there.step == judge.step:
            return
        judge.value = judge.step = None
        if there is not None and judge.best is not None:
            why = catalogue.read_best(store, there.key).get("judge")
            match why:
                case {"metric": judge.best.metric, "mode": judge.best.mode, "value": float(value)}:
                    judge.value, judge.step = value, there.step

    def scalars(self) -> dict[str, Any]:
        """For a checkpoint: of the last validation, which was of `step`, at its step or an earlier one."""
        finite = {name: value if math.isfinite(value) else None for name, value in self.last_values.items()}
        return {"step": self.last_step, "metrics": finite, "judge": self.judge.state()}

    def is_due(self, step: int) -> bool:
        """Whether `step`, which is done, is to be validated, and is not yet."""
        every = self.validate.every_steps
        return step > self.last_step and (step % every == 0 or step == self.plan.steps)

    def run(self, schedule: Schedule, step: int) -> records.Validation:
        """After `step`. Whether it is the best so far, all ranks agree."""
        began = time.perf_counter()
        validate = self.validate
        with undisturbed(self.model, self.session.world.size):
            seed_step(self.plan.seed, 0, self.session.world.data_rank)
            measured = self.held_out.measure(schedule, "validating", step)
            sample = None
            if validate.sample is not None:
                sample = self.held_out.sample(schedule, validate.sample, validate.generate_tokens, step)
        wanted = [one.name for one in validate.metrics if one.entry is None]
        values = {
            name: value for name, value in measured.values.items() if name not in BUILT_IN or name in wanted
        }
        best = self._judged(step, values)
        self.last_step, self.last_values = step, values
        lead = self.session.rank == 0
        return records.Validation(
            step=step,
            metrics=values if lead else None,
            num_samples=measured.num_samples,
            best=None if validate.best is None else best,
            seconds=time.perf_counter() - began,
            sample=sample if lead else None,
        )

    def _judged(self, step: int, values: dict[str, float]) -> bool:
        """By rank 0, whose word holds: a metric of the user's may differ in its last bit elsewhere."""
        if self.judge.best is None:
            return False
        metric = self.judge.best.metric
        if metric not in values:
            raise TrainError(
                f"there is no metric {metric!r}, there are {', '.join(values)}",
                where="validate.best.metric",
                hint="name one of these",
                kind="input",
            )
        best = self.judge.judge(step, values[metric])
        told = torch.tensor([float(best), float(self.judge.why_stop is not None)])
        dist.broadcast(told, 0)
        best, over = map(bool, told.tolist())
        if over:
            self.stopped = self.judge.why_stop or f"{metric}: rank 0 says so"
        return best
