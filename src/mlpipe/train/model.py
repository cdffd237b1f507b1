"""A model out of the plan: built by its entry, checked against the contract, given a loss.

The contract: `build(**args)` returns an nn.Module; its forward(inputs) gives logits (..., vocabulary), or
it has `loss(batch) -> (sum, count)` (more in contract.py); the blocks to shard, checkpoint and compile are
its ModuleLists, or named in the spec; with `init_weights()` it is built on the meta device, without it, or
where it brings weights of its own (`from_pretrained`), on the CPU under the seed.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from mlpipe.plan.entry import Entry
from mlpipe.plan.model import ModelPlan
from mlpipe.plan.settings import Precision
from mlpipe.train.contract import broken, check_targets, logits_of, sum_and_count
from mlpipe.train.debugger import was_left
from mlpipe.train.init import refuse_unwritten
from mlpipe.train.loss import cross_entropy_sum, scale_gradient
from mlpipe.train.precision import autocast

_log = logging.getLogger(__name__)
Batch = dict[str, torch.Tensor]
DOCUMENTS = "document_lengths"  # of a row with several samples (train/models/documents.py)


def _as_it_is(logits: Any) -> Any:
    return logits


class LossModule(nn.Module):
    """What the techniques wrap: batch in, (loss sum, target count) out; the loss is fp32 always. A batch
    without targets gives logits: generation has to come in by the same door as training, since that is
    where a sharded model gathers its parameters. `gradient_scale`: by which gradients are multiplied, while
    the loss stays as it is; None: they are not."""

    def __init__(
        self, model: nn.Module, device_type: str, precision: Precision = "fp32", entry: str = ""
    ) -> None:
        super().__init__()
        self.entry = entry
        self.model = model
        self.device_type = device_type
        self.precision = precision
        self.gradient_scale: torch.Tensor | None = None
        self.fused_loss = False
        # of a technique that has head and loss in one: of hidden states, the head's weights and targets
        self.head_loss: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None
        # of techniques that leave each rank a part of the logits
        self.cross_entropy: Callable[..., tuple[torch.Tensor, torch.Tensor]] = cross_entropy_sum
        self.whole_logits: Callable[[Any], Any] = _as_it_is

    def forward(self, batch: Batch) -> Any:
        """(loss sum, target count), or logits of a batch without targets."""
        with autocast(self.device_type, self.precision):
            if hasattr(self.model, "loss"):
                return self._scaled(sum_and_count(self.model.loss(batch), batch, self.entry, "loss"))
            if "inputs" not in batch:
                return self._scaled(sum_and_count(self.model(**batch), batch, self.entry, "forward"))
            packed = {DOCUMENTS: batch[DOCUMENTS]} if DOCUMENTS in batch else {}
            if self.head_loss is not None and "targets" in batch:
                head = partial(self.head_loss, targets_BT=batch["targets"], scale=self.gradient_scale)
                return self.model(batch["inputs"], head=head, **packed)
            logits = logits_of(self.model(batch["inputs"], **packed), self.entry)
        return self.loss_of(logits, batch)

    def loss_of(self, logits: torch.Tensor, batch: Batch) -> Any:
        """As `forward`."""
        if "targets" not in batch:
            return self.whole_logits(logits)
        targets = batch["targets"]
        check_targets(logits, targets, self.entry)
        if targets.dtype != torch.int64:
            targets = targets.long()
        return self.cross_entropy(logits, targets, fused=self.fused_loss, scale=self.gradient_scale)

    def _scaled(self, told: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        loss, num_targets = told
        return scale_gradient(loss, self.gradient_scale), num_targets


@dataclass
class BuiltModel:
    """`construct`: builds the model again, on the CPU under the seed."""

    module: LossModule
    model: nn.Module
    blocks: list[nn.Module]
    on_meta: bool
    construct: Callable[[], nn.Module]


def build_model(plan: ModelPlan, *, seed: int, device_type: str, precision: Precision = "fp32") -> BuiltModel:
    """Raises TrainError(kind="input") that names what of the contract the model does not keep."""
    entry = plan.build.entry
    real = partial(_real, plan.build, seed)
    model, why_not = _without_memory(plan.build)
    on_meta = model is not None
    if model is None:
        model = real()
        if hasattr(model, "init_weights"):
            _log.warning("%s is taken as it is built, init_weights() is not called: %s", entry, why_not)
        refuse_unwritten(model, entry)
    blocks = find_blocks(model, plan.blocks, entry)
    return BuiltModel(LossModule(model, device_type, precision, entry), model, blocks, on_meta, real)


def _without_memory(entry: Entry) -> tuple[nn.Module | None, str]:
    """On the meta device; None, and why, where the model has to be built for real: nothing fills it later, or
    it comes with weights that would be lost."""
    build = load_entry(entry)
    no_fill = _NoFill()
    try:
        # torch warns of weights that a model without memory cannot keep, which is seen to below
        with warnings.catch_warnings(action="ignore"), torch.device("meta"), no_fill:
            model = build(**entry.args)
    except Exception as error:
        if was_left(error):
            raise
        return None, f"{type(error).__name__}: {error}"
    if not hasattr(model, "init_weights"):
        return None, "it has none"
    if no_fill.loaded or not all(parameter.is_meta for parameter in model.parameters()):
        return None, "the function loads weights"
    return model, ""


def _real(entry: Entry, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    with _fill_empty():
        return construct(load_entry(entry), entry, torch.device("cpu"))


@contextmanager
def _fill_empty() -> Iterator[None]:
    """torch.empty() gives NaN instead of what was in memory before."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")  # not use_deterministic_algorithms, which imports inductor
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


class _NoFill(TorchFunctionMode):
    """On the meta device there is nothing to fill, but to do so torch imports sympy, 0.6 CPU seconds.
    `loaded`: whether values were copied into a parameter there, as load_state_dict does: they are lost."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        of_init = getattr(func, "__module__", None) == "torch.nn.init"
        if of_init or func in (torch.Tensor.normal_, torch.Tensor.uniform_):
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        if func is torch.Tensor.copy_ and isinstance(args[0], nn.Parameter) and args[0].is_meta:
            self.loaded = self.loaded or not args[1].is_meta
        return func(*args, **kwargs)


def load_entry(entry: Entry) -> Callable[..., Any]:
    """The function behind `package.module:function`, of the working folder or wherever Python looks."""
    module_name, _, function_name = entry.entry.partition(":")
    _look_in_working_folder()
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise broken(
            entry.entry,
            f"cannot be imported: {error}",
            f"start mlpipe where `python -c 'import {module_name}'` works, or install the package",
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise broken(
            entry.entry,
            f"module {module_name} has no function {function_name!r}",
            f"define `def {function_name}(...)` in {getattr(module, '__file__', module_name)}",
        )
    try:
        inspect.signature(function).bind_partial(**entry.args)
    except TypeError as error:
        raise broken(
            entry.entry, f"does not take these args: {error}", "make `args` fit the function's parameters"
        ) from error
    return function


def _look_in_working_folder() -> None:
    """Ahead of what is installed, but behind Python's own modules: a `random.py` there is for nobody else."""
    folder, own = os.getcwd(), os.path.dirname(os.__file__)
    if folder not in sys.path:
        standard = [at for at, path in enumerate(sys.path) if path in (own, f"{own}/lib-dynload")]
        sys.path.insert(max(standard, default=-1) + 1, folder)


def construct(build: Callable[..., Any], entry: Entry, device: torch.device) -> nn.Module:
    """Raises TrainError(kind="input") that names what went wrong in the user's function."""
    with device, _NoFill():
        try:
            model = build(**entry.args)
        except Exception as error:
            raise broken(
                entry.entry,
                f"failed to build the model: {type(error).__name__}: {error}",
                "build the plain module only: no .to(device), no data in the constructor",
            ) from error
    if not isinstance(model, nn.Module):
        raise broken(
            entry.entry,
            f"returned {type(model).__name__}, not an nn.Module",
            "return the plain, unwrapped torch.nn.Module",
        )
    return model


def find_blocks(model: nn.Module, names: tuple[str, ...], entry: str) -> list[nn.Module]:
    """The modules named, ModuleLists taken apart; without names every outermost ModuleList's members."""
    if not names:
        return list(_members_of_outermost_lists(model))
    blocks: list[nn.Module] = []
    for name in names:
        try:
            module = model.get_submodule(name)
        except AttributeError as error:
            lists = [n for n, m in model.named_modules() if isinstance(m, nn.ModuleList)]
            raise broken(
                entry,
                f"the model has no module {name!r} to use as a block",
                f"name one of its own in `blocks`{': ' + ', '.join(lists) if lists else ''}",
            ) from error
        blocks += list(module) if isinstance(module, nn.ModuleList) else [module]
    return blocks


def _members_of_outermost_lists(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _members_of_outermost_lists(child)
