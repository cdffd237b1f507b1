"""Low-rank adapters (Hu et al., LoRA, 2021): beside the weight W of a linear layer of a block, which is
not trained, stand A (rank x in) and B (out x rank), and the layer gives x W^T + scale * (x A^T) B^T. B begins
as 0. With DoRA (Liu et al., 2024) the rows of W + scale B A are only directions: each is as long as
`magnitude` says, which is trained as well and begins with the lengths of W's rows.

The names of the model's own parameters stay; they are not stored in checkpoints, since each attempt reads
them where the training started from (`train/starting.py`). With a `base` the linear layers of all blocks keep
their weights in few bits (QLoRA, Dettmers et al., 2023; `models/quantized_linear.py`).
"""

from __future__ import annotations

import math
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlpipe._core.adapters import MAGNITUDE, A, B, scale, targets
from mlpipe._core.errors import PlanError, TrainError
from mlpipe.plan.model import AdapterPlan
from mlpipe.plan.work import TrainPlan
from mlpipe.train.init import same_weights
from mlpipe.train.model import BuiltModel
from mlpipe.train.models.quantized_linear import QuantizedLinear, quantize_layers, quantized_layers
from mlpipe.train.parallel.parallelized_model import ParallelizedModel
from mlpipe.train.shards import local_part
from mlpipe.train.world import World

# inside nn.MultiheadAttention, which computes with its weight and never calls it
_OF_ATTENTION = nn.modules.linear.NonDynamicallyQuantizableLinear
Layer = nn.Linear | QuantizedLinear


def apply(model: ParallelizedModel, world: World, plan: TrainPlan) -> None:
    """Before any other technique: what splits the model splits the adapters as well. Raises TrainError
    (input) for targets that it does not have."""
    assert plan.adapter is not None
    # else an nn.TransformerEncoderLayer computes with the weights of its layers when it is evaluated
    torch.backends.mha.set_fastpath_enabled(False)
    built, adapter = model.built, plan.adapter
    own = built.model
    adapted = _adapt(own, built.blocks, adapter)
    names = (name for name, parameter in own.named_parameters() if not parameter.requires_grad)
    model.base = frozenset(f"model.{name}" for name in names)
    if built.on_meta:
        init: Any = own.init_weights

        def init_weights() -> None:
            init()
            _fill_base(own)
            _fill(adapted)

        own.init_weights = init_weights  # type: ignore[assignment]
    else:
        with torch.no_grad(), same_weights(plan.seed):
            _fill(adapted)
    _build_again(built, adapter)


def _build_again(built: BuiltModel, adapter: AdapterPlan) -> None:
    """What is built once more has them, too."""
    construct, numbers = built.construct, [_number_of(built.model, block) for block in built.blocks]

    def with_adapters() -> nn.Module:
        again = construct()
        _adapt(again, [list(again.modules())[number] for number in numbers], adapter)
        return again

    built.construct = with_adapters


def _number_of(model: nn.Module, block: nn.Module) -> int:
    return next(number for number, module in enumerate(model.modules()) if module is block)


def _adapt(model: nn.Module, blocks: list[nn.Module], adapter: AdapterPlan) -> list[Layer]:
    """In place; the layers that have one now."""
    model.requires_grad_(False)
    inside = {id(module) for block in blocks for module in block.modules()}
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and id(module) in inside and not isinstance(module, _OF_ATTENTION)
    ]
    if adapter.base is not None:
        quantize_layers(model, names, adapter.base)
    layers: dict[str, Any] = {name: model.get_submodule(name) for name in names}
    try:
        chosen = targets(adapter.targets, layers)
    except PlanError as error:
        raise TrainError(error.message, where=error.where, hint=error.hint, kind="input") from None
    if not chosen:
        raise TrainError(
            "no block of the model has a linear layer",
            where="train.adapter",
            hint="name the modules that are blocks in model.blocks",
            kind="input",
        )
    factor = scale(adapter.alpha, adapter.rank, rslora=adapter.rslora)
    for name in chosen:
        layer = layers[name]
        quantized = isinstance(layer, QuantizedLinear)
        dtype = layer.dtype if quantized else layer.weight.dtype
        device = next(layer.parameters()).device
        for key, shape in ((A, (adapter.rank, layer.in_features)), (B, (layer.out_features, adapter.rank))):
            empty = torch.empty(shape, dtype=dtype, device=device)
            layer.register_parameter(key, nn.Parameter(empty))
        if adapter.dora:
            lengths = torch.empty(layer.out_features, dtype=dtype, device=device)
            layer.register_parameter(MAGNITUDE, nn.Parameter(lengths))
        layer.__dict__.update(lora_scale=factor, lora_dropout=adapter.dropout)
        layer.forward = MethodType(_decomposed if adapter.dora else _forward, layer)  # type: ignore[method-assign]
    return [layers[name] for name in chosen]


@torch.no_grad()
def _fill_base(model: nn.Module) -> None:
    """Of few bits, where the model's own init_weights() does not know it: 0, until the weights are read. Each
    draws, of nothing, as a layer of floats does: so adapters are the same beside both."""
    for _, layer in quantized_layers(model):
        torch.empty(0).normal_()
        for parameter in (layer.quantized_weight, layer.bias):
            if parameter is not None:
                parameter.zero_()


@torch.no_grad()
def _fill(layers: list[Layer]) -> None:
    """As peft does."""
    for layer in layers:
        nn.init.kaiming_uniform_(layer.lora_A, a=math.sqrt(5))  # type: ignore[arg-type]
        nn.init.zeros_(layer.lora_B)  # type: ignore[arg-type]
        _measure(layer)


@torch.no_grad()
def after_weights(model: nn.Module) -> None:
    """To be called when weights have been read that are not those of which the adapters were made."""
    for layer in model.modules():
        if A in layer._parameters:
            _measure(layer)


def _measure(layer: Any) -> None:
    if MAGNITUDE in layer._parameters:
        lengths = torch.linalg.vector_norm(local_part(layer.weight), dim=1)
        local_part(layer.lora_magnitude_vector).copy_(lengths)


def _forward(self: Any, x: Tensor) -> Tensor:
    """Of a layer with an adapter."""
    own: Any = QuantizedLinear if isinstance(self, QuantizedLinear) else nn.Linear
    y: Tensor = own.forward(self, x) + added(self, x)
    return y


def added(layer: Any, x: Tensor) -> Tensor:
    """What the adapter of a layer adds to what the layer gives."""
    return _product(layer, _dropped(layer, x))


def _dropped(layer: Any, x: Tensor) -> Tensor:
    return F.dropout(x, layer.lora_dropout, layer.training) if layer.lora_dropout else x


def _product(layer: Any, x: Tensor) -> Tensor:
    y: Tensor = F.linear(F.linear(x, layer.lora_A), layer.lora_B) * layer.lora_scale
    return y


def _of_base(layer: Any, x: Tensor) -> Tensor:
    """x W^T."""
    return layer.product(x) if isinstance(layer, QuantizedLinear) else F.linear(x, layer.weight)


def _decomposed(self: Any, x: Tensor) -> Tensor:
    """Of a layer with an adapter whose magnitude is trained apart. As in peft dropout is of all that the
    magnitude changes, and no gradient goes through the lengths (DoRA, section 4.3)."""
    ratio = self.lora_magnitude_vector / _lengths(self).to(self.lora_magnitude_vector.dtype)
    here, dropped = _of_base(self, x), _dropped(self, x)
    moved = here if dropped is x else _of_base(self, dropped)
    y = here + (ratio - 1) * moved + ratio * _product(self, dropped)
    return y if self.bias is None else y + self.bias


@torch.no_grad()
def _lengths(layer: Any) -> Tensor:
    """Of the rows of W + scale B A, in fp32 or better, without a matrix of the size of W."""
    weight, down = layer.weight, layer.lora_A
    dtype = torch.promote_types(weight.dtype, torch.float32)
    squares = torch.linalg.vector_norm(weight, dim=1, dtype=dtype).square()
    up = layer.lora_B.to(dtype) * layer.lora_scale
    both = (2 * F.linear(weight, down).to(dtype) + up @ F.linear(down, down).to(dtype)) * up
    return (squares + both.sum(1)).clamp_min(torch.finfo(dtype).tiny).sqrt()
