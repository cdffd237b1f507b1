"""How workers are laid out, for the trainings that say so: `mesh`, `pipeline` and `context`. Rules:
`spec/mesh.py`, `spec/pipelines.py`."""

from typing import Annotated, Literal

from pydantic import Field

from mlpipe._core import meshes, pipelines
from mlpipe._core.feasibility import Infeasible
from mlpipe.spec import fields as f
from mlpipe.spec.base import SpecModel


class MeshSizes(SpecModel):
    """How the workers are laid out. The sizes of all axes but `ep` multiply to nodes x workers per node; one
    may be `fill`, which takes what the others leave."""

    pp: f.CountOrFill = Field(1, description="Stages of a pipeline, which hold blocks one after the other.")
    dp_replicate: f.CountOrFill = Field(1, description="Copies of the model, which read different samples.")
    dp_shard: f.CountOrFill = Field(
        1, description="Workers that share a copy's weights and read different samples."
    )
    cp: f.CountOrFill = Field(1, description="Workers that share each sequence.")
    tp: f.CountOrFill = Field(1, description="Workers that share each matrix product; neighbours in a node.")
    ep: f.Count = Field(1, description="Of the neighbours along `dp_shard`, so many hold different experts.")

    def on(self, num_workers: int) -> dict[str, int] | Infeasible:
        """Sizes of all axes."""
        return meshes.resolve(self.model_dump(), num_workers)


class Pipelining(SpecModel):
    """How the stages of a pipeline work together, where the mesh has `pp`."""

    schedule: pipelines.Schedule = Field(
        pipelines.DEFAULT,
        description="`gpipe` (all forward passes, then all backward passes), `1f1b` (holds fewer "
        "microbatches), `interleaved` (two stages a worker, half as idle, twice the transfers) or "
        "`zero_bubble` (weights' gradients are computed when nothing else can be).",
    )
    cut: Literal["auto"] | Annotated[tuple[f.Text, ...], Field(strict=False)] = Field(
        "auto",
        description="Of a model of your own, the modules with which its stages begin, but for the first: "
        "names of children, like `[layers.4]`, between which its forward does nothing, or layers of a "
        "class of `transformers` that brings a plan, like `[model.layers.4]`. `auto`: such that the longest "
        "stage has as few FLOPs as can be.",
    )
    microbatches: f.CountOrAuto = Field(
        "auto", description="Of a step on each data rank: the same as `accumulation`."
    )


class Context(SpecModel):
    """How the workers that share each sequence work together, where the mesh has `cp`."""

    exchange: Literal["auto", "all_gather", "ring"] = Field(
        "auto",
        description="How keys and values come to all of them. `all_gather`: at once, in each layer. `ring`: "
        "from worker to worker, of one at a time, beside computing. `auto`: the cheaper by the planner; with "
        "`deterministic`, `all_gather`.",
    )
