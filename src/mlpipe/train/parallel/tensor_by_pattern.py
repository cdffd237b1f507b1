"""Tensor parallelism of a user's own module, by patterns of names of its modules (Shoeybi et al.,
Megatron-LM, 2019, section 3). All that is not split is on every rank as it was.

`column` of an nn.Linear: each rank computes a part of the outputs. `row` of an nn.Linear: each rank has a
part of the inputs, as a column left them, and the ranks add up what they make of them; of an nn.Embedding:
each has a part of the vocabulary. `sum` of any module between a column and its row: it is whole, as a norm
over each head, but the gradients that a rank has are of its own part, and are added up.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlpipe._core.meshes import UNSPLIT
from mlpipe._core.patterns import matching, nearest
from mlpipe.plan.model import ModelPlan
from mlpipe.plan.work import TrainPlan
from mlpipe.train.contract import broken
from mlpipe.train.parallel.exact_products import part_of_outputs, part_of_sum
from mlpipe.train.parallel.parallelized_model import ParallelizedModel
from mlpipe.train.parallel.rank_group import RankGroup, copied, embedded_here, summed
from mlpipe.train.precision import low_dtype
from mlpipe.train.slices import Slice, keep_slice
from mlpipe.train.world import World

# How `transformers` calls them (`base_model_tp_plan` of a model's config).
_THEIRS = {"colwise": "column", "rowwise": "row", "replicated_with_grad_allreduce": "sum"}


def apply(model: ParallelizedModel, world: World, plan: TrainPlan) -> None:
    """As `plan.model.tensor` says, or the model's own plan. Raises TrainError (input) for what does not
    fit."""
    if plan.adapter is not None:
        raise broken(plan.model.build.entry, "an adapter does not go with tp of this model yet", "make tp 1")
    ranks = RankGroup.along("tp", world, model.waits, exact=plan.exact_sums)
    model.partial += split(model.built.model, plan.model, ranks)


def split(own: nn.Module, plan: ModelPlan, ranks: RankGroup) -> list[tuple[nn.Module, str]]:
    """In place; modules and names of parameters whose gradients a rank has a part of. Raises TrainError
    (input)."""
    entry, patterns = plan.build.entry, plan.tensor or _their_plan(own)
    if not patterns:
        raise broken(entry, UNSPLIT.message, UNSPLIT.remedy)
    done: dict[int, nn.Parameter] = {}
    shared, partial = _Shared(ranks), []
    modules = dict(own.named_modules(remove_duplicate=False))
    kinds: dict[str, str] = {}
    for pattern, kind in patterns.items():
        names = matching(pattern, modules)
        if not names:
            raise broken(entry, f"model.tensor: {pattern!r} fits no module", nearest(pattern, modules))
        kinds |= {name: kind for name in names if name not in kinds}
    _refuse_ties(own, {id(modules[name]) for name, kind in kinds.items() if kind != "sum"}, entry)
    for name, kind in kinds.items():
        if kind == "sum":
            partial += [(one, key) for one in modules[name].modules() for key in one._parameters]
        else:
            _split(modules[name], name, kind, shared, done, entry)
    return partial


def _their_plan(own: nn.Module) -> dict[str, str]:
    """Of a class of `transformers`: of the inner model, whose head stays whole."""
    theirs: Mapping[str, str] | None = getattr(getattr(own, "config", None), "base_model_tp_plan", None)
    if not theirs:
        return {}
    prefix = getattr(own, "base_model_prefix", "")
    prefix = f"{prefix}." if prefix and hasattr(own, prefix) else ""
    unknown = sorted(set(theirs.values()) - set(_THEIRS))
    if unknown:
        raise broken(
            type(own).__module__,
            f"the plan of {type(own).__name__} for tp has {', '.join(unknown)}, which mlpipe does not have",
            "write model.tensor yourself, or make tp 1",
        )
    return {f"{prefix}{pattern}": _THEIRS[kind] for pattern, kind in theirs.items()}


def _split(
    module: nn.Module, name: str, kind: str, shared: _Shared, done: dict[int, nn.Parameter], entry: str
) -> None:
    ranks = shared.ranks
    is_embedding = kind == "row" and _is_plain_embedding(module)
    if type(module) is not nn.Linear and not is_embedding:  # of a subclass nobody knows what it computes
        raise broken(
            entry,
            f"{kind} cannot split {name}, a {type(module).__name__}",
            "column and row split an nn.Linear, row an nn.Embedding without padding_idx and max_norm as well",
        )
    dim = 0 if kind == "column" or is_embedding else 1
    weight = module.weight
    assert isinstance(weight, Tensor)
    if weight.shape[dim] % ranks.num_ranks:
        raise broken(
            entry,
            f"tp {ranks.num_ranks} does not divide the {weight.shape[dim]} "
            f"{'rows' if is_embedding else 'outputs' if dim == 0 else 'inputs'} of {name}",
            "make it a multiple, or leave this module whole",
        )
    cut = Slice("tp", dim, ranks.rank, ranks.num_ranks, ranks.group)
    keep_slice(module, "weight", cut, done)
    if isinstance(module, nn.Embedding):
        module.forward = functools.partial(_embed, module, ranks)  # type: ignore[method-assign]
    elif isinstance(module, nn.Linear) and kind == "row":
        if ranks.exact or module.bias is not None:
            module.forward = functools.partial(_add_up, module, ranks)  # type: ignore[method-assign]
        else:
            module.register_forward_hook(lambda module, args, y: summed(y, ranks))
    else:
        if module.bias is not None:
            keep_slice(module, "bias", cut, done)
        if isinstance(module, nn.Linear) and ranks.exact:
            module.forward = functools.partial(_part_of_outputs, module, ranks)  # type: ignore[method-assign]
        else:
            module.register_forward_pre_hook(lambda module, args: (shared(args[0]), *args[1:]))


def _is_plain_embedding(module: nn.Module) -> bool:
    if type(module) is not nn.Embedding or module.sparse or module.scale_grad_by_freq:
        return False
    return module.padding_idx is None and module.max_norm is None


def _add_up(linear: nn.Linear, ranks: RankGroup, x: Tensor) -> Tensor:
    if ranks.exact:
        low, y = low_dtype(x), summed(part_of_sum(x, linear), ranks)
        return (y if linear.bias is None else y + linear.bias.to(low)).to(low)
    y = summed(F.linear(x, linear.weight), ranks)
    return y if linear.bias is None else y + linear.bias.to(y.dtype)


def _part_of_outputs(linear: nn.Linear, ranks: RankGroup, x: Tensor) -> Tensor:
    low = x.to(low_dtype(x))
    return part_of_outputs(low, low, linear, ranks.all_reduce)


def _embed(embedding: nn.Embedding, ranks: RankGroup, ids: Tensor) -> Tensor:
    return summed(embedded_here(embedding, ids, ranks), ranks)


class _Shared:
    """The input of several columns, like q, k and v, whose gradients the ranks add up once."""

    def __init__(self, ranks: RankGroup) -> None:
        self.ranks = ranks
        self.last: tuple[Any, Any, bool] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.last is not None:
            given, made, with_gradients = self.last
            shared: Tensor | None = made()
            if given() is x and shared is not None and with_gradients == torch.is_grad_enabled():
                return shared
        copy = copied(x, self.ranks)
        self.last = weakref.ref(x), weakref.ref(copy), torch.is_grad_enabled()
        return copy


def _refuse_ties(own: nn.Module, split: set[int], entry: str) -> None:
    """A weight that two modules share is split in both or in none."""
    places: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, module in own.named_modules(remove_duplicate=False):
        for parameter in module._parameters.values():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((name, module))
    for uses in places.values():
        if len({id(module) in split for _, module in uses}) > 1:
            names = " and ".join(dict.fromkeys(name for name, _ in uses))
            raise broken(
                entry, f"{names} share a weight, which is to be split in one of them", "name none of them"
            )
