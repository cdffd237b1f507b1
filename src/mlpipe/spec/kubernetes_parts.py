"""Mappings in the `kubernetes` section that few files have."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from mlpipe.spec import fields as f
from mlpipe.spec.base import SpecModel, one_of


class Topology(SpecModel):
    """Kueue's topology-aware scheduling: the gang in one domain."""

    model_config = ConfigDict(json_schema_extra=one_of("required", "preferred"))

    required: f.LabelKey | None = Field(None, description="Node label; waits until one domain has room.")
    preferred: f.LabelKey | None = Field(None, description="Node label; else as few domains as possible.")
    inner: f.LabelKey | None = Field(
        None,
        description="Node label of smaller domains, such as racks: each group of nodes whose ranks share "
        "weights (`dp_shard`, `cp`, `tp`) in one; of a pipeline all stages, if `network.racks` says that one "
        "has as many nodes; replicas may stand in several.",
    )


class EnvFrom(SpecModel):
    """All keys of one Secret or ConfigMap as environment variables."""

    model_config = ConfigDict(json_schema_extra=one_of("secret", "config_map"))

    secret: f.ObjectName | None = Field(None, description="Name of the Secret.")
    config_map: f.ObjectName | None = Field(None, description="Name of the ConfigMap.")


class SecretKey(SpecModel):
    """One key of a Secret."""

    secret: f.ObjectName = Field(description="Name of the Secret.")
    key: f.DataKey = Field(description="Key in it.")


class WebIdentity(SpecModel):
    """Pods have no keys of the store: each shows the token of its ServiceAccount and is lent some (STS
    AssumeRoleWithWebIdentity; IRSA on EKS)."""

    role: f.Arn | None = Field(
        None, description="Of the workers. Default: what the server knows by the token."
    )
    driver_role: f.Arn | None = Field(None, description="Of the driver. Default: `role`.")
    audience: f.Audience = Field("sts.amazonaws.com", description="Whom the token is for.")
    endpoint: f.HttpUrl | None = Field(
        None, description="Token service, as seen in the cluster. Default: the store's server, or AWS's."
    )


class CaBundle(SpecModel):
    """Certificates that the pods trust, instead of those in the image."""

    config_map: f.ObjectName = Field(description="Name of the ConfigMap.")
    key: f.DataKey = Field("ca.crt", description="Its key with all certificates, PEM.")


class Proxy(SpecModel):
    """The way out of the cluster, for whoever reads these variables."""

    http: f.HttpUrl | None = Field(None, description="HTTP_PROXY.")
    https: f.HttpUrl | None = Field(None, description="HTTPS_PROXY.")
    no_proxy: tuple[f.Text, ...] = Field(
        (), strict=False, description="Hosts besides the cluster's own (`.svc`, `.cluster.local`)."
    )


class Rdma(SpecModel):
    """Remote memory access between nodes. Needs IPC_LOCK, which only Pod Security `privileged` allows."""

    resource: f.ResourceName = Field(description="Of the device plugin, like `rdma/hca`.")
    count: f.FewCount = Field(1, description="Devices a pod.")


class Cache(SpecModel):
    """A claim in which copies of data and what compilers make outlive the pods. Whoever may write to it
    decides what all its trainings read and run."""

    claim: f.ObjectName = Field(
        description="Name of the claim; for stages on several nodes one that many nodes may write to."
    )
    sub_path: f.SubPath | None = Field(None, description="Folder in the volume. Default: its root.")


class GpuClaims(SpecModel):
    """GPUs by dynamic resource allocation (`resource.k8s.io/v1`): each pod has a ResourceClaim for its own,
    instead of a device plugin's resource."""

    device_class: f.ObjectName | None = Field(
        None, description="DeviceClass. Default: by the vendor of `resources.gpu`, such as `gpu.nvidia.com`."
    )
    expression: f.Text | None = Field(
        None, description="CEL that a device must fulfil. Default: the product, or the slice, by its vendor."
    )


class PatchTarget(SpecModel):
    """Which objects a patch changes: those that fit all of these."""

    kind: Literal["Pod", "Job", "JobSet", "TrainJob", "Service", "ConfigMap", "PodGroup"] = Field(
        description="`Pod`: the pod template inside a Job or JobSet, or that a TrainJob is made from."
    )
    stage: f.Name | None = Field(None, description="Default: every stage.")
    component: Literal["worker", "driver"] | None = Field(None, description="Default: both.")


class Patch(SpecModel):
    """A last change to what is rendered."""

    model_config = ConfigDict(json_schema_extra=one_of("strategic", "json"))

    target: PatchTarget = Field(description="What to change.")
    strategic: dict[f.Text, f.Json] | None = Field(
        None, description="Merged in; lists of things with names by their names, null removes a key."
    )
    json_: Annotated[tuple[dict[f.Text, f.Json], ...], Field(strict=False)] | None = Field(
        None, alias="json", description="Operations of RFC 6902; paths of a `Pod` start at its template."
    )


class TrainJob(SpecModel):
    """A gang is a TrainJob of Kubeflow Trainer, made from a runtime that the platform owns."""

    runtime: f.ObjectName = Field(description="Name of the runtime.")
    kind: Literal["ClusterTrainingRuntime", "TrainingRuntime"] = Field(
        "ClusterTrainingRuntime", description="Of the runtime: `TrainingRuntime` is one of the namespace."
    )
    overrides: Literal["runtimePatches", "podTemplateOverrides"] = Field(
        "runtimePatches",
        description="Field in which the pods are described: Trainer 2.1 calls it `podTemplateOverrides`.",
    )


class Toleration(SpecModel):
    """A taint that the pods may stand on."""

    key: f.LabelKey | None = Field(None, description="Of the taint. Default: every taint.")
    operator: Literal["Exists", "Equal"] = Field("Exists", description="`Equal` compares `value`.")
    value: f.LabelValue | None = Field(None, description="Of the taint, with `Equal`.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        None, description="Default: every effect."
    )
    toleration_seconds: f.CountOrZero | None = Field(
        None, description="Of `NoExecute`: how long to stay. Default: for ever."
    )


class Scratch(SpecModel):
    """A volume of each pod's own (a generic ephemeral volume), which ends with the pod: for what a stage
    keeps on the way, and for copies of data."""

    size: f.Size = Field(description="Of the volume, such as `500 GiB`.")
    storage_class: f.ObjectName | None = Field(
        None, description="StorageClass, such as one of local NVMe disks. Default: the cluster's."
    )


class Placement(SpecModel):
    """Where some of the pods stand, and what disk they have. A key that is there says all of it: what is said
    for all pods does not count besides."""

    node_selector: dict[f.LabelKey, f.LabelValue] | None = Field(
        None, description="Labels that a node must have."
    )
    prefer: dict[f.LabelKey, f.LabelValue] | None = Field(None, description=f.PREFER)
    tolerations: Annotated[tuple[Toleration, ...], Field(strict=False)] | None = Field(
        None, description="Besides that of the GPUs."
    )
    priority_class: f.ObjectName | None = Field(None, description="PriorityClass of the pods.")
    runtime_class: f.ObjectName | None = Field(None, description="RuntimeClass of the pods.")
    scratch: Scratch | None = Field(None, description="Disk of each pod's own, which is not its node's.")
