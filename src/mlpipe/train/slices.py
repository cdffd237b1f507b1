"""Parts of parameters as plain tensors of their own, which a technique cuts and a module computes with: as
exact as DTensor's, and without its dispatch in every operation.

What was cut stands with the module that owns the parameter, by its name there: parameters themselves are made
anew when a model leaves the meta device, and when FSDP2 splits them further.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_ATTRIBUTE = "_slices_of_parameters"


@dataclass(frozen=True)
class Slice:
    """Part `rank` of the `num_ranks` equal parts into which dim `dim` is cut along the mesh's axis `axis`,
    whose process group `group` is (None: the default one)."""

    axis: str
    dim: int
    rank: int
    num_ranks: int
    group: dist.ProcessGroup | None = None

    def of(self, whole: Tensor) -> Tensor:
        """A view of the part."""
        length = whole.shape[self.dim] // self.num_ranks
        return whole.narrow(self.dim, self.rank * length, length)


def keep_slice(module: nn.Module, name: str, cut: Slice, done: dict[int, nn.Parameter]) -> None:
    """Leaves of the parameter `name` of `module` the part `cut`, which must divide it. `done`: those that
    were cut before by their first identity, so that tied ones stay tied."""
    parameter = module._parameters[name]
    assert parameter is not None
    if id(parameter) not in done:
        if parameter.is_meta:  # a view there imports sympy: 0.6 CPU seconds a rank
            shape = list(parameter.shape)
            shape[cut.dim] //= cut.num_ranks
            own = torch.empty(shape, dtype=parameter.dtype, device="meta")
        else:
            own = cut.of(parameter.detach()).clone(memory_format=torch.contiguous_format)
        done[id(parameter)] = nn.Parameter(own, requires_grad=parameter.requires_grad)
    module._parameters[name] = done[id(parameter)]
    kept = module.__dict__.setdefault(_ATTRIBUTE, {})
    kept[name] = (*kept.get(name, ()), cut)


def slices_of(model: nn.Module) -> dict[int, tuple[Slice, ...]]:
    """By the identity of each parameter that is a slice, in the order in which they were cut."""
    return {id(module._parameters[name]): cuts for module, name, cuts in places(model)}


def places(model: nn.Module) -> list[tuple[nn.Module, str, tuple[Slice, ...]]]:
    """Module and name of each parameter that is a slice; of tied ones all."""
    return [
        (module, name, cuts)
        for module in model.modules()
        for name, cuts in module.__dict__.get(_ATTRIBUTE, {}).items()
    ]


def part_of(whole: Tensor, cuts: tuple[Slice, ...]) -> Tensor:
    """A view of what is left of it after all cuts."""
    for cut in cuts:
        whole = cut.of(whole)
    return whole


def whole_of(parameter: Any, cuts: tuple[Slice, ...]) -> Tensor:
    """All parts together, on every rank. A collective of the ranks that have them."""
    whole: Tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter.detach()
    for cut in reversed(cuts):
        parts = [torch.empty_like(whole) for _ in range(cut.num_ranks)]
        dist.all_gather(parts, whole.contiguous(), group=cut.group)
        whole = torch.cat(parts, cut.dim)
    return whole
