"""The microbatches of a step through the stages of a pipeline, in the order that `plan/pipelining.py` gives.

Sent are outputs of stages and gradients of their inputs: of a Llama (B, T, D) in fp32, the dtype of the
residual stream, or what a rank of `tp` or `cp` has of it. The shape of an output follows from that of the
batch's inputs, which every rank of the pipeline has: it is sent once, before the first output of its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mlpipe._core.pipelines import Schedule
from mlpipe.plan.pipelining import Action, Transfer, with_transfers
from mlpipe.train.data.microbatch import Microbatch, to_device
from mlpipe.train.model import Batch
from mlpipe.train.parallel.parallelized_model import ParallelizedModel, nothing
from mlpipe.train.parallel.pipeline import StagedLossModule
from mlpipe.train.schedules import LossSum
from mlpipe.train.schedules.accumulate import Sums
from mlpipe.train.schedules.deferred_weights import DeferredWeights
from mlpipe.train.world import World

_Key = tuple[str, int, int]  # what it is of: kind F or B, stage, microbatch


@dataclass
class _Step:
    """What is under way. `received`: with who fills it. `passes`: inputs and outputs that a backward pass
    needs. `sent`: kept until it has left."""

    batches: list[Batch]
    sums: Sums
    received: dict[_Key, tuple[dist.Work | None, Tensor]] = field(default_factory=dict)
    passes: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = field(default_factory=dict)
    sent: list[tuple[dist.Work, Tensor]] = field(default_factory=list)
    computed: dict[_Key, Tensor] = field(default_factory=dict)


class Pipelined:
    """`before_microbatch` is called before each pass."""

    def __init__(
        self,
        model: ParallelizedModel,
        world: World,
        schedule: Schedule,
        before_microbatch: Callable[[], None] = nothing,
    ) -> None:
        module = model.built.module
        assert isinstance(module, StagedLossModule)
        self.model, self.world, self.schedule = model, world, schedule
        self.before_microbatch = before_microbatch
        self.stages = sorted(module.parts)
        self.last = world.mesh.pp * len(self.stages) - 1
        self.deferred = DeferredWeights(module) if schedule == "zero_bubble" else None
        self.headers: dict[tuple[int, bool, tuple[int, ...]], Tensor] = {}

    def forward_backward(self, batches: Sequence[Microbatch]) -> LossSum:
        """As the protocol says."""
        self.model.before_passes()
        actions = with_transfers(self.schedule, self.world.mesh.pp, len(batches))[
            self.world.coordinates["pp"]
        ]
        step = _Step([to_device(one.batch, self.world.device) for one in batches], Sums(self.world))
        passes = [action for action in actions if isinstance(action, Action)]
        for action in actions:
            if isinstance(action, Transfer):
                self._transfer(step, action)
            elif action.kind == "F":
                self._forward(step, action, batches[action.microbatch])
            elif action.kind == "W":
                assert self.deferred is not None
                with self.model.gradient_sync(action == passes[-1]):
                    self.deferred.compute(action.stage, action.microbatch)
            else:
                with self.model.gradient_sync(action == passes[-1]):
                    self._backward(step, action)
        self._wait_for_sent(step, 0)
        self.model.after_backward()
        return step.sums.counted()

    def _forward(self, step: _Step, action: Action, microbatch: Microbatch) -> None:
        _, stage, number = action
        self.before_microbatch()
        self.model.before_forward(microbatch.counts)
        received = None
        if stage > 0:
            received = self._taken(step, ("F", stage - 1, number)).requires_grad_()
        output = self.model.module(step.batches[number], stage, received)
        if stage == self.last:
            loss, num_targets = output
            step.sums.add(microbatch, loss.detach(), num_targets)
            output = loss if microbatch.counts else loss * 0
        else:
            step.computed["F", stage, number] = output.detach()
        step.passes[stage, number] = received, output

    def _backward(self, step: _Step, action: Action) -> None:
        kind, stage, number = action
        self.before_microbatch()
        received, output = step.passes.pop((stage, number))
        gradient = None if stage == self.last else self._taken(step, ("B", stage + 1, number))
        if not output.requires_grad:  # all that came before is frozen
            return
        if kind == "I" and self.deferred is not None:
            with self.deferred.collecting(stage, number):
                torch.autograd.backward(output, gradient)
        else:
            torch.autograd.backward(output, gradient)
        if received is not None:
            assert received.grad is not None
            step.computed["B", stage, number] = received.grad

    def _transfer(self, step: _Step, transfer: Transfer) -> None:
        """Begins it."""
        key = transfer.kind, transfer.stage, transfer.microbatch
        if transfer.sends:
            if transfer.kind == "F":
                self._send_output(
                    step, step.computed.pop(key), step.batches[transfer.microbatch], transfer.stage
                )
            else:
                self._send(step, step.computed.pop(key), transfer.stage - 1)
        elif transfer.kind == "F":
            step.received[key] = self._receive_output(step.batches[transfer.microbatch], transfer.stage)
        else:
            _, output = step.passes[transfer.stage - 1, transfer.microbatch]
            step.received[key] = self._receive(torch.empty_like(output), transfer.stage)

    def _send_output(self, step: _Step, output: Tensor, batch: Batch, stage: int) -> None:
        """Of `stage`, to the next one."""
        key = self._key(batch, stage)
        if key not in self.headers:
            self.headers[key] = header_of(output)
            self._send(step, self.headers[key].to(self.world.device), stage + 1)
        self._send(step, output, stage + 1)

    def _send(self, step: _Step, tensor: Tensor, to: int) -> None:
        """Begins it; `to`: a stage."""
        tensor = tensor.contiguous()
        work = dist.isend(tensor, self._rank_of(to))
        assert work is not None
        step.sent = [one for one in step.sent if not one[0].is_completed()] + [(work, tensor)]
        # gloo completes what is waited for only; in `with_transfers` to wait at once would be no deadlock
        self._wait_for_sent(step, self.world.mesh.pp)

    def _receive_output(self, batch: Batch, stage: int) -> tuple[dist.Work | None, Tensor]:
        key = self._key(batch, stage)
        if key not in self.headers:
            header = torch.empty(HEADER_LENGTH, dtype=torch.int64, device=self.world.device)
            self.model.waits.timed(dist.recv, for_stages=True)(header, self._rank_of(stage))
            self.headers[key] = header.cpu()
        return self._receive(empty_for(self.headers[key], self.world.device), stage)

    def _receive(self, buffer: Tensor, stage: int) -> tuple[dist.Work | None, Tensor]:
        """Begins it. `stage`: which sends."""
        return dist.irecv(buffer, self._rank_of(stage)), buffer

    def _rank_of(self, stage: int) -> int:
        return self.world.peer("pp", stage % self.world.mesh.pp)

    def _key(self, batch: Batch, stage: int) -> tuple[int, bool, tuple[int, ...]]:
        """What the shape of a stage's output follows from."""
        return stage, self.model.module.training, tuple(batch["inputs"].shape)

    def _taken(self, step: _Step, key: _Key) -> Tensor:
        work, tensor = step.received.pop(key)
        if work is not None:
            self.model.waits.timed(work.wait, for_stages=True)()
        return tensor

    def _wait_for_sent(self, step: _Step, most: int) -> None:
        """Until at most so many are under way."""
        while len(step.sent) > most:
            work, _ = step.sent.pop(0)
            self.model.waits.timed(work.wait, for_stages=True)()

    @torch.no_grad()
    def forward(
        self, batches: Iterable[Microbatch], after: Callable[[Microbatch, Batch], None] | None = None
    ) -> LossSum:
        """As the protocol says; `after` on the ranks of the last stage."""
        self.model.before_passes()
        step = _Step([], Sums(self.world))
        for microbatch in batches:
            self.before_microbatch()
            batch = to_device(microbatch.batch, self.world.device)
            output = self._through(step, batch)
            if output is not None:
                step.sums.add(microbatch, *output)
                if after is not None:
                    after(microbatch, batch)
        self._wait_for_sent(step, 0)
        return step.sums.counted()

    @torch.no_grad()
    def logits(self, inputs: Tensor) -> Tensor | None:
        """As the protocol says."""
        self.model.before_passes()
        step = _Step([], Sums(self.world))
        logits: Tensor | None = self._through(step, {"inputs": inputs})
        self._wait_for_sent(step, 0)
        return logits

    def _through(self, step: _Step, batch: Batch) -> Any:
        """Forward through this rank's stages; what the last one gives, elsewhere None."""
        for stage in self.stages:
            received = None
            if stage > 0:
                key = "F", stage - 1, 0
                step.received[key] = self._receive_output(batch, stage - 1)
                received = self._taken(step, key)
            output = self.model.module(batch, stage, received)
            if stage == self.last:
                return output
            self._send_output(step, output, batch, stage)
            self._wait_for_sent(step, 2)
        return None


# What an output may be, by its number in a header.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
HEADER_LENGTH = 10


def header_of(output: Tensor) -> Tensor:
    """Dtype, number of dims, and these: int64 (10,)."""
    sizes = [_DTYPES.index(output.dtype), output.dim(), *output.shape]
    return torch.tensor(sizes + [0] * (HEADER_LENGTH - len(sizes)))


def empty_for(header: Tensor, device: torch.device) -> Tensor:
    """Room for the output that `header` tells of."""
    dtype, num_dims, *sizes = header.tolist()
    return torch.empty(sizes[:num_dims], dtype=_DTYPES[dtype], device=device)
