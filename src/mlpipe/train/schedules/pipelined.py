"""The microbatches of a step through the stages of a pipeline, in the order that `plan/pipelining.py` gives.

Sent are outputs of stages and gradients of their inputs, (B, T, D) in fp32, the dtype of the residual stream.
Their shapes follow from the batch, which every rank of the pipeline has: nothing is agreed upon beforehand.
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
from mlpipe.train.data import Microbatch, to_device
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
        self.dim: int = module.whole.config.dim
        self.stages = sorted(module.parts)
        self.last = world.mesh.pp * len(self.stages) - 1
        self.deferred = DeferredWeights(module) if schedule == "zero_bubble" else None

    def forward_backward(self, batches: Sequence[Microbatch]) -> LossSum:
        """As the protocol says."""
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
            self._send(step, step.computed.pop(key), transfer.kind, transfer.stage)
        else:
            step.received[key] = self._receive(
                step.batches[transfer.microbatch], transfer.kind, transfer.stage
            )

    def _send(self, step: _Step, tensor: Tensor, kind: str, stage: int) -> None:
        to = self.world.peer("pp", (stage + (1 if kind == "F" else -1)) % self.world.mesh.pp)
        tensor = tensor.contiguous()
        work = dist.isend(tensor, to)
        assert work is not None
        step.sent = [one for one in step.sent if not one[0].is_completed()] + [(work, tensor)]

    def _receive(self, batch: Batch, kind: str, stage: int) -> tuple[dist.Work | None, Tensor]:
        """`stage`: whose output or input's gradient it is."""
        shape = (*batch["inputs"].shape, self.dim)
        buffer = torch.empty(shape, device=self.world.device)
        return dist.irecv(buffer, self.world.peer("pp", stage % self.world.mesh.pp)), buffer

    def _taken(self, step: _Step, key: _Key) -> Tensor:
        work, tensor = step.received.pop(key)
        if work is not None:
            self.model.waits.timed(work.wait)()
        return tensor

    def _wait_for_sent(self, step: _Step, most: int) -> None:
        """Until at most so many are under way."""
        while len(step.sent) > most:
            work, _ = step.sent.pop(0)
            self.model.waits.timed(work.wait)()

    @torch.no_grad()
    def forward(
        self, batches: Iterable[Microbatch], after: Callable[[Microbatch, Batch], None] | None = None
    ) -> LossSum:
        """As the protocol says; `after` on the ranks of the last stage."""
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
                step.received[key] = self._receive(batch, "F", stage - 1)
                received = self._taken(step, key)
            output = self.model.module(batch, stage, received)
            if stage == self.last:
                return output
            self._send(step, output, "F", stage)
            self._wait_for_sent(step, 2)
        return None
