"""What is done to a model so that many ranks train it, in this order. Each technique is a module beside this
one, with `apply(model, world, plan)`, which changes `model` in place.

Whether one applies follows from the plan's mesh and flags. A module is imported only then: DTensor alone,
which `fully_shard` needs, costs every rank 2 s.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple, Protocol, cast

from mlpipe._core.presets import MOE, OWN
from mlpipe.plan.work import TrainPlan
from mlpipe.train.model import BuiltModel
from mlpipe.train.parallel.parallelized_model import ParallelizedModel
from mlpipe.train.parallel.waits import Waits
from mlpipe.train.world import World


class Technique(NamedTuple):
    """A module of this folder, and whether a plan asks for it."""

    name: str
    applies: Callable[[TrainPlan], bool]


def _averages(plan: TrainPlan) -> bool:
    """Whether ranks have copies of all that they compute with, and average gradients as they come."""
    mesh = plan.mesh
    return mesh.dp_replicate * mesh.cp > 1 == mesh.dp_shard == mesh.pp and plan.islands is None


TECHNIQUES = (
    Technique("lora", lambda plan: plan.adapter is not None),
    Technique("pipeline", lambda plan: plan.mesh.pp > 1),
    Technique("tensor", lambda plan: plan.mesh.tp > 1 and plan.model.build.entry in OWN),
    Technique("tensor_by_pattern", lambda plan: plan.mesh.tp > 1 and plan.model.build.entry not in OWN),
    Technique("context", lambda plan: plan.mesh.cp > 1),
    Technique("experts", lambda plan: plan.mesh.ep > 1),
    Technique("float8", lambda plan: plan.float8),
    Technique("activation_checkpointing", lambda plan: plan.activation_checkpointing != "none"),
    Technique("compile", lambda plan: plan.compile != "off"),
    Technique("fully_shard", lambda plan: plan.mesh.dp_shard > 1),
    # from here on the weights are real: until then they may be on the meta device
    Technique("materialize", lambda plan: True),
    # copies of what is split are the affair of fully_shard, those of stages of pipeline_gradients
    Technique("replicate", lambda plan: _averages(plan) and plan.compress is None),
    Technique("compress", lambda plan: _averages(plan) and plan.compress is not None),
    Technique("shard_optimizer", lambda plan: plan.shard_optimizer and plan.mesh.dp_replicate > 1),
    Technique("sum_partial_gradients", lambda plan: plan.mesh.tp > 1),
    Technique("check_gradients", lambda plan: plan.mesh.tp > 1 and plan.model.build.entry not in OWN),
    Technique("pipeline_gradients", lambda plan: plan.mesh.pp > 1),
    Technique("balance_experts", lambda plan: plan.model.build.entry == MOE),
    Technique("fused_head", lambda plan: plan.loss == "fused"),
    Technique("offload_activations", lambda plan: plan.offload in ("activations", "all")),
)


class TechniqueModule(Protocol):
    """What a module of this folder has."""

    def apply(self, model: ParallelizedModel, world: World, plan: TrainPlan) -> None:
        """Changes `model` in place."""
        ...


def techniques(plan: TrainPlan) -> list[TechniqueModule]:
    """Those that the plan asks for, imported, in the order of application."""
    names = [technique.name for technique in TECHNIQUES if technique.applies(plan)]
    return [cast(TechniqueModule, import_module(f"mlpipe.train.parallel.{name}")) for name in names]


def parallelize(built: BuiltModel, world: World, plan: TrainPlan) -> ParallelizedModel:
    """`built.module` may be on the meta device; afterwards its weights are real, the same for a seed under
    every mesh."""
    model = ParallelizedModel(built, built.module, Waits(world.device))
    for technique in techniques(plan):
        technique.apply(model, world, plan)
    return model
