"""What a training says of itself in its records: its start, each step with time and rate, each save."""

from __future__ import annotations

import logging
import resource
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from mlpipe._core.errors import MlpipeError
from mlpipe._core.mfu import mfu_ratio
from mlpipe._core.records import End, Save, Step, Validation
from mlpipe.plan.flops import CONVENTION
from mlpipe.plan.work import TrainPlan
from mlpipe.train.callbacks import Callbacks
from mlpipe.train.checkpoint import Saved
from mlpipe.train.data.microbatch import Microbatch
from mlpipe.train.parallel.waits import Waits
from mlpipe.train.precision import DTYPES
from mlpipe.train.resuming import Position
from mlpipe.train.session import Session

_log = logging.getLogger(__name__)
_MAX_FAILED_SAVES = 3


class Recording:
    """`num_flops_per_token`: of forward and backward, None where nobody knows. `waits`: of the model.
    `callbacks` are told what was written."""

    def __init__(
        self,
        session: Session,
        plan: TrainPlan,
        waits: Waits,
        num_flops_per_token: float | None,
        callbacks: Callbacks,
    ) -> None:
        self.session = session
        self.plan = plan
        self.waits = waits
        self.callbacks = callbacks
        self.num_flops_per_token = num_flops_per_token
        self.peak_flops = plan.peak_flops
        self.achievable_flops: float | None = None
        self.peak_bytes = 0  # of memory, so far
        self.failed_saves: list[MlpipeError] = []
        self.last: Step | None = None
        self.of_replicas: dict[str, Any] = {}  # fields of the next step's record, of an elastic training

    def start(self, position: Position, *, num_params: int, restore_seconds: float, **told: Any) -> None:
        """Before the first step, at `position`. `told`: more fields of the record."""
        flops, again = self.num_flops_per_token, self._recomputed_flops_per_token()
        start = self.session.record_start(
            self.plan,
            num_params=num_params,
            num_flops_per_token=flops,
            num_hardware_flops_per_token=None if flops is None or again is None else flops + again,
            flops_convention=CONVENTION,
            peak_flops=self.plan.peak_flops,
            peak_name=self.plan.peak_name,
            start_step=position.step,
            resumed_from=position.resumed_from,
            restore_seconds=restore_seconds,
            notes=position.notes,
            **told,
        )
        if self.callbacks:
            self.callbacks.on_start(start)

    def step(self, record: Step, total_tokens: float) -> None:
        """`record`: as the loop's clock tells it; of the seconds in forward, backward and update this rank's
        own work is what it did not wait for others there. What a rank of a pipeline waits at the end of a
        step is for stages that are not done. `total_tokens`: computed by all ranks."""
        self.peak_bytes = max(self.peak_bytes, peak_memory_bytes(self.session.device))
        waited, at_end = self.waits.take(), record.collective_seconds or 0.0
        piped = self.plan.mesh.pp > 1
        record = replace(
            record,
            compute_seconds=(record.compute_seconds or 0.0) - sum(waited),
            collective_seconds=waited.collective + (0.0 if piped else at_end),
            bubble_seconds=waited.stages + at_end if piped else None,
            memory_bytes=self.peak_bytes,
            **self.of_replicas,
        )
        self.last = self.session.recorder.write(self._with_rates(record, total_tokens))
        if self.callbacks:
            self.callbacks.on_step(self.last)

    @property
    def own_seconds(self) -> float:
        """Of the last step: what this rank read and computed, without what it waited for others."""
        assert self.last is not None
        return (self.last.compute_seconds or 0.0) + (self.last.data_seconds or 0.0)

    def saved(self, saved: Saved) -> None:
        """The run goes on without a save that failed, since the store may come back and what was computed
        since is dear; it ends at the third in a row (raised here), and at the last step."""
        written = self.session.recorder.write(
            Save(
                step=saved.step,
                key=saved.key,
                bytes=saved.num_bytes,
                stall_seconds=saved.stall_seconds,
                save_seconds=saved.save_seconds,
                error=str(saved.error) if saved.error else None,
            )
        )
        if self.callbacks:
            self.callbacks.on_checkpoint(written)
        if saved.error is None:
            self.failed_saves.clear()
            return
        self.failed_saves.append(saved.error)
        _log.warning("the checkpoint of step %d failed: %s", saved.step, saved.error)
        if len(self.failed_saves) >= _MAX_FAILED_SAVES:
            raise saved.error

    def validating(self) -> None:
        """When that begins."""
        self.session.recorder.validating()

    def validated(self, record: Validation) -> None:
        """When the model was measured on held-out samples."""
        written = self.session.recorder.write(record)
        if self.callbacks:
            self.callbacks.on_validation(written)

    def end(self, record: End) -> None:
        """When the training is over, and its last checkpoint committed."""
        written = self.session.recorder.write(record)
        if self.callbacks:
            self.callbacks.on_end(written)

    def _recomputed_flops_per_token(self) -> float | None:
        if self.plan.activation_checkpointing == "none":
            return 0.0
        from mlpipe.train.flops import recomputed_flops_per_token

        return recomputed_flops_per_token(self.plan)

    def _with_rates(self, record: Step, total_tokens: float) -> Step:
        """The peak of this rank; speed and MFU of all ranks together, rank 0 only."""
        world = self.session.world
        if self.achievable_flops is None and (world.device.type == "cuda" or self.peak_flops is None):
            # After the first step, so that it does not come later: all ranks measure at the same time, as
            # they compute at the same time. On a GPU beside the datasheet's peak, on a CPU in its place.
            from mlpipe.train.flops import measure_peak

            rate = measure_peak(world.device, DTYPES[self.plan.precision])
            peak = torch.tensor([rate], dtype=torch.float64)
            dist.all_reduce(peak)
            if world.device.type == "cuda":  # a step does not need what its matrices took
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(world.device)
            self.achievable_flops = float(peak) / world.size
            self.peak_flops = self.peak_flops or self.achievable_flops
        record = replace(record, peak_flops=self.peak_flops, achievable_flops=self.achievable_flops)
        if world.rank or not total_tokens or not record.seconds or not self.peak_flops:
            return record
        rate, flops = total_tokens / record.seconds, self.num_flops_per_token
        mfu = (
            mfu_ratio(flops, rate, self.peak_flops * world.size * self.session.num_replicas)
            if flops
            else None
        )
        return replace(record, tokens_per_second=rate, mfu_ratio=mfu)


def of_samples(batches: Sequence[Microbatch]) -> dict[str, Any]:
    """What the data tell of the lengths in a step, by fields of its record."""
    told: dict[str, Any] = {}
    padding = [one.num_padding for one in batches if one.num_padding is not None and one.counts]
    if padding:
        told["padding_tokens"] = sum(padding)
    work = [one.work for one in batches if one.work is not None]
    if work:
        own, most = map(sum, zip(*work, strict=True))
        told["idle_predicted_ratio"] = 1 - own / most
    return told


def peak_memory_bytes(device: torch.device) -> int:
    """The most that this process held: on CUDA of the allocator's, since its peak was reset; on a CPU
    resident, ever."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
