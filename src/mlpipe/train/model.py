"""A model out of the plan: built by its entry, checked against the contract, given a loss.

The contract: `build(**args)` returns an nn.Module; its forward(inputs) gives logits (..., vocabulary), or
it has `loss(batch) -> (sum, count)`; the blocks to shard, checkpoint and compile are its ModuleLists, or
named in the spec; with `init_weights()` it is built on the meta device, without it on CPU under the seed.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from mlpipe._core.errors import TrainError
from mlpipe.plan.plan import Entry, ModelPlan
from mlpipe.train.loss import cross_entropy_sum

Batch = dict[str, torch.Tensor]


class LossModule(nn.Module):
    """What the techniques wrap: batch in, (loss sum, target count) out; the loss is fp32 always. A batch
    without targets gives logits: generation has to come in by the same door as training, since that is
    where a sharded model gathers its parameters."""

    def __init__(self, model: nn.Module, device_type: str, bf16: bool) -> None:
        super().__init__()
        self.model = model
        self.device_type = device_type
        self.bf16 = bf16
        self.fused_loss = False

    def forward(self, batch: Batch) -> Any:
        with torch.autocast(self.device_type, torch.bfloat16, enabled=self.bf16):
            if hasattr(self.model, "loss"):
                return self.model.loss(batch)
            logits = self.model(batch["inputs"])
        if "targets" not in batch:
            return logits
        return cross_entropy_sum(logits, batch["targets"], fused=self.fused_loss)


@dataclass
class BuiltModel:
    module: LossModule
    model: nn.Module
    blocks: list[nn.Module]
    on_meta: bool


def build_model(plan: ModelPlan, *, seed: int, device_type: str, bf16: bool) -> BuiltModel:
    """Raises TrainError(kind="input") that names what of the contract the model does not keep."""
    build = load_entry(plan.build)
    model = construct(build, plan.build, torch.device("meta"))
    on_meta = hasattr(model, "init_weights")
    if not on_meta:
        torch.manual_seed(seed)
        model = construct(build, plan.build, torch.device("cpu"))
    if not hasattr(model, "loss"):
        _check_forward(model, plan.build.entry)
    blocks = find_blocks(model, plan.blocks, plan.build.entry)
    return BuiltModel(LossModule(model, device_type, bf16), model, blocks, on_meta)


class _NoFill(TorchFunctionMode):
    """On the meta device there is nothing to fill, but to do so torch imports sympy, 0.6 CPU seconds."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        of_init = getattr(func, "__module__", None) == "torch.nn.init"
        if of_init or func in (torch.Tensor.normal_, torch.Tensor.uniform_):
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


def load_entry(entry: Entry) -> Callable[..., Any]:
    """The function behind `package.module:function`; the working directory is importable, as under
    `python -m`."""
    module_name, _, function_name = entry.entry.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise _broken(
            entry.entry,
            f"cannot be imported: {error}",
            f"start mlpipe where `python -c 'import {module_name}'` works, or install the package",
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise _broken(
            entry.entry,
            f"module {module_name} has no function {function_name!r}",
            f"define `def {function_name}(...)` in {getattr(module, '__file__', module_name)}",
        )
    try:
        inspect.signature(function).bind_partial(**entry.args)
    except TypeError as error:
        raise _broken(
            entry.entry, f"does not take these args: {error}", "make `args` fit the function's parameters"
        ) from error
    return function


def construct(build: Callable[..., Any], entry: Entry, device: torch.device) -> nn.Module:
    """Raises TrainError(kind="input") that names what went wrong in the user's function."""
    with device, _NoFill():
        try:
            model = build(**entry.args)
        except Exception as error:
            raise _broken(
                entry.entry,
                f"failed to build the model on the {device.type} device: {type(error).__name__}: {error}",
                "build the plain module only: no .to(device), no .item(), no data in the constructor",
            ) from error
    if not isinstance(model, nn.Module):
        raise _broken(
            entry.entry,
            f"returned {type(model).__name__}, not an nn.Module",
            "return the plain, unwrapped torch.nn.Module",
        )
    return model


def _check_forward(model: nn.Module, entry: str) -> None:
    required = [
        name
        for name, parameter in inspect.signature(model.forward).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if len(required) > 1:
        raise _broken(
            entry,
            f"its model's forward needs {', '.join(required)}; the loop passes inputs only",
            "take one tensor and return logits, or define `loss(self, batch) -> (sum, count)`",
        )


def find_blocks(model: nn.Module, names: tuple[str, ...], entry: str) -> list[nn.Module]:
    """The modules named, ModuleLists taken apart; without names every outermost ModuleList's members."""
    if not names:
        found: list[nn.Module] = []
        _outermost_lists(model, found)
        return found
    blocks: list[nn.Module] = []
    for name in names:
        try:
            module = model.get_submodule(name)
        except AttributeError as error:
            lists = [n for n, m in model.named_modules() if isinstance(m, nn.ModuleList)]
            raise _broken(
                entry,
                f"the model has no module {name!r} to use as a block",
                f"name one of its own in `blocks`{': ' + ', '.join(lists) if lists else ''}",
            ) from error
        blocks += list(module) if isinstance(module, nn.ModuleList) else [module]
    return blocks


def _outermost_lists(module: nn.Module, found: list[nn.Module]) -> None:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            found += list(child)
        else:
            _outermost_lists(child, found)


def _broken(entry: str, message: str, hint: str) -> TrainError:
    return TrainError(message, where=entry, hint=hint, kind="input")
