"""Parameters with a learning rate and a weight decay of their own: an Update for each group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from mlpipe._core.errors import TrainError
from mlpipe._core.patterns import matching, nearest
from mlpipe.plan.updates import ParameterGroup
from mlpipe.train.optim.update import GROUPS, Average, Update, after_load, averages_of
from mlpipe.train.shards import LocalShard

Build = Callable[[Sequence[LocalShard], dict[str, Any]], Update]


class Grouped:
    """`build(shards, args)` makes the optimizer of a group, with `args` instead of the pipeline's. What is in
    none of `groups` comes last. `everywhere`: names of all that is trained, of which other ranks may have
    some: every rank has all groups, perhaps empty ones. Raises TrainError (input) for a pattern that says
    nothing."""

    def __init__(
        self,
        groups: Sequence[ParameterGroup],
        shards: Sequence[LocalShard],
        build: Build,
        everywhere: Iterable[str],
    ) -> None:
        own = {shard.name.removeprefix("model."): shard for shard in shards}
        names = [name.removeprefix("model.") for name in everywhere]
        rest = dict.fromkeys(names)
        self.parts: list[tuple[Update, float]] = []
        for number, group in enumerate(groups):
            where = f"train.optimizer.groups[{number}].match"
            matches = matching(group.match, names)
            fresh = [name for name in matches if name in rest]
            if not matches:
                raise TrainError(
                    f"{group.match!r} fits no parameter that is trained",
                    where=where,
                    hint=nearest(group.match, names),
                    kind="input",
                )
            if not fresh:
                raise TrainError(
                    f"all parameters that match {group.match!r} are of an earlier group",
                    where=where,
                    hint="the first match counts: put this group before the other, or remove it",
                    kind="input",
                )
            for name in fresh:
                del rest[name]
            mine = [own[name] for name in fresh if name in own]
            args = {}
            if group.weight_decay is not None:
                args["weight_decay"] = group.weight_decay
                mine = [replace(shard, decays=True) for shard in mine]
            self.parts.append((build(mine, args), group.lr_scale))
        if rest:
            self.parts.append((build([own[name] for name in rest if name in own], {}), 1.0))

    def step(self, *, lr: float, scale: float) -> None:
        """One update of each group."""
        for update, lr_scale in self.parts:
            update.step(lr=lr * lr_scale, scale=scale)

    def state(self) -> list[LocalShard]:
        """Of all groups."""
        return [tensor for update, _ in self.parts for tensor in update.state()]

    def averages(self) -> list[Average]:
        """Of the groups that have any."""
        return [average for update, _ in self.parts for average in averages_of(update)]

    def after_load(self) -> None:
        """Of all groups."""
        for update, _ in self.parts:
            after_load(update)

    def scalars(self) -> dict[str, Any]:
        """Of each group, in their order."""
        return {GROUPS: [update.scalars() for update, _ in self.parts]}

    def load_scalars(self, scalars: dict[str, Any]) -> None:
        """As `scalars` gave them. Raises TrainError (input) where there were other groups."""
        saved = scalars.get(GROUPS, [])
        if len(saved) != len(self.parts):
            raise TrainError(
                f"the checkpoint's optimizer had {len(saved) or 'no'} groups of parameters, there are "
                f"{len(self.parts)} now",
                hint="resume with the `groups` that wrote it, or start a new run",
                kind="input",
            )
        for (update, _), part in zip(self.parts, saved, strict=True):
            update.load_scalars(part)
