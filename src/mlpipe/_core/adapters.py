"""Low-rank adapters (Hu et al., LoRA, 2021; Liu et al., DoRA, 2024): which matrices of a model they stand
beside, and what they count for. No torch: the planner counts by the same names."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from mlpipe._core.errors import PlanError
from mlpipe._core.patterns import matching, nearest

A, B = "lora_A", "lora_B"  # the parameters that a module has besides, of rows `rank` and columns `rank`
MAGNITUDE = "lora_magnitude_vector"  # with DoRA: how long each row of the weight is


def is_adapter(name: str) -> bool:
    """Of the name of a parameter."""
    return name.rpartition(".")[2] in (A, B, MAGNITUDE)


def targets(patterns: Sequence[str], names: Iterable[str]) -> list[str]:
    """Of the modules `names` those that get one: that fit a pattern as a whole, or by what follows the last
    dot; without patterns all. Raises PlanError for a pattern that fits none."""
    known = list(names)
    if not patterns:
        return known
    chosen: set[str] = set()
    for pattern in patterns:
        fitting = {name for name in known if matching(pattern, (name, name.rpartition(".")[2]))}
        if not fitting:
            raise PlanError(
                f"{pattern!r} fits no linear layer of a block",
                where="train.adapter.lora.targets",
                hint=nearest(pattern, known) if known else "there is none",
            )
        chosen |= fitting
    return [name for name in known if name in chosen]


def scale(alpha: float, rank: int, *, rslora: bool) -> float:
    """What the product of both matrices is multiplied with; `rslora`: Kalajdzievski, 2023."""
    return alpha / (math.sqrt(rank) if rslora else rank)
