"""The training loop: one update after another. No technique shows here (parallel/apply.py), nor how the
microbatches of a step are run (schedules/)."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from mlpipe._core.errors import TrainError
from mlpipe._core.records import End, Step, StopSignal
from mlpipe.plan.work import TrainPlan
from mlpipe.store import catalogue
from mlpipe.train.checkpoint import Checkpointer
from mlpipe.train.data.datasets import fingerprint
from mlpipe.train.data.loader import ReadAhead
from mlpipe.train.data.microbatch import Microbatch
from mlpipe.train.optim.clipping import clip_factor, clip_values, squared_norm
from mlpipe.train.optim.learning_rate import learning_rate
from mlpipe.train.optim.update import Update, averages_of, finish
from mlpipe.train.outcome import Outcome
from mlpipe.train.parallel.parallelized_model import ParallelizedModel
from mlpipe.train.profiling import Profiling
from mlpipe.train.recording import Recording, of_samples
from mlpipe.train.resuming import Position, optimizer_scalars, scalars_of_stages, stored
from mlpipe.train.schedules import LossSum, Schedule
from mlpipe.train.seeding import seed_step
from mlpipe.train.session import Session
from mlpipe.train.shards import clear_gradients

if TYPE_CHECKING:
    from mlpipe.train.loss_scale import LossScale
    from mlpipe.train.node_sums import NodeSums
    from mlpipe.train.validation import Validation


@dataclass
class Loop:
    """What a step needs. `progress[0]` follows the last finished step."""

    session: Session
    plan: TrainPlan
    model: ParallelizedModel
    update: Update
    schedule: Schedule
    reader: ReadAhead
    checkpointer: Checkpointer
    recording: Recording
    position: Position
    progress: list[int]
    profiling: Profiling
    validation: Validation | None = None
    loss_scale: LossScale | None = None  # None: of a precision that needs none
    first_samples: str | None = None  # digests of the sources', of data sets of the user's own
    sums: NodeSums | None = None  # None: of ranks on several nodes, or that tell each other more
    last_save: float = field(default_factory=time.monotonic)

    def run(self) -> Outcome:
        """To the last step, or to the one after which the ranks agreed to stop, or gave up hope."""
        position, plan = self.position, self.plan
        stopping = False
        if position.step >= plan.steps or self.early():
            # nothing to do, but rank 0 has the store that others still look for
            dist.all_reduce(torch.zeros(1))
            self.session.stop.begun.set()
        first = position.step + 1
        if self.is_validation_due(stopping) and self.validate():  # it was saved before that
            self.save(best=True)
        while position.step < plan.steps and not (stopping or self.early()):
            self.progress[0] = position.step
            self.profiling.before(position.step + 1, self)
            stopping, save_now = self.step()
            self.profiling.after(position.step)
            if position.step == first:  # what lives now stays: later collections need not walk through it all
                gc.collect()
                gc.freeze()
            best = self.is_validation_due(stopping) and self.validate()
            if save_now or stopping or best or position.step == plan.steps or self.early():
                self.save(best=best)
        self.profiling.finish()
        self.finish_saving()
        if self.recording.failed_saves:
            raise self.recording.failed_saves[-1]
        key = self.last_key()
        early = self.early() if position.step < plan.steps else ""
        message = f"stopped early at step {position.step} of {plan.steps}: {early}" if early else ""
        outcome = "done" if early or position.step >= plan.steps else "saved"
        self.recording.end(End(outcome=outcome, step=position.step, message=message))
        return Outcome(
            outcome, position.step, self.session.rank, message=message, checkpoint=key, time=time.time()
        )

    def finish_saving(self) -> None:
        """Until the last checkpoint is committed."""
        self.session.watchdog.beat("committing the last checkpoint", self.position.step)
        self.checkpointer.finish()

    def gradients(self, number: int, batches: Sequence[Microbatch]) -> LossSum:
        """Of step `number`."""
        return self.schedule.forward_backward(batches)

    def total(self, totals: Tensor) -> None:
        """Loss sum, targets, squared norm, tokens, and who wants to stop and to save, summed in place."""
        if self.sums is None:
            dist.all_reduce(totals)
        else:
            self.sums.sum_(totals)

    @property
    def num_gradient_ranks(self) -> int:
        """Over how many ranks gradients are averaged, of those whose targets are summed."""
        return self.session.world.num_gradient_ranks

    def is_finite(self, *totals: float) -> bool:
        """Whether loss, targets and norm are."""
        return all(map(math.isfinite, totals))

    def more_fields(self) -> dict[str, Any]:
        """Of a step's record."""
        return self.model.step_metrics()

    def early(self) -> str:
        """Why the training is over before its last step, else empty."""
        return (self.validation.stopped if self.validation is not None else None) or ""

    def is_validation_due(self, stopping: bool) -> bool:
        """Whoever is told to stop saves first; what is due is done by whoever goes on."""
        step = self.position.step
        due = self.validation is not None and self.validation.is_due(step)
        return due and (not stopping or step >= self.plan.steps)

    def validate(self) -> bool:
        """Whether this is the best so far."""
        assert self.validation is not None
        self.recording.validating()
        averaged: AbstractContextManager[None] = nullcontext()
        if averages := averages_of(self.update):  # which is what is measured then
            from mlpipe.train.optim.averages import swapped_in

            self.checkpointer.wait_for_staging()
            averaged = swapped_in(averages, self.model)
        with averaged:
            record = self.validation.run(self.schedule, self.position.step)
        self.model.waits.take()  # of gathers after the averages went back: no part of the next step
        self.recording.validated(record)
        return bool(record.best)

    def step(self) -> tuple[bool, bool]:
        """One update. Returns whether the ranks agreed to stop, and to save, after it."""
        session, plan, position, world = self.session, self.plan, self.position, self.session.world
        number = position.step + 1
        session.watchdog.beat("reading data", number)
        began = time.perf_counter()
        batches = self.reader.take(number, position.samples)
        data_done = time.perf_counter()

        data_rank, num_data_ranks = self.reader.loader.share
        stream = data_rank + num_data_ranks * world.coordinates["pp"]  # each stage draws its own
        seed_step(plan.seed, number, stream)
        sums = self.gradients(number, batches)
        squared, reading = squared_norm(self.model.shards), 0.0
        if number < plan.steps:
            session.watchdog.beat("reading data", number + 1)
            reading = self.reader.read(number + 1, position.samples + plan.global_batch)
        session.watchdog.beat("waiting for the device", number, waiting=True)
        # Three numbers in one transfer: each makes the host wait for all that the device has still to do.
        local = torch.stack([sums.loss_sum, sums.num_targets, squared]).tolist()
        computed = time.perf_counter()

        session.watchdog.beat("agreeing with the other ranks", number, waiting=True)
        wants_stop = session.stop.requested()
        wants_save = world.rank == 0 and self.is_save_due(number)
        # Rank 0's alone, in one number: a step that nobody profiles sends no more.
        wants = int(wants_save) + 2 * int(self.profiling.asked())
        asked = [float(wants_stop), float(wants)]
        totals = torch.tensor([*local, float(sums.num_tokens), *asked], dtype=torch.float64)
        self.total(totals)
        session.stop.begun.set()
        agreed = time.perf_counter()
        total_loss, total_targets, total_squared, total_tokens, stop, asks = totals.tolist()
        # Techniques average over ranks; the loss is a mean over the global batch's targets.
        loss_scale = self.loss_scale
        scale = self.num_gradient_ranks / max(total_targets, 1.0)
        if loss_scale is not None:
            scale /= loss_scale.factor
        grad_norm = total_squared**0.5 * scale
        loss = total_loss / max(total_targets, 1.0)
        busy = computed - data_done - reading
        skipped = not self.is_finite(total_loss, total_targets, total_squared)
        record = Step(
            step=number,
            loss=loss,
            grad_norm=grad_norm,
            tokens=sums.num_tokens,
            target_tokens=int(local[1]) if math.isfinite(local[1]) else None,
            seconds=agreed - began,
            data_seconds=data_done - began + reading,
            compute_seconds=busy,
            collective_seconds=agreed - computed,
            memory_bytes=None,
            loss_scale=None if loss_scale is None else loss_scale.scale,
            skipped=None if loss_scale is None else skipped,
            **of_samples(batches),
        )
        if skipped and (loss_scale is None or loss_scale.is_hopeless()):
            self.checkpointer.finish()  # of an earlier step, sound, and perhaps the last good one
            self.recording.step(record, total_tokens)
            raise self.not_finite(number, local[0])
        scale *= clip_factor(grad_norm, plan.optimizer.grad_clip)
        if plan.optimizer.clip_value is not None and not skipped:
            clip_values(self.model.shards, plan.optimizer.clip_value / scale)
        stalled = self.checkpointer.wait_for_staging()
        lr = learning_rate(plan.optimizer, number, plan.steps)
        updating = time.perf_counter()
        if not skipped:
            self.update.step(lr=lr, scale=scale)
        if loss_scale is not None:
            loss_scale.update(overflowed=skipped)
        if number == plan.steps:
            finish(self.update)
        clear_gradients(self.model.shards)
        self.model.after_step()
        ended = time.perf_counter()

        position.step = number
        position.samples += plan.global_batch
        self.checkpointer.poll()
        done = replace(
            record,
            time=time.time(),
            lr=None if skipped else lr,
            seconds=ended - began,
            compute_seconds=busy + ended - updating,
            checkpoint_seconds=stalled,
            **self.more_fields(),
        )
        self.recording.step(done, total_tokens)
        if stop:
            session.recorder.write(StopSignal(step=number, signal="SIGTERM"))
        if int(asks) & 2:
            self.profiling.agreed(number)
        return bool(stop), bool(int(asks) & 1)

    def is_save_due(self, step: int) -> bool:
        """Whether the plan wants a checkpoint after `step`."""
        every = self.plan.checkpoint
        if every.every_steps is not None:
            return step % every.every_steps == 0
        return time.monotonic() - self.last_save >= (every.every_seconds or 0)

    def save(self, *, best: bool = False) -> None:
        """Begins to save what there is after the last update; `best`: to be kept as the best."""
        position = self.position
        self.session.watchdog.beat("saving", position.step)
        self.last_save = time.monotonic()
        scalars: dict[str, Any] = {
            "step": position.step,
            "steps": self.plan.steps,
            "samples": position.samples,
            "seed": self.plan.seed,
            "strategy": self.plan.strategy,
            "world_size": self.session.world.size,
            "seq_len": self.plan.model.seq_len,
            "data_digest": self.plan.data.digest,
            "meaning": self.plan.meaning,
            "model": {
                "preset": self.plan.model.preset,
                "entry": self.plan.model.build.entry,
                "args": self.plan.model.build.args,
            },
            "tied": self.model.tied(),
            "optimizer": optimizer_scalars(
                self.plan.optimizer, scalars_of_stages(self.update, self.session.world)
            ),
        }
        if (files := fingerprint(self.reader.loader.dataset)) is not None:
            scalars["data_files"] = files
        if self.first_samples is not None:
            scalars["first_samples"] = self.first_samples
        if (streams := self.reader.state(position.step)) is not None:
            scalars["streams"] = streams
        if self.model.kept is not None:
            scalars["kept"] = self.model.kept.scalars()
        if self.model.bucket_choice is not None:
            scalars["buckets"] = self.model.bucket_choice
        if self.loss_scale is not None:
            scalars |= self.loss_scale.scalars()
        if self.plan.adapter is not None:
            scalars["adapter"] = self.plan.adapter._asdict()
        if (init := self.plan.init_from) is not None:
            scalars["init_from"] = init._asdict() | {"found": init.found and init.found._asdict()}
        if self.validation is not None:
            scalars["validation"] = self.validation.scalars()
        self.checkpointer.save(position.step, stored(self.model, self.update), scalars, best=best)

    def last_key(self) -> str | None:
        """Of the stage's newest committed checkpoint."""
        latest = catalogue.latest(self.session.store, self.session.plan.stage_key)
        return latest.key if latest else None

    def not_finite(self, step: int, local_loss: float) -> TrainError:
        """Names the ranks whose own loss is not finite; of a gradient all ranks have a part by now. A restart
        would only repeat it."""
        mine = torch.tensor([float(math.isfinite(local_loss))])
        everyone = [torch.zeros(1) for _ in range(self.session.world.size)]
        dist.all_gather(everyone, mine)
        ranks = [rank for rank, finite in enumerate(everyone) if not finite.item()]
        named = f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
        hint = (
            "the last good checkpoint is kept; lower optimizer.lr, raise warmup_steps or look at the "
            "data of this step, then `mlpipe resume`"
        )
        if self.loss_scale is not None:
            hint = (
                "no loss scale is small enough: what overflows are values of the model itself; the last good "
                "checkpoint is kept: resume with precision: bf16 or fp32"
            )
        error = TrainError(
            f"the loss is not finite at step {step} on {named}"
            if ranks
            else f"the gradient is not finite at step {step}, though the loss is",
            where=f"step {step}",
            hint=hint,
        )
        error.fatal, error.cause = True, "not_finite"  # type: ignore[attr-defined]
        return error
