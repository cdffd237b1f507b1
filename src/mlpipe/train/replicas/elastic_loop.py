"""The loop of an elastic training: a step that the other replicas did not commit is taken again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from mlpipe._core.errors import TrainError
from mlpipe.plan.work import TrainPlan
from mlpipe.store import catalogue
from mlpipe.train.data.loader import MicrobatchLoader
from mlpipe.train.data.microbatch import Microbatch
from mlpipe.train.loop import Loop
from mlpipe.train.optim.update import Update
from mlpipe.train.outcome import node_name
from mlpipe.train.parallel.parallelized_model import ParallelizedModel
from mlpipe.train.replicas.exchange import MembershipChanged
from mlpipe.train.replicas.replicas import Released, Replicas
from mlpipe.train.resuming import Position
from mlpipe.train.schedules import LossSum
from mlpipe.train.session import Session
from mlpipe.train.shards import clear_gradients
from mlpipe.train.slow_nodes import SlowNodes

if TYPE_CHECKING:
    from mlpipe.train.loss_scale import LossScale
    from mlpipe.train.validation import Validation

T = TypeVar("T")
_TOGETHER_SECONDS = 900.0  # for islands to agree, however often one of them comes or goes meanwhile


class Healed(Exception):  # no error: in the midst of a step
    """This replica stands where another one stood."""


@dataclass
class ElasticLoop(Loop):
    """Of one replica. The one that leads writes the checkpoints."""

    replicas: Replicas = field(default_factory=lambda: cast(Replicas, None))
    looked: bool = False  # at whether the model writes its buffers
    changed: bool = False  # who takes part, since the last step
    released: bool = False  # this replica stops without the others
    slow_nodes: SlowNodes = field(init=False)  # of which this one names its own

    def __post_init__(self) -> None:
        self.slow_nodes = SlowNodes(self.session.stop.scratch)
        if self.replicas.islands is not None:
            self.replicas.islands.together = self.together

    @property
    def num_gradient_ranks(self) -> int:
        """Targets are those of all replicas, and gradients of an island its own."""
        islands = 1 if self.replicas.islands is None else self.session.num_replicas
        return super().num_gradient_ranks * islands

    def step(self) -> tuple[bool, bool]:
        """Until it is committed."""
        began = time.perf_counter()
        while True:
            if self.replicas.void:
                self.changed = True
                try:
                    self.rejoin()
                except Released:
                    self.released = True
                    return True, True
            tried = time.perf_counter()
            self.recording.of_replicas = {
                "replicas": self.session.num_replicas,
                "membership_seconds": tried - began if self.changed else None,
            }
            try:
                if self.replicas.islands is not None and self.replicas.islands.due:
                    return self.end_of_round()
                stopping, save = super().step()
            except (MembershipChanged, Healed) as why:
                clear_gradients(self.model.shards)
                self.model.waits.take()
                self.replicas.void |= isinstance(why, MembershipChanged)
                self.changed = True
                continue
            stopping |= self.replicas.leaves
            self.changed = False
            recording = self.recording
            num_tokens = 0 if recording.last is None else recording.last.tokens
            self.replicas.seconds_per_token = recording.own_seconds / num_tokens if num_tokens else 0.0
            return stopping, save

    def together(self, mean: Callable[[], T]) -> T:
        """Over the islands that are there, in the midst of a step, until all have it. Raises Healed, and
        TrainError (infrastructure) where they come and go all the time."""
        of_replicas, began = self.recording.of_replicas, time.perf_counter()
        deadline = began + _TOGETHER_SECONDS
        while True:
            if self.replicas.void:
                try:
                    if self.rejoin():
                        raise Healed
                except Released:  # there are no others any more, and this one leaves in the next step
                    self.replicas.void = True
                    return mean()
                of_replicas["replicas"] = self.session.num_replicas
                lost = time.perf_counter() - began
                of_replicas["membership_seconds"] = (of_replicas["membership_seconds"] or 0.0) + lost
                began += lost
            met = True
            try:
                with self.replicas.waiting():
                    found = self.replicas.together(self.position.step + 1, mean)
            except MembershipChanged:
                met = False
            if self.replicas.agreed(met):
                self.replicas.void = not self.replicas.agreed(not self.replicas.void)
                return found
            self.replicas.void = True
            if time.perf_counter() > deadline:
                raise TrainError(
                    f"the islands did not agree within {_TOGETHER_SECONDS:.0f} s: each time one came or went",
                    where=f"step {self.position.step + 1}",
                    hint="events.jsonl of the attempt says who, and why",
                    kind="infrastructure",
                )

    def end_of_round(self) -> tuple[bool, bool]:
        """Of who was healed when the others had begun with it."""
        assert self.replicas.islands is not None
        self.replicas.islands.agree()
        self.model.after_step()
        self.model.waits.take()  # of no step that is recorded here
        self.position.step += 1
        self.position.samples += self.plan.global_batch
        world = self.session.world
        return self.replicas.leaves, self.any_rank(world.rank == 0 and self.is_save_due(self.position.step))

    def rejoin(self) -> bool:
        """Those who are there now; what was read for the share before is of no use. Returns whether this
        replica was healed."""
        self.checkpointer.wait_for_staging()
        position = self.replicas.take_part(self.position)
        self.position.step, self.position.samples = position.step, position.samples
        healed = position is not self.position
        if healed:
            if self.validation is not None:
                self.validation.load(position.scalars)
            if self.loss_scale is not None:
                self.loss_scale.load(position.scalars)
        self.reader.forget()
        return healed

    def gradients(self, number: int, batches: Sequence[Microbatch]) -> LossSum:
        """Of all replicas. Raises TrainError (input) if the model keeps running averages in buffers: each
        replica would have its own. Counters are the same."""
        buffers = [one for one in self.model.shards if one.is_buffer and one.local.is_floating_point()]
        buffers = buffers if not self.looked else []
        before = [one.local.clone() for one in buffers]
        sums = super().gradients(number, batches)
        self.looked = True
        for one, was in zip(buffers, before, strict=True):
            if not torch.equal(one.local, was):
                raise TrainError(
                    f"the model writes its buffer {one.name!r} in forward, and nodes that come and go would "
                    "each have another",
                    where=self.plan.model.build.entry,
                    hint="take a norm without running averages, or write one number of nodes",
                    kind="input",
                )
        if self.replicas.islands is None:
            totals = torch.stack([sums.loss_sum, sums.num_targets]).double().cpu()
            self.replicas.commit(number, torch.cat([totals, totals.new_tensor([sums.num_tokens])]))
        return sums

    def total(self, totals: Tensor) -> None:
        """Of all replicas; a replica stops if it was asked to before the step was committed. Its ranks go the
        same way afterwards: one of them may have heard of the commit after the quorum was void."""
        num = len(totals)
        if (islands := self.replicas.islands) is None:
            totals[[0, 1, 3]] = self.replicas.totals
        else:
            number, num_islands = self.position.step + 1, self.session.num_replicas
            self.replicas.wants_to_leave = self.any_rank(self.session.stop.requested())
            told = totals[:5].clone()
            told[2] /= num_islands
            told[4] = float(self.replicas.wants_to_leave)

            def ends() -> bool:  # or the islands have still to agree, as before one of them leaves
                islands.tells_all = number == self.plan.steps or 0 < told[4].item() < num_islands
                return not islands.turns(islands.num_steps + 1)

            self.replicas.commit(number, told, ends)
            totals[:4] = told[:4]
        totals[4] = float(self.replicas.leaves)
        void = totals.new_tensor([float(self.replicas.void)])
        told = torch.cat([totals, void, self.replicas.told])
        dist.all_reduce(told)
        totals.copy_(told[:num])
        self.replicas.void = bool(told[num])
        self.replicas.shares.heard(told[num + 1 :].tolist())

    def any_rank(self, is_so: bool) -> bool:
        """Of this replica."""
        if self.session.world.size == 1:
            return is_so
        said = torch.tensor([float(is_so)])
        dist.all_reduce(said)
        return bool(said.item())

    def more_fields(self) -> dict[str, Any]:
        """Who is slow, too. What drives the replicas hears of this one from its launcher, and may put another
        in its place."""
        replicas, world = self.replicas, self.session.world
        slowness, fields = replicas.shares.slowness, super().more_fields()
        if slowness is None or len(replicas.members) == 1:
            return fields
        fields["slowness_ratio"] = slowness[replicas.index]
        if world.rank == 0:
            slow = replicas.shares.stragglers
            fields["stragglers"] = {
                str(replicas.members[index] * world.size): ratio for index, ratio in slow.items()
            } or None
            here = {replicas.index} & slow.keys()
            self.slow_nodes.tell((node_name(), slow[index]) for index in here)
        return fields

    def save(self, *, best: bool = False) -> None:
        """One replica is enough."""
        if self.replicas.leads:
            super().save(best=best)

    def finish_saving(self) -> None:
        """Nobody leaves before what they have computed is safe: if the one that leads is lost, another one
        saves it."""
        super().finish_saving()
        if self.released:
            return
        met = not self.replicas.void
        if met:
            try:
                self.replicas.meet("the end")
            except MembershipChanged:
                met = False
        if self.replicas.agreed(met or self.replicas.leaves or self.is_saved()):
            return
        super().save()
        super().finish_saving()

    def is_saved(self) -> bool:
        """Whether the store has a checkpoint of this step, or a later one, by whomever."""
        found = catalogue.latest(self.session.store, self.session.plan.stage_key)
        return found is not None and found.step >= self.position.step


def enter(
    session: Session,
    plan: TrainPlan,
    parts: tuple[ParallelizedModel, Update, MicrobatchLoader],
    kept: tuple[Validation | None, LossScale | None],
    restore: Callable[[], Position],
) -> tuple[Position, Callable[..., ElasticLoop]]:
    """Takes part in the training: where it stands, and what makes its loop. `kept`: of which those who
    come are told. `restore`: from the store, where no replica has anything."""
    replicas, (validation, loss_scale) = Replicas(session, plan, *parts), kept

    def more_scalars() -> dict[str, Any]:
        told = {} if loss_scale is None else loss_scale.scalars()
        return told if validation is None else {**told, "validation": validation.scalars()}

    replicas.more_scalars = more_scalars
    return replicas.enter(restore), partial(ElasticLoop, replicas=replicas)
