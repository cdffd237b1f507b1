"""The `slurm` section of a pipeline file, typed. Between its values: `spec/slurm_rules.py`."""

from typing import Literal

from pydantic import Field

from mlpipe.spec import fields as f
from mlpipe.spec.base import SpecModel


class SlurmNodeKeys(SpecModel):
    """Which nodes, and by which right."""

    partition: f.SlurmName | None = Field(None, description="Default: the cluster's.")
    qos: f.SlurmName | None = Field(None, description="Quality of service. Default: the account's.")
    reservation: f.SlurmName | None = Field(None, description="Nodes that are kept for it.")
    constraint: f.SlurmConstraint | None = Field(None, description="Features that the nodes must have.")
    gpu_type: f.SlurmName | None = Field(
        None, description="The cluster's name of the GPUs, such as `h100` in `gpu:h100:8`. Default: any."
    )


class SlurmJobKeys(SlurmNodeKeys):
    """What a job asks Slurm for besides nodes, cores, memory and GPUs, which are `resources`."""

    account: f.SlurmName | None = Field(None, description="Whose hours are spent. Default: the user's.")
    time: f.Duration | None = Field(
        None,
        description="Limit of one allocation: shortly before, the training saves and queues again. Default: "
        "the partition's, before which nothing is saved.",
    )
    options: dict[f.SbatchOption, f.Text] = Field(
        {},
        description="Other long options of sbatch and their values, such as `mail-type: END`; a flag has the "
        "value ''.",
        json_schema_extra={"additionalProperties": False},
    )


class SlurmStageKeys(SlurmJobKeys):
    """What is different for one stage."""

    groups: tuple[SlurmNodeKeys, ...] = Field(
        (),
        strict=False,
        description="Of `resources` that list groups of machines what is different for each, in their order: "
        "they are the components of a heterogeneous job.",
    )


class SlurmContainer(SpecModel):
    """What runs the stage's processes in an image that has mlpipe."""

    runtime: Literal["pyxis", "apptainer"] = Field(description="`pyxis`: `srun --container-image`.")
    image: f.Text | None = Field(
        None,
        description="As the runtime takes it: a reference or a file. Default: the pipeline's `image`, "
        "in its words.",
    )
    mounts: tuple[f.ListedPath, ...] = Field(
        (), strict=False, description="Folders that are seen inside as outside, besides the scratch folder."
    )


class Slurm(SlurmJobKeys):
    """How a run looks on a Slurm cluster; every other backend ignores it."""

    python: f.Program = Field("python", description="The Python that has mlpipe, as the nodes find it.")
    modules: tuple[f.SlurmName, ...] = Field(
        (), strict=False, description="Environment modules to load before."
    )
    container: SlurmContainer | None = Field(None, description="Default: the nodes' own software.")
    scratch: f.ListedPath | None = Field(
        None, description="Folder on each node's own disk. Default: `$TMPDIR`, or /tmp."
    )
    max_requeues: f.FewOrZero = Field(
        3,
        description="Of a job that fails by its infrastructure. Slurm counts those by limit and preemption, "
        "too, which have no bound themselves.",
    )
    stages: dict[f.Name, SlurmStageKeys] = Field(
        {},
        description="What is different for single stages.",
        json_schema_extra={"additionalProperties": False},
    )
