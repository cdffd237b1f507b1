"""The pipeline a user writes, typed. One class a mapping; every field's description is its reference.

Shapes and types live here, of what a kind of stages adds in `kinds/<kind>/spec.py`; what concerns several
fields or stages at once is in `spec/rules.py`.
"""

from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Discriminator, Field, PrivateAttr, Tag, create_model

from mlpipe.kinds import KINDS, Kind
from mlpipe.spec import fields as f
from mlpipe.spec.base import OnNeedOf, SpecModel, one_of
from mlpipe.spec.part import spec_part
from mlpipe.spec.problems import Place

if TYPE_CHECKING:
    from mlpipe.spec.kubernetes import Kubernetes
    from mlpipe.spec.machines import Device, Preflight
    from mlpipe.spec.network import Network
    from mlpipe.spec.slurm import Slurm
    from mlpipe.spec.sweep import Sweep
else:  # each in the module of its name, which is imported for the files that have it
    Kubernetes, Network, Slurm, Sweep = (
        getattr(OnNeedOf(name.lower()), name) for name in ("Kubernetes", "Network", "Slurm", "Sweep")
    )
    _machines = OnNeedOf("machines")
    Device, Preflight = _machines.Device, _machines.Preflight

AnyModel = TypeVar("AnyModel")


_Preflight = Annotated[
    Annotated[Literal["auto", "off"], Tag("word")] | Annotated[Preflight, Tag("limits")],
    Discriminator(lambda value: "limits" if isinstance(value, dict | Preflight) else "word"),
]


class Resources(SpecModel):
    """What a stage gets, on each node and in all."""

    nodes: f.Nodes = Field(
        1,
        description="Machines. A range like `2..8`: an elastic training, which goes on with those that are "
        "there; each holds the whole model, shared among its workers.",
    )
    workers_per_node: f.FewCount | None = Field(
        None,
        description="Worker processes on each node. Default: one per GPU, or 1 without GPUs.",
    )
    gpus_per_node: f.FewOrZero = Field(0, description="GPUs on each node; 0 trains on CPUs.")
    gpu: f.Text | None = Field(None, description="Model of the GPUs, such as `H100-80GB`.")
    slice: f.LabelValue | None = Field(
        None,
        description="Part of a GPU that no other pod can touch (MIG), such as `1g.10gb`: then the GPUs are "
        "these, and one trains alone. Default: whole GPUs.",
    )
    gpu_sharing: Literal["time-slicing", "mps"] | None = Field(
        None,
        description="Pods take turns on a GPU, or are on it at once: memory and speed are not one's own, and "
        "nothing that waits for others may run so. Default: a GPU is one pod's.",
    )
    cpus: f.Cpus | None = Field(
        None,
        description="CPU cores on each node. Default: what is there; in a pod 1 for each worker "
        "(4 with a GPU).",
    )
    memory: f.Size | None = Field(
        None,
        description="Memory on each node. Default: what is there; in a pod 4 GiB for each worker "
        "(32 with a GPU), 2 GiB for other stages.",
    )
    disk: f.Size | None = Field(
        None,
        description="Disk of each pod besides its volumes: scratch, cache, /tmp, logs; a pod that takes more "
        "is ended. Default: at least 2 GiB, at most 64 GiB.",
    )
    hardware: f.Text | None = Field(
        None, description="File of `mlpipe calibrate`: measured speeds instead of the catalogue's."
    )
    device: Device | None = Field(
        None, description="Figures of the GPU, where the catalogue's are not yours."
    )
    preflight: _Preflight | None = Field(
        None,
        description="Machines are checked before ranks start: GPUs, speed, links, store, disk, clocks. One "
        "that does not pass is named, and left out where the stage starts again. `auto`: by the limits that "
        "are defaults. Default: `off`.",
    )
    spares: f.HundredAtMost | None = Field(
        None,
        description="Machines that are held besides `nodes`: where one does not pass the `preflight`, a "
        "spare has its ranks. On Slurm as far as they are free, on Kubernetes all. Default: none.",
    )
    price_usd_per_gpu_hour: f.NotNegative | None = Field(
        None, description="Of one GPU, or CPU worker, for estimates of cost. Default: of the catalogue."
    )

    @property
    def replicas(self) -> tuple[int, int] | None:
        """The fewest and the most machines of an elastic training, each with a replica of the model."""
        return None if isinstance(self.nodes, int) else f.limits_of(self.nodes)

    @property
    def gang_nodes(self) -> int:
        """Machines whose workers start and end together."""
        return self.nodes if isinstance(self.nodes, int) else 1


class MachineGroup(Resources):
    """Machines of one class, of several that train together."""

    speed: f.Positive | None = Field(
        None,
        description="How fast one of its workers is beside those of the other groups, such as 2 and 1. "
        "Default: as the planner expects.",
    )
    node_selector: dict[f.LabelKey, f.LabelValue] | None = Field(
        None, description="Labels that its nodes must have on Kubernetes, besides the stage's."
    )


_Resources = Annotated[
    Annotated[Resources, Tag("one")]
    | Annotated[tuple[MachineGroup, ...], Field(min_length=2, max_length=16, strict=False), Tag("groups")],
    Discriminator(lambda value: "groups" if isinstance(value, list | tuple) else "one"),
]


class _Head(SpecModel):
    name: f.Name = Field(description="Unique in the pipeline.")
    needs: tuple[f.Name, ...] = Field((), strict=False, description="Stages that must be done before.")


if TYPE_CHECKING:
    _OfAnyKind = _Head
else:  # a key for each kind, in the order of the table
    _OfAnyKind = create_model(
        "_OfAnyKind",
        __base__=_Head,
        **{
            name: (spec_part(kind).model | None, Field(None, description=spec_part(kind).description))
            for name, kind in KINDS.items()
        },
    )


class Stage(_OfAnyKind):
    """One step of a pipeline."""

    model_config = ConfigDict(
        json_schema_extra={
            **one_of(*KINDS),
            "description": "One step of a pipeline: exactly one of "
            + ", ".join(f"`{name}`" for name in KINDS)
            + ".",
        }
    )

    env: dict[f.EnvName, f.Text] = Field(
        {},
        description="Environment of the stage; no secrets.",
        json_schema_extra={"additionalProperties": False},
    )
    timeout: f.Duration | None = Field(None, description="Longest time for the stage.")
    resources_: _Resources | None = Field(
        None,
        alias="resources",
        description="Machines; of a training also a list of groups that differ. Default: one CPU worker; of "
        "`evaluate`: those of its training, or of its first group.",
    )

    @property
    def groups(self) -> tuple[MachineGroup, ...]:
        """Where the machines differ."""
        return self.resources_ if isinstance(self.resources_, tuple) else ()

    @property
    def resources(self) -> Resources | None:
        """Of groups those of the first one, with the nodes of all."""
        if not isinstance(self.resources_, tuple):
            return self.resources_
        num_nodes = sum(group.gang_nodes for group in self.resources_)
        return self.resources_[0].model_copy(update={"nodes": num_nodes})

    @property
    def kind(self) -> Kind:
        """`spec/rules.py` has seen that it is exactly one."""
        return next(kind for name, kind in KINDS.items() if getattr(self, name) is not None)

    @property
    def work(self) -> Any:
        """What stands under the key of its kind."""
        return getattr(self, self.kind.name)

    def part(self, model: type[AnyModel]) -> AnyModel | None:
        """`work`, if the stage is of the kind that has this `model`."""
        return self.work if isinstance(self.work, model) else None


class Origin(dict[str, Place]):
    """By the name of a stage, where its resources stand in the file, or else its name. Pipelines are equal
    wherever they stand."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Origin)

    def __ne__(self, other: object) -> bool:  # a dict has one of its own
        return not isinstance(other, Origin)


class Pipeline(SpecModel):
    """The whole file."""

    _origin: Origin = PrivateAttr(default_factory=Origin)

    version: Literal[1] = Field(description="Of this format.")
    name: f.Name = Field(description="Starts the run ids.")
    image: f.Image | None = Field(
        None, description="Container image of pods, of rented machines, and of containers on Slurm."
    )
    store: f.StoreUrl = Field("./runs", description="A folder, or `s3://bucket/prefix`.")
    kubernetes: Kubernetes | None = Field(None, description="How a run looks on a cluster.")
    slurm: Slurm | None = Field(None, description="How a run looks on a Slurm cluster.")
    network: Network | None = Field(None, description="What lies between the nodes of a gang of GPUs.")
    on_orphan: Literal["continue", "cancel"] | None = Field(
        None, description="When whoever waited for the run with `--wait` is gone. Default: `continue`."
    )
    stages: Annotated[tuple[Stage, ...], Field(min_length=1, strict=False)] = Field(
        description="The steps; `needs` orders them."
    )
    sweep: Sweep | None = Field(
        None, description="Not one run but several, which differ in some values: `mlpipe sweep`."
    )

    def stage(self, name: str) -> Stage:
        """Raises KeyError."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise KeyError(name)

    def place(self, stage: str) -> Place | None:
        """For an error that concerns all of the stage; None: nobody has read it from a file."""
        return self._origin.get(stage)

    def resolved_yaml(self) -> str:
        """All overrides and defaults written out; loads back to an equal Pipeline in any YAML parser."""
        from mlpipe._core.yaml import to_yaml

        return to_yaml(self.model_dump(mode="json", by_alias=True, exclude_none=True))

    @cached_property
    def digest(self) -> str:
        """sha256 of `resolved_yaml()`. Every stage's plan names it."""
        import hashlib  # loads OpenSSL

        return hashlib.sha256(self.resolved_yaml().encode()).hexdigest()
