"""Weights that a training starts from, instead of those that the seed gives.

They go straight into the shards that this rank owns: of each tensor it reads the bytes of its own part, so
that no rank ever holds the whole. Floats become the model's own dtype, or the few bits of a quantised
layer, a bounded number of bytes at a time.
Checkpoints of the training itself go before: a restart or a resume does not look here.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, cast

import torch
import torch.distributed as dist

from mlpipe._core.adapters import is_adapter
from mlpipe._core.errors import TrainError
from mlpipe.plan.model import InitPlan
from mlpipe.plan.work import TrainPlan
from mlpipe.store import catalogue
from mlpipe.store.weights import PREFIX, Weights
from mlpipe.train.base_weights import names_here, open_found
from mlpipe.train.matching import Here, Match, hint, match
from mlpipe.train.models.quantized_linear import QUANTIZED, QuantizedLinear, quantize, quantized_layers
from mlpipe.train.parallel.parallelized_model import ParallelizedModel
from mlpipe.train.reshard import fill
from mlpipe.train.session import Session
from mlpipe.train.shards import LocalShard

_CONVERTED_BYTES = 2**28  # of values on their way to another dtype, at a time


def start(session: Session, plan: TrainPlan, model: ParallelizedModel) -> list[str]:
    """Fills the model with the weights of `plan.init_from`, unless there is a checkpoint to go on from, which
    beside adapters has none of them; what a person should know of it. To be called before an optimizer looks
    at the weights. Raises TrainError (input) where they do not fit, StoreError where they cannot be read."""
    assert plan.init_from is not None
    if plan.adapter is None and not _is_due(session, plan):
        return []
    return read(session, plan, model, plan.init_from)


def read(session: Session, plan: TrainPlan, model: ParallelizedModel, init: InitPlan) -> list[str]:
    """As `start`, without asking for a checkpoint."""
    words = init.found.words if init.found is not None else "weights"
    session.watchdog.beat(f"loading {words}", 0)
    source = open_found(session.store, init, plan.model.build)
    names = names_here(init, plan.model.build.entry)
    layers = dict(quantized_layers(model.built.module))
    own = [_of_floats(item, layers) for item in model.shards if not is_adapter(item.name)]
    shards = {item.name.removeprefix(PREFIX): item for item in own}
    fitting = match(_here(model, shards), source.tensors, names)
    if (init.strict and fitting.words()) or not fitting.pairs:
        raise TrainError(
            f"{words} does not fit the model: {'; '.join(fitting.words())}",
            where=source.where,
            hint=hint(fitting),
            kind="input",
        )
    with torch.no_grad():
        _fill(source, [(shards[here], there) for here, there in fitting.pairs if here in shards])
        if init.strict:
            _check_doubles(source, shards, fitting)
    if plan.adapter is not None:
        from mlpipe.train.parallel import lora  # of few trainings

        lora.after_weights(model.module)
    model.after_step()
    return [f"started from {words}: {len(fitting.pairs)} tensors", *fitting.words()]


@dataclass
class _FewBits(LocalShard):
    """Stands for weights that are kept in few bits: `local` has no memory, `layer` says how."""

    codes: torch.Tensor | None = None
    layer: QuantizedLinear | None = None

    def take(self, weights: torch.Tensor) -> None:
        """The values of `local`."""
        assert self.codes is not None
        assert self.layer is not None
        self.codes.copy_(quantize(weights, self.layer.base))


def _of_floats(item: LocalShard, layers: dict[str, QuantizedLinear]) -> LocalShard:
    """As files have it."""
    owner, _, name = item.name.rpartition(".")
    if name != QUANTIZED:
        return item
    layer = layers[owner]
    told: dict[str, Any] = {field.name: getattr(item, field.name) for field in fields(LocalShard)}
    made = _FewBits(**told, codes=item.local, layer=layer)
    made.name, made.shape = f"{owner}.weight", (item.shape[0], layer.in_features)
    made.local = torch.empty((len(item.local), layer.in_features), dtype=layer.dtype, device="meta")
    return made


def _is_due(session: Session, plan: TrainPlan) -> bool:
    """Rank 0 looks, and all go the same way."""
    own = torch.zeros(1)
    if session.world.rank == 0 and (plan.resume or session.process.restart):
        own += catalogue.latest(session.store, session.plan.stage_key) is not None
    dist.all_reduce(own)
    return not own.item()


def _here(model: ParallelizedModel, shards: dict[str, LocalShard]) -> dict[str, Here]:
    others: dict[str, list[str]] = {}
    for name, stored in model.tied().items():
        others.setdefault(stored.removeprefix(PREFIX), []).append(name.removeprefix(PREFIX))
    # also what lies in other stages of a pipeline: so every rank says the same of what does not fit
    elsewhere = {
        name: Here(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in model.built.model.state_dict().items()
        if tensor.is_meta and not is_adapter(name)
    }
    return elsewhere | {
        name: Here(str(item.local.dtype).removeprefix("torch."), item.shape, tuple(others.get(name, ())))
        for name, item in shards.items()
    }


def _fill(source: Weights, pairs: list[tuple[LocalShard, str]]) -> None:
    """What has the dtype there is read in place, all else on its way."""
    alike: list[tuple[LocalShard, str]] = []
    others: list[tuple[LocalShard, str]] = []
    for item, name in pairs:
        if item.local.numel():
            in_place = _dtype(source, name) == item.local.dtype and not isinstance(item, _FewBits)
            (alike if in_place else others).append((item, name))
    fill(source.store, source.blobs, [(item, source.tensors[name]) for item, name in alike], source.read)
    for group in _groups(source, others):
        read = [_apart(source, item, name) for item, name in group]
        fill(
            source.store,
            source.blobs,
            [(one, source.tensors[name]) for one, (_, name) in zip(read, group, strict=True)],
            source.read,
        )
        for one, (item, _) in zip(read, group, strict=True):
            if isinstance(item, _FewBits):
                item.take(one.local)
            else:
                item.local.copy_(one.local)


def _groups(source: Weights, pairs: list[tuple[LocalShard, str]]) -> list[list[tuple[LocalShard, str]]]:
    groups: list[list[tuple[LocalShard, str]]] = []
    size_bytes = 0
    for item, name in pairs:
        needed = item.local.numel() * _dtype(source, name).itemsize
        if not groups or size_bytes + needed > _CONVERTED_BYTES:
            groups.append([])
            size_bytes = 0
        groups[-1].append((item, name))
        size_bytes += needed
    return groups


def _apart(source: Weights, item: LocalShard, name: str) -> LocalShard:
    """The same part of the tensor there, in memory of its own."""
    return replace(item, local=torch.empty(item.local.shape, dtype=_dtype(source, name)))


def _dtype(source: Weights, name: str) -> torch.dtype:
    return cast(torch.dtype, getattr(torch, source.tensors[name]["dtype"]))


def _check_doubles(source: Weights, shards: dict[str, LocalShard], fitting: Match) -> None:
    """Where one parameter here has two tensors there, they have to be one."""
    first = dict(fitting.pairs)
    for here, there in fitting.doubles:
        one, other = (_apart(source, shards[here], name) for name in (first[here], there))
        for part, name in ((one, first[here]), (other, there)):
            if part.local.numel():
                fill(source.store, source.blobs, [(part, source.tensors[name])], source.read)
        if not torch.equal(one.local.to(other.local.dtype), other.local):
            raise TrainError(
                f"{first[here]} and {there} differ there, and are one parameter here: {here}",
                where=source.where,
                hint="untie them in the model; strict: false takes the first",
                kind="input",
            )
