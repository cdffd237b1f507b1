"""Islands: ranks that update by their own gradients for many steps, and then agree on the weights. An island
is what has one copy of the model: a rank, or with `dp_shard` those that share one.

Every `sync_every` steps each says how far it has gone from the weights on which all agreed last (the anchor),
and the mean of that is the gradient of an outer step: with Nesterov momentum DiLoCo (Douillard et al., 2023),
with learning rate 1 and without momentum local SGD (Stich, 2019). In `fragments` one part of the model after
the other does so, spread evenly over the steps (Douillard et al., Streaming DiLoCo, 2025, without its
overlap).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mlpipe._core.errors import TrainError
from mlpipe.plan.sizes import GATHER_BUCKET_BYTES
from mlpipe.plan.updates import IslandsPlan
from mlpipe.train.buckets import buckets, views
from mlpipe.train.optim.sender import Answer, Sender
from mlpipe.train.optim.update import ISLANDS, Average, Update, after_load
from mlpipe.train.parallel.compression.averager import Link, code_of, coded_mean, padded
from mlpipe.train.parallel.parallelized_model import ParallelizedModel
from mlpipe.train.parallel.rank_group import HostGroup, RankGroup
from mlpipe.train.rank_rows import RankRows
from mlpipe.train.shards import LocalShard
from mlpipe.train.world import World


def local_updates(
    plan: IslandsPlan, update: Update, model: ParallelizedModel, world: World, *, whole: bool = False
) -> LocalUpdates:
    """`update`: of one island. `whole`: this world is one, and the others are elsewhere. Raises TrainError
    (input) for a model that forward passes write to: what its islands have seen cannot be put together."""
    buffers = [shard.name for shard in model.shards if shard.is_buffer]
    if buffers:
        raise TrainError(
            f"the model has buffers that a forward pass may write ({', '.join(buffers[:3])}), of which "
            "islands would have different ones",
            where="train.update",
            hint="use layers without running statistics, or remove `update`",
            kind="input",
        )
    trained = [shard for shard in model.shards if shard.is_trained]
    ranks = RankGroup(0, 1, None, _as_it_is) if whole else RankGroup.along("dp_replicate", world, model.waits)
    if plan.staleness:  # what travels beside other collectives has its own group, and is waited for elsewhere
        own = world.group_of_its_own("dp_replicate")
        ranks = HostGroup(ranks.rank, ranks.num_ranks, own, _as_it_is)
    updates = LocalUpdates(plan, update, trained, ranks, model.waits.timed)
    model.step_metrics = updates.end_step
    return updates


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def settle(update: Update) -> None:
    """Takes at once what is on its way, on all islands: before a checkpoint, which has no place for it."""
    if isinstance(update, LocalUpdates):
        update.settle()


class LocalUpdates:
    """An Update of the shards of an island, which `update` updates. What a checkpoint has as the model's
    weights, and what is validated, are the anchors: equal on all islands.

    `due`: fragments on which the islands are about to agree, in the midst of a step. `tells_all`: on all of
    them after the next one. `link`, and `together`, which asks for a mean over it until all islands have it,
    are set from outside where islands come and go."""

    def __init__(
        self,
        plan: IslandsPlan,
        update: Update,
        shards: Sequence[LocalShard],
        ranks: RankGroup,
        timed: Callable[[Callable[..., Any]], Callable[..., Any]] = _as_it_is,
    ) -> None:
        """`timed` wraps what waits for a round that travels."""
        self.plan = plan
        self.update = update
        self.shards = shards
        self.link = Link(ranks)
        self._sender = Sender(shards[0].local.device) if plan.staleness and shards else None
        self._timed = timed
        self.rows = RankRows(ranks.rank, ranks.num_ranks)
        self.num_steps = 0
        self.num_rounds = 0
        self._anchors = [shard.local.detach().clone() for shard in shards]
        self._parts = [_Part(plan, some, ranks.num_ranks) for some in self._fragments()]
        self.due: list[int] = []
        self.tells_all = False
        self.together: Callable[[Callable[[], list[Any]]], list[Any]] = lambda mean: mean()
        self._loads_momentum = self._loads_unsent = True

    def _fragments(self) -> list[list[tuple[LocalShard, Tensor]]]:
        """Neighbours, of about as many bytes each; with as many fragments as wanted, some perhaps empty."""
        ends, so_far = [], 0
        whole = sum(anchor.nbytes for anchor in self._anchors) or 1
        for anchor in self._anchors:
            ends.append(min(self.plan.fragments - 1, so_far * self.plan.fragments // whole))
            so_far += anchor.nbytes
        pairs = list(zip(self.shards, self._anchors, strict=True))
        return [
            [pair for pair, end in zip(pairs, ends, strict=True) if end == fragment]
            for fragment in range(self.plan.fragments)
        ]

    @torch.no_grad()
    def step(self, *, lr: float, scale: float) -> None:
        """One of the island's own updates; then those fragments agree whose turn it is."""
        self.update.step(lr=lr, scale=scale)
        self.num_steps += 1
        self.link.sent_bytes = 0
        for number, part in enumerate(self._parts):
            if part.travels and self.num_steps - part.told_at >= self.plan.staleness:
                self._hear(number)
        self._tell(self.turns(self.num_steps))

    def turns(self, num_steps: int) -> list[int]:
        """The fragments on which all agree after so many steps."""
        every, fragments = self.plan.sync_every, self.plan.fragments
        if self.tells_all:
            return list(range(fragments))
        return [one for one in range(fragments) if (num_steps - one * every // fragments) % every == 0]

    @torch.no_grad()
    def settle(self) -> None:
        """Hears what is on its way."""
        for number, part in enumerate(self._parts):
            if part.travels:
                self._hear(number)

    @torch.no_grad()
    def finish(self) -> None:
        """After the last step: all agree on what was learnt since."""
        self.settle()
        self._tell([one for one, part in enumerate(self._parts) if part.told_at != self.num_steps])
        self.settle()

    def _tell(self, fragments: list[int]) -> None:
        if self._sender is None:
            self.due = fragments
            self.agree()
            return
        for part in (self._parts[one] for one in fragments):
            part.told_at = self.num_steps
            part.tell(Link(self.link.ranks), self._sender)

    @torch.no_grad()
    def agree(self) -> None:
        """On what is due."""
        if not self.due:
            return
        parts = [self._parts[one] for one in self.due]
        means = self.together(lambda: [part.mean(self.link) for part in parts])
        for part, mean in zip(parts, means, strict=True):
            part.agree(mean)
            part.told_at = self.num_steps
        self.num_rounds += 0 in self.due
        self.due = []

    def _hear(self, fragment: int) -> None:
        self.link.sent_bytes += self._timed(self._parts[fragment].hear)()
        self.num_rounds += fragment == 0

    def end_step(self) -> dict[str, Any]:
        """Fields of a step's record."""
        return {
            "exchanged_bytes": self.link.sent_bytes,
            "exchanged_plain_bytes": self.link.all_reduced_bytes(sum(one.nbytes for one in self._anchors)),
            "rounds": self.num_rounds,
        }

    def averages(self) -> list[Average]:
        """The anchors."""
        return list(zip(self.shards, self._anchors, strict=True))

    def state(self) -> list[LocalShard]:
        """The anchors by the names of the parameters; of each island its weights, what it has not told and
        the states of its optimizer; the outer momentum."""
        kept = [
            replace(shard, local=anchor, parameter=None)
            for shard, anchor in zip(self.shards, self._anchors, strict=True)
        ]
        if self.rows.is_loading_nothing:
            return [*self.update.state(), *kept]
        for shard in self.shards:
            kept += self.rows.row(self._of_island(shard.state("island", shard.local)))
        for part in self._parts:
            if part.momentum and self._loads_momentum:
                kept += [
                    one.state("outer_momentum", own)
                    for one, own in zip(part.shards, part.momentum, strict=True)
                ]
            if part.code is not None and self._loads_unsent:
                for shard, unsent in zip(part.shards, part.unsent, strict=True):
                    kept += self.rows.row(self._of_island(shard.state("unsent", unsent)))
        for state in self.update.state():
            kept += self.rows.row(self._of_island(state), mean=False)
        return kept

    def _of_island(self, state: LocalShard) -> LocalShard:
        """The replicas of a tensor within the island. `dp_replicate` is the outermost axis that counts
        them."""
        number = max(1, state.num_replicas // self.rows.num_ranks)
        return replace(state, replica_id=state.replica_id % number, num_replicas=number)

    def scalars(self) -> dict[str, Any]:
        """How many islands, and where in a round they stand; what each island's optimizer says."""
        return {
            ISLANDS: self.rows.num_ranks,
            "num_steps": self.num_steps,
            "num_rounds": self.num_rounds,
            "agreed_at": [part.told_at for part in self._parts],
            "due": self.due,
            "outer_momentum": bool(self.plan.outer_momentum),
            "unsent": self.plan.compress is not None,
            "update": self.update.scalars(),
        }

    def load_scalars(self, scalars: dict[str, Any]) -> None:
        """As `scalars` gave them; or of a training without islands, whose weights all begin a round with."""
        self.rows.begin_load(scalars.get(ISLANDS, 0))
        self.num_steps = scalars.get("num_steps", 0) if ISLANDS in scalars else 0
        self.num_rounds = scalars.get("num_rounds", 0) if ISLANDS in scalars else 0
        self._loads_momentum = scalars.get("outer_momentum", False)
        self._loads_unsent = scalars.get("unsent", False)
        agreed_at, self.due = scalars.get("agreed_at", []), scalars.get("due", [])
        for number, part in enumerate(self._parts):
            part.told_at = agreed_at[number] if len(agreed_at) == len(self._parts) else 0
            for tensor in (*part.momentum, *part.unsent):
                tensor.zero_()
        self.update.load_scalars(scalars["update"] if ISLANDS in scalars else scalars)

    @torch.no_grad()
    def forget_unsent(self) -> None:
        """It is another island's, which tells it itself."""
        for part in self._parts:
            for tensor in part.unsent:
                tensor.zero_()

    @torch.no_grad()
    def after_load(self) -> None:
        """With another number of islands each begins where their mean was, and has the states of one of
        them."""
        if self.rows.is_loading_nothing:
            for shard, anchor in zip(self.shards, self._anchors, strict=True):
                shard.local.copy_(anchor)
        self.rows.after_load()
        self._loads_momentum = self._loads_unsent = True
        after_load(self.update)


class _Part:
    """A fragment: shards and their anchors, the outer momentum and what was not told of each."""

    def __init__(self, plan: IslandsPlan, pairs: list[tuple[LocalShard, Tensor]], num_ranks: int) -> None:
        self.plan = plan
        self.shards = [shard for shard, _ in pairs]
        self.anchors = [anchor for _, anchor in pairs]
        self.momentum = [torch.zeros_like(anchor) for anchor in self.anchors] if plan.outer_momentum else []
        self.code = None if plan.compress is None else code_of(plan.compress)
        self.unsent = [torch.zeros_like(anchor) for anchor in self.anchors] if self.code is not None else []
        self.told_at = 0  # after which step
        # what was not told yet, and what will not have been once the mean that was asked for last counts
        self._left: list[tuple[Tensor, Tensor]] = []
        self._told: list[Tensor] = []  # while it travels
        self._answer: Answer | None = None

    @property
    def travels(self) -> bool:
        """Whether an answer is on its way."""
        return self._answer is not None

    def mean(self, link: Link) -> list[Tensor]:
        """Of how far the islands have gone. Asked again it is the same, of those who are there then."""
        return self._mean(self._gone(), link)

    def agree(self, mean: list[Tensor]) -> None:
        """At once: all have the anchors, to the bit."""
        if not self.shards:
            return
        self._outer_step(mean)
        torch._foreach_copy_([shard.local for shard in self.shards], self.anchors)

    def tell(self, link: Link, sender: Sender) -> None:
        """Begins to average how far this island has gone; `link` counts this round alone."""
        if not self.shards:
            return
        gone = self._gone()
        self._told = [tensor.clone() for tensor in gone]

        def travel() -> tuple[list[Tensor], int]:
            return self._mean(gone, link), link.sent_bytes

        self._answer = sender.send(travel)

    def hear(self) -> int:
        """Waits for the mean; instead of what this island told its weights go the outer step. Returns the
        bytes that were sent."""
        assert self._answer is not None
        mean, sent_bytes = self._answer.wait()
        told, self._told, self._answer = self._told, [], None
        weights, before = [shard.local for shard in self.shards], [one.clone() for one in self.anchors]
        self._outer_step(mean)
        torch._foreach_add_(weights, told)
        torch._foreach_add_(weights, torch._foreach_sub(self.anchors, before))
        return int(sent_bytes)

    def _gone(self) -> list[Tensor]:
        return list(torch._foreach_sub(self.anchors, [shard.local for shard in self.shards]))

    def _mean(self, gone: list[Tensor], link: Link) -> list[Tensor]:
        """Over the islands, in place."""
        self._left = []
        for some in buckets(range(len(gone)), GATHER_BUCKET_BYTES, gone.__getitem__):
            self._average(some, gone, link)
        return gone

    def _outer_step(self, mean: list[Tensor]) -> None:
        """b = m b + d, anchor -= lr (d + m b), where d is the mean of how far the anchor is from each
        island's weights."""
        for unsent, left in self._left:
            unsent.copy_(left)
            if left.is_cuda:  # made in the sender's stream, which might take its memory again too early
                left.record_stream(torch.cuda.current_stream(left.device))
        self._left = []
        momentum, steps = self.plan.outer_momentum, mean
        if momentum:
            torch._foreach_mul_(self.momentum, momentum)
            torch._foreach_add_(self.momentum, mean)
            steps = list(torch._foreach_add(mean, self.momentum, alpha=momentum))
        torch._foreach_add_(self.anchors, steps, alpha=-self.plan.outer_lr)

    def _average(self, some: Sequence[int], gone: list[Tensor], link: Link) -> None:
        """In place, over the islands, of those at `some`."""
        own = [gone[index] for index in some]
        num_values, num_ranks = sum(tensor.numel() for tensor in own), link.ranks.num_ranks
        if not num_values:
            return
        flat = torch.zeros(padded(num_values, num_ranks), dtype=torch.float32, device=own[0].device)
        parts = views(flat, own)
        torch._foreach_copy_(parts, own)
        if self.code is None:
            mean = link.all_reduce(flat).div_(num_ranks)
        else:
            unsent = [self.unsent[index] for index in some]
            torch._foreach_add_(parts, unsent)
            mean = coded_mean(flat, self.code, link)
            self._left += zip(unsent, parts, strict=True)
        torch._foreach_copy_(own, views(mean, own))
