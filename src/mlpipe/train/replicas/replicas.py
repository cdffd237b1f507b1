"""This rank's replica among the others: takes part, is healed or heals, and commits steps."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from mlpipe._core import environment
from mlpipe._core.errors import TrainError
from mlpipe.plan.shares import Shares
from mlpipe.plan.work import TrainPlan
from mlpipe.store import replicas as store_replicas
from mlpipe.train.data.loader import MicrobatchLoader
from mlpipe.train.optim.islands import LocalUpdates
from mlpipe.train.optim.update import Update, after_load
from mlpipe.train.parallel.compression.averager import Link
from mlpipe.train.parallel.parallelized_model import ParallelizedModel
from mlpipe.train.replicas.compressed import CompressedSums
from mlpipe.train.replicas.exchange import Exchange, MembershipChanged
from mlpipe.train.replicas.member import Member
from mlpipe.train.resuming import Position, load_optimizer, optimizer_scalars, stored
from mlpipe.train.session import Session

T = TypeVar("T")
_NOTHING = -1  # steps that a rank has done that has nothing to go on from


class Released(Exception):  # no error: too few are there to go on, and this replica was told to stop
    """What it has is to be saved by itself."""


class Replicas:
    """`validation`: its state, for those who are behind, and how it is taken up. `seconds_per_token`: that
    this rank took in the last step. `shares`: what all members have heard of each other's, in their order,
    since these take part; nothing is dealt by it. `islands`: where each replica is one. `wants_to_leave`: as
    all of its ranks know, since the step began."""

    def __init__(
        self,
        session: Session,
        plan: TrainPlan,
        model: ParallelizedModel,
        update: Update,
        loader: MicrobatchLoader,
    ) -> None:
        life = f"{os.environ['MASTER_PORT']}-{session.process.restart}"
        self.entered = False
        self.session, self.plan, self.model, self.update, self.loader = session, plan, model, update, loader
        self.member = Member(session.replica, session.world.rank, life, self._still, self._coordinator)
        self.quorum = 0
        self.members: list[int] = []
        self.leaving: list[int] = []
        self.void = True
        self.totals = torch.zeros(3, dtype=torch.float64)
        self.seconds_per_token = 0.0
        self.shares = Shares(1)
        self.more_scalars: Callable[[], dict[str, Any]] = dict
        self.wants_to_leave = False
        self.islands = update if isinstance(update, LocalUpdates) else None
        self.compressed = None if plan.compress is None else CompressedSums(plan.compress)
        if self.compressed is not None:
            told, sent = model.step_metrics, self.compressed.end_step
            model.step_metrics = lambda: told() | sent()

    @property
    def leads(self) -> bool:
        """Whether this replica writes checkpoints: the first of those that stay, or of all if none does."""
        staying = [one for one in self.members if one not in self.leaving] or self.members
        return staying[0] == self.member.replica

    @property
    def index(self) -> int:
        """Of this replica among the members."""
        return self.members.index(self.member.replica)

    @property
    def leaves(self) -> bool:
        """Whether this replica does, after the step that was committed last."""
        return self.member.replica in self.leaving

    def enter(self, restore: Callable[[], Position]) -> Position:
        """The position of the others, with their state; where nobody has one, what `restore` gives."""
        position = self.take_part(Position(step=_NOTHING))
        while position.step == _NOTHING:  # nobody has; who restores another one is healed by the highest
            position = self.take_part(restore())
        self.entered = True
        return position

    def take_part(self, position: Position) -> Position:
        """In the next quorum, at the position of those of its members that are ahead. All ranks of a replica
        call it together. Their collectives have ended by then. Raises Released."""
        healthy = True
        while True:
            self.session.watchdog.beat("waiting for the other replicas", max(position.step, 0), waiting=True)
            leaves = self.session.stop.requested if self.entered and healthy else lambda: False
            step = position.step + (0.5 if self.islands is not None and self.islands.due else 0)
            reply = self.member.ask("join", leaves, step=step if healthy else _NOTHING)
            if "leave" in reply:
                self.members, self.leaving, self.void = [self.member.replica], [], False
                self._use(Exchange(self.member, self.quorum, 0, 1))
                raise Released
            self.quorum, self.members, self.leaving, self.void = reply["quorum"], reply["members"], [], False
            index, size = self.index, len(self.members)
            world, self.session.num_replicas, self.shares = self.session.world, size, Shares(size)
            self.loader.share = (index * world.num_data_ranks + world.data_rank, size * world.num_data_ranks)
            steps = reply["steps"]
            highest = max(steps)
            behind = [one for one, step in enumerate(steps) if step < highest]
            if highest == _NOTHING and (position.step != _NOTHING or not healthy):
                raise TrainError(  # who begins anew has the weights of the seed, or of a checkpoint
                    f"replica {self.member.replica} was half healed when those who had the state were lost",
                    kind="infrastructure",
                )
            met = True
            try:
                self._use(Exchange(self.member, self.quorum, index, size))
                if index == (donor := steps.index(highest)):
                    self._heal(position, behind)
                elif index in behind:
                    healthy = False
                    position = self._healed(donor)
                    healthy = True
                # else ranks of one replica would go different ways where only some have met the others
                self.meet("all are whole")
            except MembershipChanged:
                met = False
            if self.agreed(met):
                return position

    def _use(self, exchange: Exchange) -> None:
        self.exchange = exchange
        if self.islands is not None:
            self.islands.link = Link(exchange.ranks)

    def commit(self, number: int, totals: torch.Tensor, ends: Callable[[], bool] = lambda: True) -> None:
        """Sums gradients and `totals` over the replicas, with what each tells of its last step, or raises
        MembershipChanged with garbage in the gradients, which islands keep for themselves. What a parameter
        has no gradient of here it may have elsewhere: zeros stand for it. `ends`: whether the step does with
        this, as the sums say; else half of it is done."""
        told = torch.zeros(len(self.members), dtype=torch.float64)
        told[self.index] = self.seconds_per_token
        self.totals, self.told = totals, told
        gradients = self._gradients() if self.islands is None else []

        def sum_() -> None:
            some = gradients
            if self.compressed is not None:
                self.compressed.sum_(gradients, Link(self.exchange.ranks))
                some = []
            self.exchange.sum_([*some, self.totals, self.told])

        # an island's waits here are between two looks of the loop at its clock
        with nullcontext() if self.islands is not None else self.waiting():
            self.together(number, sum_, ends)
        if self.compressed is not None:
            self.compressed.commit()

    def _gradients(self) -> list[torch.Tensor]:
        gradients = []
        for shard in self.model.shards:
            if shard.parameter is not None and shard.parameter.requires_grad:
                if shard.parameter.grad is None:
                    shard.parameter.grad = torch.zeros_like(shard.parameter)
                gradient = shard.gradient()
                assert gradient is not None
                gradients.append(gradient)
        return gradients

    def together(self, number: int, exchange: Callable[[], T], ends: Callable[[], bool] = lambda: True) -> T:
        """What `exchange` gives, once all replicas have come through it. Raises MembershipChanged."""
        self.session.watchdog.beat("waiting for the other replicas", number, waiting=True)
        if self.member.ask("ready", quorum=self.quorum, step=number)["void"]:
            raise MembershipChanged
        lost: MembershipChanged | None = None
        try:
            found = exchange()
        except MembershipChanged as error:
            lost = error
        leaves = self.session.stop.requested() if self.islands is None else self.wants_to_leave
        ok, half = lost is None, lost is None and not ends()
        vote = self.member.ask("vote", quorum=self.quorum, step=number, ok=ok, leaves=leaves, half=half)
        if lost is not None or not vote.get("commit"):
            raise MembershipChanged
        self.void, self.leaving = vote["void"], vote["leaving"]
        return found

    def agreed(self, met: bool) -> bool:
        """Whether all ranks of this replica have met the others. One may have been stopped when they were
        told so, and hear that the quorum is void: then all of them take part anew."""
        if self.session.world.size == 1:
            return met
        if not met:  # nobody waits for this rank in what it has left
            self.member.ask("spoil", quorum=self.quorum)
        missed = torch.tensor([float(not met)])
        dist.all_reduce(missed)
        return not missed.item()

    def meet(self, where: str) -> None:
        """Until all have come there. Raises MembershipChanged."""
        if self.member.ask("ready", quorum=self.quorum, step=where)["void"]:
            raise MembershipChanged

    def _still(self) -> None:
        """In each second of a wait. Who has nothing that is worth saving leaves when it is told to."""
        self.session.watchdog.still()
        if not self.entered and self.session.stop.requested():
            os._exit(128 + signal.SIGTERM)

    def _coordinator(self) -> str:
        known = os.environ.get(environment.COORDINATOR)
        return known or store_replicas.coordinator(self.session.store, self.session.plan.attempt_key)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """What this rank's own work is not."""
        self.model.waits.begin()
        try:
            yield
        finally:
            self.model.waits.end()

    # -- healing ------------------------------------------------------------------------------------

    def _heal(self, position: Position, behind: list[int]) -> None:
        if not behind or position.step == _NOTHING:
            return
        scalars = {
            "step": position.step,
            "samples": position.samples,
            "optimizer": optimizer_scalars(self.plan.optimizer, [self.update.scalars()]),
            **self.more_scalars(),
        }
        self.member.ask("set", quorum=self.quorum, key=self._key, value=json.dumps(scalars))
        for index in behind:
            self.exchange.send([item.local for item in stored(self.model, self.update)], index)

    def _healed(self, donor: int) -> Position:
        reply = self.member.ask("get", quorum=self.quorum, key=self._key)
        if "value" not in reply:
            raise MembershipChanged
        scalars = json.loads(reply["value"])
        is_local = self.islands is not None
        load_optimizer(self.plan.optimizer, self.update, scalars, self.session.plan.run_id, is_local)
        with torch.no_grad():
            self.exchange.receive([item.local for item in stored(self.model, self.update)], donor)
        after_load(self.update)
        if self.islands is not None:
            self.islands.forget_unsent()
        self.model.after_step()
        return replace(Position(scalars["step"], scalars["samples"]), scalars=scalars)

    @property
    def _key(self) -> str:
        return f"state/{self.member.rank}"
