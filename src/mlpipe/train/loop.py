"""The training loop. The strategy does not show here: techniques are applied in parallel/apply.py."""

from __future__ import annotations

import gc
import logging
import math
import resource
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from mlpipe._core.errors import MlpipeError, TrainError
from mlpipe._core.mfu import mfu_ratio
from mlpipe._core.records import End, Save, Step, StopSignal
from mlpipe.plan.flops import CONVENTION
from mlpipe.plan.plan import TrainPlan
from mlpipe.store import catalogue
from mlpipe.train.checkpoint import Checkpointer, Saved
from mlpipe.train.data import ReadAhead, Stream, open_dataset, to_device
from mlpipe.train.model import Batch, build_model
from mlpipe.train.optim import Optimizer, learning_rate
from mlpipe.train.outcome import Outcome
from mlpipe.train.parallel.apply import parallelize
from mlpipe.train.parallel.parallel import ParallelizedModel
from mlpipe.train.resuming import Position, resume, stored
from mlpipe.train.session import Session, seed_step
from mlpipe.train.warmup import is_due, rehearse, try_out, warm_up

_log = logging.getLogger(__name__)
_MAX_FAILED_SAVES = 3


def train(session: Session, plan: TrainPlan, progress: list[int]) -> Outcome:
    """Trains to `plan.steps`, or to the step boundary at which the ranks agreed to stop."""
    return prepare(session, plan, progress).run()


def prepare(session: Session, plan: TrainPlan, progress: list[int]) -> Loop:
    """Everything up to the first step: model, optimizer, data, and the checkpoint to go on from."""
    seed_step(plan.seed, 0, 0)
    bf16 = plan.precision == "bf16"
    dataset = open_dataset(plan.data, split="train", seq_len=plan.model.seq_len)
    built = build_model(plan.model, seed=plan.seed, device_type=session.device.type, bf16=bf16)
    num_params = sum(parameter.numel() for parameter in built.model.parameters())
    flops = try_out(plan, built.model, dataset)
    parallel = parallelize(built, session.world, plan)
    optimizer = Optimizer(plan.optimizer, parallel)
    # before the first pass, so that they do not lie among what it leaves in the heap
    optimizer.state()

    def stream_of(micro_batch: int) -> Stream:
        return Stream(
            dataset,
            seed=plan.seed,
            global_batch=plan.global_batch,
            micro_batch=micro_batch,
            data_rank=session.world.data_rank,
            num_data_ranks=session.world.num_data_ranks,
        )

    def first_batch(micro_batch: int) -> Batch:
        return to_device(stream_of(micro_batch).step(0)[0], session.device)

    if is_due(plan, session.device):
        session.watchdog.beat("warming up", 0)
        plan = warm_up(plan, parallel, optimizer, first_batch, session.device)
    elif plan.deterministic and session.world_size > 1:
        rehearse(parallel, first_batch(plan.micro_batch))
    stream = stream_of(plan.micro_batch)
    position = Position()
    agreement = session.agreement()
    session.watchdog.in_collective = lambda: parallel.waits.open
    failed_saves: list[MlpipeError] = []
    checkpointer = Checkpointer(
        session.store,
        session.plan.stage_key,
        attempt=session.plan.attempt,
        restart=session.place.restart,
        keep=plan.checkpoint.keep,
        code_digest=session.plan.code_digest,
        asynchronous=plan.checkpoint.asynchronous,
        rank=session.rank,
        world_size=session.world_size,
        agreement=agreement,
        on_saved=lambda saved: report_save(session, saved, failed_saves),
        while_waiting=lambda: session.watchdog.beat("waiting for a save", progress[0]),
    )
    restoring = time.perf_counter()
    if plan.resume or session.place.restart:
        position = resume(session, checkpointer, parallel, optimizer, agreement)
    restored = time.perf_counter()
    again: float | None = 0.0
    if plan.activation_checkpointing != "none":
        from mlpipe.train.flops import recomputed_flops_per_token

        again = recomputed_flops_per_token(plan)
    session.record_start(
        plan,
        num_params=num_params,
        num_flops_per_token=flops,
        num_hardware_flops_per_token=None if flops is None or again is None else flops + again,
        flops_convention=CONVENTION,
        peak_flops=plan.peak_flops,
        peak_name=plan.peak_name,
        start_step=position.step,
        resumed_from=position.resumed_from,
        restore_seconds=restored - restoring,
        notes=position.notes,
    )
    return Loop(
        session, plan, parallel, optimizer, stream, checkpointer, position, flops, progress, failed_saves
    )


class Loop:
    """State of the loop, so that `run` reads from top to bottom."""

    def __init__(
        self,
        session: Session,
        plan: TrainPlan,
        parallel: ParallelizedModel,
        optimizer: Optimizer,
        stream: Stream,
        checkpointer: Checkpointer,
        position: Position,
        flops_per_token: float | None,
        progress: list[int],
        failed_saves: list[MlpipeError],
    ) -> None:
        self.session = session
        self.plan = plan
        self.parallel = parallel
        self.optimizer = optimizer
        self.checkpointer = checkpointer
        self.position = position
        self.flops_per_token = flops_per_token
        self.progress = progress
        self.peak_flops = plan.peak_flops
        self.achievable_flops: float | None = None
        self.last_save = time.monotonic()
        self.failed_saves = failed_saves
        self.ahead = ReadAhead(stream, plan.seed, session.device)

    def run(self) -> Outcome:
        position, plan = self.position, self.plan
        stopping = False
        if position.step >= plan.steps:  # nothing to do, but rank 0 has the store that others still look for
            dist.all_reduce(torch.zeros(1))
        first = position.step + 1
        while position.step < plan.steps and not stopping:
            self.progress[0] = position.step
            stopping, save_now = self.step()
            if position.step == first:  # what lives now stays: later collections need not walk through it all
                gc.collect()
                gc.freeze()
            if save_now or stopping or position.step == plan.steps:
                self.save()
        self.session.watchdog.beat("committing the last checkpoint", position.step)
        self.checkpointer.finish()
        if self.failed_saves:
            raise self.failed_saves[-1]
        key = self.last_key()
        outcome = "done" if position.step >= plan.steps else "saved"
        self.session.recorder.write(End(outcome=outcome, step=position.step, message=""))
        return Outcome(outcome, position.step, self.session.rank, checkpoint=key, time=time.time())

    def step(self) -> tuple[bool, bool]:
        """One update. Returns whether the ranks agreed to stop, and to save, after it."""
        session, plan, position = self.session, self.plan, self.position
        number = position.step + 1
        session.watchdog.beat("reading data", number)
        began = time.perf_counter()
        batches = self.ahead.take(number, position.samples)
        data_done = time.perf_counter()

        seed_step(plan.seed, number, session.world.data_rank)
        loss_sum = torch.zeros((), dtype=torch.float64, device=session.device)
        count = torch.zeros((), dtype=torch.float64, device=session.device)
        for i, batch in enumerate(batches):
            session.watchdog.beat("computing", number)
            with self.parallel.gradient_sync(i == len(batches) - 1):
                loss, num_targets = self.parallel.module(to_device(batch, session.device))
                loss.backward()
            loss_sum += loss.detach()
            count += num_targets
        squared, reading = self.optimizer.squared_norm(), 0.0
        if number < plan.steps:
            session.watchdog.beat("reading data", number + 1)
            reading = self.ahead.read(number + 1, position.samples + plan.global_batch)
        session.watchdog.beat("waiting for the device", number, waiting=True)
        # Three numbers in one transfer: each makes the host wait for all that the device has still to do.
        local = torch.stack([loss_sum, count, squared]).tolist()
        computed = time.perf_counter()

        session.watchdog.beat("agreeing with the other ranks", number, waiting=True)
        wants_stop = session.stop.requested()
        wants_save = session.rank == 0 and self.is_save_due(number)
        totals = torch.tensor([*local, float(wants_stop), float(wants_save)], dtype=torch.float64)
        dist.all_reduce(totals)
        agreed = time.perf_counter()
        total_loss, total_count, squared_norm, stop, save = totals.tolist()
        # Techniques average over the data ranks; the loss is a mean over the global batch's targets.
        scale = session.world.num_data_ranks / max(total_count, 1.0)
        grad_norm = squared_norm**0.5 * scale
        loss = total_loss / max(total_count, 1.0)
        record = Step(
            step=number,
            loss=loss,
            grad_norm=grad_norm,
            tokens=plan.global_batch // plan.mesh.num_data_ranks * plan.model.seq_len,
            target_tokens=int(local[1]) if math.isfinite(local[1]) else None,
            seconds=agreed - began,
            data_seconds=data_done - began + reading,
            compute_seconds=computed - data_done - reading,
            collective_seconds=agreed - computed,
            memory_bytes=None,
        )
        if not all(map(math.isfinite, (total_loss, total_count, squared_norm))):
            self.checkpointer.finish()  # of an earlier step, sound, and perhaps the last good one
            self.record_step(record)
            raise self.not_finite(number, local[0])
        clip = plan.optimizer.grad_clip
        if clip and grad_norm > clip:
            scale *= clip / (grad_norm + 1e-6)
        stalled = self.checkpointer.before_update()
        lr = learning_rate(plan.optimizer, number, plan.steps)
        updating = time.perf_counter()
        self.optimizer.step(lr=lr, scale=scale)
        ended = time.perf_counter()

        position.step = number
        position.samples += plan.global_batch
        self.checkpointer.poll()
        self.record_step(
            replace(
                record,
                time=time.time(),
                lr=lr,
                seconds=ended - began,
                compute_seconds=computed - data_done - reading + ended - updating,
                checkpoint_seconds=stalled,
            )
        )
        if stop:
            session.recorder.write(StopSignal(step=number, signal="SIGTERM"))
        return bool(stop), bool(save)

    def record_step(self, record: Step) -> None:
        """`record`: as the loop's clock tells it. Of the seconds in forward, backward and update this rank's
        own work is what it did not wait in collectives there."""
        waited = self.parallel.waits.take()
        own = (record.compute_seconds or 0.0) - waited
        others = (record.collective_seconds or 0.0) + waited
        memory = peak_memory_bytes(self.session.device)
        record = replace(record, compute_seconds=own, collective_seconds=others, memory_bytes=memory)
        self.session.recorder.write(self.with_rates(record))

    def is_save_due(self, step: int) -> bool:
        every = self.plan.checkpoint
        if every.every_steps is not None:
            return step % every.every_steps == 0
        return time.monotonic() - self.last_save >= (every.every_seconds or 0)

    def save(self) -> None:
        position = self.position
        self.session.watchdog.beat("saving", position.step)
        self.last_save = time.monotonic()
        scalars: dict[str, Any] = {
            "step": position.step,
            "steps": self.plan.steps,
            "samples": position.samples,
            "seed": self.plan.seed,
            "strategy": self.plan.strategy,
            "world_size": self.session.world_size,
            "seq_len": self.plan.model.seq_len,
            "data_digest": self.plan.data.digest,
            "meaning": self.plan.meaning,
            "model": {
                "preset": self.plan.model.preset,
                "entry": self.plan.model.build.entry,
                "args": self.plan.model.build.args,
            },
            "tied": self.parallel.tied(),
        }
        self.checkpointer.save(position.step, stored(self.parallel, self.optimizer), scalars)

    def last_key(self) -> str | None:
        found = catalogue.latest(self.session.store, self.session.plan.stage_key)
        return found.key if found else None

    def with_rates(self, record: Step) -> Step:
        """The peak of this rank; speed and MFU of all ranks together, rank 0 only."""
        on_gpu = self.session.device.type == "cuda"
        if self.achievable_flops is None and (on_gpu or self.peak_flops is None):
            # After the first step, so that it does not come later: all ranks measure at the same time, as
            # they compute at the same time. On a GPU beside the datasheet's peak, on a CPU in its place.
            from mlpipe.train.flops import measure_peak

            dtype = torch.bfloat16 if self.plan.precision == "bf16" else torch.float32
            peak = torch.tensor([measure_peak(self.session.device, dtype)], dtype=torch.float64)
            dist.all_reduce(peak)
            self.achievable_flops = float(peak) / self.session.world_size
            self.peak_flops = self.peak_flops or self.achievable_flops
        record = replace(record, peak_flops=self.peak_flops, achievable_flops=self.achievable_flops)
        if self.session.rank or not record.tokens or not record.seconds:
            return record
        rate = record.tokens * self.plan.mesh.num_data_ranks / record.seconds
        peak_flops = self.peak_flops * self.session.world_size
        mfu = mfu_ratio(self.flops_per_token, rate, peak_flops) if self.flops_per_token else None
        return replace(record, tokens_per_second=rate, mfu_ratio=mfu)

    def not_finite(self, step: int, local_loss: float) -> TrainError:
        """Names the ranks whose own loss is not finite; of a gradient all ranks have a part by now. A restart
        would only repeat it."""
        mine = torch.tensor([float(math.isfinite(local_loss))])
        everyone = [torch.zeros(1) for _ in range(self.session.world_size)]
        dist.all_gather(everyone, mine)
        ranks = [rank for rank, finite in enumerate(everyone) if not finite.item()]
        named = f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
        error = TrainError(
            f"the loss is not finite at step {step} on {named}"
            if ranks
            else f"the gradient is not finite at step {step}, though the loss is",
            where=f"step {step}",
            hint="the last good checkpoint is kept; lower optimizer.lr, raise warmup_steps or look at the "
            "data of this step, then `mlpipe resume`",
        )
        error.fatal, error.cause = True, "not_finite"  # type: ignore[attr-defined]
        return error


def report_save(session: Session, saved: Saved, failed: list[MlpipeError]) -> None:
    """`failed` counts the saves that failed in a row. The run goes on without one, since the store may come
    back and what was computed since is dear; it ends at the third, and at the last step."""
    session.recorder.write(
        Save(
            step=saved.step,
            key=saved.key,
            bytes=saved.num_bytes,
            stall_seconds=saved.stall_seconds,
            save_seconds=saved.save_seconds,
            error=str(saved.error) if saved.error else None,
        )
    )
    if saved.error is None:
        failed.clear()
        return
    failed.append(saved.error)
    _log.warning("the checkpoint of step %d failed: %s", saved.step, saved.error)
    if len(failed) >= _MAX_FAILED_SAVES:
        raise saved.error


def peak_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
