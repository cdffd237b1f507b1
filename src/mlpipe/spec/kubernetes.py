"""The `kubernetes` section of a pipeline file, typed. Mappings in it that few files have:
`spec/kubernetes_parts.py`. Between its values: `spec/kubernetes_rules.py`."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from mlpipe.spec import fields as f
from mlpipe.spec.base import OnNeedOf, SpecModel

if TYPE_CHECKING:
    from mlpipe.spec import kubernetes_parts as parts
else:
    parts = OnNeedOf("kubernetes_parts")


class Volume(SpecModel):
    """A PersistentVolumeClaim, mounted in every pod of the run."""

    claim: f.ObjectName = Field(description="Name of the claim.")
    path: f.MountPath = Field(description="Where the pods see it.")
    sub_path: f.SubPath | None = Field(None, description="Folder in the volume. Default: its root.")
    read_only: bool = Field(False, description="Mount without the right to write.")


class ClusterStore(SpecModel):
    """How pods reach an S3 store; a folder needs a volume instead."""

    secret: f.ObjectName | None = Field(
        None,
        description="Secret with the keys AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, for keys that end, "
        "AWS_SESSION_TOKEN. Default: `mlpipe-store`.",
    )
    driver_secret: f.ObjectName | None = Field(
        None,
        description="The driver's, which promotes, and so writes more than workers. Default: `secret`.",
    )
    web_identity: parts.WebIdentity | None = Field(
        None, description="Instead of Secrets: keys lent for a token."
    )
    endpoint: f.HttpUrl | None = Field(
        None, description="As seen in the cluster, like `http://minio.storage:9000`. Default: AWS."
    )
    region: f.LabelValue | None = Field(None, description="Default: that of the S3 client.")


class Kubernetes(SpecModel):
    """How a run looks on a cluster; every other backend ignores it."""

    form: Literal["jobset", "indexed-job", "trainjob"] = Field(
        "jobset",
        description="`indexed-job` needs no CRD, but a gang is not restarted as a whole; `trainjob` is for "
        "clusters with Kubeflow Trainer.",
    )
    trainjob: parts.TrainJob | None = Field(None, description="Of the form `trainjob`: what it is made from.")
    namespace: f.DnsLabel | None = Field(None, description="Default: that of the client's context.")
    queue: f.QueueName | None = Field(None, description="Kueue's LocalQueue.")
    queue_priority: f.QueueName | None = Field(None, description="Kueue's WorkloadPriorityClass.")
    topology: parts.Topology | None = Field(None, description="Kueue's topology-aware scheduling.")
    volcano_queue: f.ObjectName | None = Field(None, description="Volcano schedules the gang, in this queue.")
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = Field(
        "IfNotPresent", description="When a node fetches the image."
    )
    prepull: bool | None = Field(
        None,
        description="Nodes of stages that wait for others fetch the image meanwhile; not where nodes come as "
        "pods ask for them.",
    )
    image_pull_secrets: tuple[f.ObjectName, ...] = Field(
        (), strict=False, description="Secrets with the registry's credentials."
    )
    node_selector: dict[f.LabelKey, f.LabelValue] = Field({}, description="Labels that a node must have.")
    prefer: dict[f.LabelKey, f.LabelValue] | None = Field(None, description=f.PREFER)
    tolerations: tuple[parts.Toleration, ...] = Field(
        (), strict=False, description="Besides that of the GPUs."
    )
    priority_class: f.ObjectName | None = Field(None, description="PriorityClass of the pods.")
    runtime_class: f.ObjectName | None = Field(None, description="RuntimeClass of the pods.")
    scratch: parts.Scratch | None = Field(
        None, description="Disk of each pod's own, which is not its node's."
    )
    cache: parts.Cache | None = Field(None, description="What of the stages' caches outlives their pods.")
    volumes: tuple[Volume, ...] = Field((), strict=False, description="Claims to mount in every pod.")
    env_from: tuple[parts.EnvFrom, ...] = Field((), strict=False, description="For the workers.")
    secret_env: dict[f.EnvName, parts.SecretKey] = Field(
        {},
        description="Variables of the workers from single keys of Secrets.",
        json_schema_extra={"additionalProperties": False},
    )
    driver_secret_env: dict[f.EnvName, parts.SecretKey] = Field(
        {},
        description="The same of the driver, which promotes: how it logs in at MLflow's registry, "
        "`MLFLOW_TRACKING_...` only.",
        json_schema_extra={"additionalProperties": False},
    )
    store: ClusterStore = Field(
        default_factory=lambda: ClusterStore.model_construct(), description="How pods reach an S3 store."
    )
    ca_bundle: parts.CaBundle | None = Field(None, description="Certificates to trust.")
    proxy: parts.Proxy | None = Field(None, description="The way out of the cluster.")
    service_account: f.ObjectName = Field(
        "mlpipe-worker", description="Of the workers; its token is not mounted."
    )
    driver_service_account: f.ObjectName = Field(
        "mlpipe-driver", description="Of the driver, bound to the shipped Role."
    )
    shm: f.Size | None = Field(
        None, description="/dev/shm; counts as memory. Default: a quarter of the memory, at most 32 GiB."
    )
    rdma: parts.Rdma | None = Field(None, description="Remote memory access between nodes.")
    max_gang_restarts: f.FewOrZero = Field(
        3, description="Restarts of all pods of a stage; those by evictions and preemptions are free."
    )
    ttl: f.Duration = Field("7 d", description="How long ended jobs stay to be looked at.")
    gpu_resource: f.ResourceName = Field(
        "nvidia.com/gpu",
        description="Name of the GPUs as a resource. The default stands for that of the vendor of "
        "`resources.gpu`.",
    )
    gpu_product: f.LabelValue | None = Field(
        None,
        description="Label of the nodes' GPUs, of NVIDIA's `nvidia.com/gpu.product`. Default: by "
        "`resources.gpu`.",
    )
    gpu_claims: parts.GpuClaims | None = Field(
        None, description="GPUs by ResourceClaims. Default: by a device plugin's resource."
    )
    gpu_pods: parts.Placement | None = Field(
        None, description="Where pods with GPUs stand. Default: where all do."
    )
    stages: (
        Annotated[dict[f.Name, parts.Placement], Field(json_schema_extra={"additionalProperties": False})]
        | None
    ) = Field(None, description="Where the pods of single stages stand; goes before `gpu_pods`.")
    patches: tuple[parts.Patch, ...] = Field((), strict=False, description="Applied last, in this order.")
