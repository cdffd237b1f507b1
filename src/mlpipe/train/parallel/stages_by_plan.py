"""Stages of a class of `transformers`, by the plan that its config brings (`base_model_pp_plan`): ids go into
the base model's `embed_tokens`, what that gives through its `layers` one after the other and into its `norm`.
Whatever else the whole model has, as a head, comes last.

Positions and masks, which are the same for all layers, each stage makes for itself: it runs the class's own
forward, with nothing in the places of what lies on other stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from mlpipe.train.models.llama import Part

_PLAN = ("embed_tokens", "layers", "norm")


def base_of(model: nn.Module) -> Any:
    """The model below the head, of a class with such a plan; of others None."""
    plan: Mapping[str, Any] | None = getattr(getattr(model, "config", None), "base_model_pp_plan", None)
    base = getattr(model, getattr(model, "base_model_prefix", None) or "", None)
    return base if isinstance(base, nn.Module) and tuple(plan or ()) == _PLAN else None


def children_by_plan(model: nn.Module, base: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """By name, in the order in which they compute; layers one by one."""
    prefix = next(name for name, child in model.named_children() if child is base)
    for name in _PLAN:
        child = base.get_submodule(name)
        if isinstance(child, nn.ModuleList):
            yield from ((f"{prefix}.{name}.{number}", layer) for number, layer in child.named_children())
        else:
            yield f"{prefix}.{name}", child
    yield from ((name, child) for name, child in model.named_children() if child is not base)


def of_all_stages(model: nn.Module) -> dict[str, nn.Module]:
    """By name what every stage has, as the rotation of positions: of the base model what its plan does not
    name, if that has no parameters."""
    base = base_of(model)
    if base is None:
        return {}
    prefix = next(name for name, child in model.named_children() if child is base)
    others = {name: child for name, child in base.named_children() if name not in _PLAN}
    return {f"{prefix}.{name}": child for name, child in others.items() if not list(child.parameters())}


class _Elsewhere(nn.Module):
    """A layer of another stage."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states


@contextmanager
def _only(base: Any, part: Part) -> Iterator[None]:
    """Every layer keeps its number, by which some classes choose its mask."""
    layers, norm, own = base.layers, base.norm, {id(block) for block in part.blocks}
    base.layers = nn.ModuleList(layer if id(layer) in own else _Elsewhere() for layer in layers)
    base.norm = norm if id(norm) in own else nn.Identity()
    try:
        yield
    finally:
        base.layers, base.norm = layers, norm


def forward_stage(model: nn.Module, base: Any, part: Part, received: Tensor) -> Any:
    """What the model gives, of the last stage; of others what their last layer gives (B, T, D). `received`:
    ids (B, T), or what the stage before gave."""
    key = "input_ids" if part.is_first else "inputs_embeds"
    with _only(base, part):
        if part.is_last:
            return model(**{key: received}, use_cache=False)
        return base(**{key: received}, use_cache=False).last_hidden_state
