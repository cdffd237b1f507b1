"""What a stage needs on a Kubernetes cluster: the `kubernetes` section of the pipeline, resolved.

Importable with the standard library alone. Written by `plan/build.py`, read by `render/` and `submit/`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

from mlpipe._core.serial import Sparse

Component = Literal["worker", "driver"]
GPU_LABEL = "nvidia.com/gpu.product"
PatchKind = Literal["Pod", "Job", "JobSet", "TrainJob", "Service", "ConfigMap", "PodGroup"]


class Topology(NamedTuple):
    """Kueue's: the pods of a gang in one domain, which nodes name by the label `label`."""

    label: str
    required: bool
    inner: Sparse[str | None] = None  # label of domains of ranks that share weights
    inner_nodes: Sparse[int | None] = None  # that one has for the run, if known


class Toleration(NamedTuple):
    """As of a pod; None: not said."""

    key: str | None
    operator: Literal["Exists", "Equal"]
    value: str | None
    effect: str | None
    toleration_seconds: int | None


class Volume(NamedTuple):
    """A claim of the namespace, mounted at `path`."""

    claim: str
    path: str
    sub_path: str | None
    read_only: bool


class EnvFrom(NamedTuple):
    """All keys of a Secret or ConfigMap as variables."""

    kind: Literal["secret", "config_map"]
    name: str


class SecretKey(NamedTuple):
    """One value in a Secret."""

    secret: str
    key: str


class WebIdentity(NamedTuple):
    """Roles: ARN; None: what the server knows by the token. `endpoint`: of the token service; None: by the
    store's."""

    role: str | None
    driver_role: str | None
    audience: str
    endpoint: str | None


class CaBundle(NamedTuple):
    """Where in a ConfigMap the certificates stand that are trusted besides."""

    config_map: str
    key: str


class Proxy(NamedTuple):
    """Of requests that leave the cluster."""

    http: str | None
    https: str | None
    no_proxy: tuple[str, ...]


@dataclass(frozen=True)
class Rdma:
    """Devices of a pod of a gang, by the name of their resource."""

    resource: str
    count: int


class GpuClaims(NamedTuple):
    """A ResourceClaim for the GPUs of a pod. `expression`: CEL; None: any device of the class."""

    device_class: str
    expression: str | None


class TopologyFile(NamedTuple):
    """NCCL's, in a ConfigMap."""

    config_map: str
    key: str


class PodNetwork(NamedTuple):
    """What each pod of a gang has for the network between nodes."""

    resources: dict[str, int]
    annotations: dict[str, str]
    hugepages_bytes: int
    pinned_memory: bool
    topology: Sparse[TopologyFile | None] = None


class Scratch(NamedTuple):
    """A volume that comes and ends with a pod. `storage_class`: None: the cluster's default."""

    size_bytes: int
    storage_class: str | None


class Cache(NamedTuple):
    """A claim in which a stage's caches outlive its pods."""

    claim: str
    sub_path: str | None


class Placement(NamedTuple):
    """Where pods stand, and on which disk."""

    node_selector: dict[str, str]
    tolerations: tuple[Toleration, ...]
    priority_class: str | None
    runtime_class: str | None
    prefer: Sparse[dict[str, str] | None] = None  # labels of nodes to take first
    scratch: Sparse[Scratch | None] = None


class Patch(NamedTuple):
    """Exactly one of `strategic` and `json` is set. `stage`, `component`: None means all."""

    kind: PatchKind
    stage: str | None
    component: Component | None
    strategic: dict[str, Any] | None
    json: tuple[dict[str, Any], ...] | None


class TrainJob(NamedTuple):
    """Kubeflow Trainer's. `overrides`: the field in which it changes the runtime's pods; Trainer 2.2 renamed
    it."""

    runtime: str
    kind: Literal["ClusterTrainingRuntime", "TrainingRuntime"]
    overrides: Literal["runtimePatches", "podTemplateOverrides"]


class GroupPods(NamedTuple):
    """What the pods of one group of machines have of their own, as of ClusterPlan."""

    num_nodes: int
    node_selector: dict[str, str]
    cpus: float
    memory_bytes: int
    shm_bytes: int
    disk_bytes: int | None
    gpu_resource: str
    gpu_product: str | None
    gpu_label: str
    gpu_taint: str | None
    sharing_label: str | None
    network: PodNetwork | None


class ClusterPlan(NamedTuple):
    """Those from `cpus` to `disk_bytes`, those of GPUs and where the pods stand are of one stage (`of_run`:
    of none); all others are of the whole run. `image`: None is refused when it is rendered."""

    form: Literal["jobset", "indexed-job", "trainjob"]
    image: str | None
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"]
    image_pull_secrets: tuple[str, ...]
    namespace: str | None  # None: that of the client's context
    queue: str | None  # Kueue's LocalQueue
    queue_priority: str | None  # Kueue's WorkloadPriorityClass
    topology: Topology | None
    volcano_queue: str | None
    node_selector: dict[str, str]
    tolerations: tuple[Toleration, ...]  # besides that of the GPUs
    priority_class: str | None
    runtime_class: str | None
    volumes: tuple[Volume, ...]
    env_from: tuple[EnvFrom, ...]
    secret_env: dict[str, SecretKey]
    store_secret: str  # its keys: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, perhaps AWS_SESSION_TOKEN
    store_endpoint: str | None  # as seen in the cluster; None: AWS
    store_region: str | None
    ca_bundle: CaBundle | None
    proxy: Proxy | None
    service_account: str
    driver_service_account: str
    rdma: Rdma | None
    max_gang_restarts: int
    ttl_seconds: int
    gpu_resource: str
    patches: tuple[Patch, ...]
    cpus: float  # of one pod
    memory_bytes: int  # of one pod, with /dev/shm
    shm_bytes: int
    gpus_per_node: int
    gpu_product: str | None  # value of the nodes' label `gpu_label`; None: any
    disk_bytes: int | None = None  # of one pod: scratch, cache, /tmp, logs; None: render/pod.py's defaults
    store_driver_secret: str | None = None  # of the whole run; None: `store_secret`
    store_web_identity: WebIdentity | None = None  # of the whole run; then no Secret is read
    driver_secret_env: Mapping[str, SecretKey] = {}
    # Of nodes: the label that has `gpu_product`; that which says how pods share a GPU, if it is looked at,
    # and what it must say (None: that they do not); their taint (None: `gpu_resource`).
    gpu_label: Sparse[str] = GPU_LABEL
    sharing_label: Sparse[str | None] = None
    gpu_sharing: Sparse[str | None] = None
    gpu_taint: Sparse[str | None] = None
    # Claims instead of `gpu_resource`; where pods stand that are of no stage, if not where this one's do.
    gpu_claims: Sparse[GpuClaims | None] = None
    run_placement: Sparse[Placement | None] = None
    prefer: Sparse[dict[str, str] | None] = None  # as of Placement
    trainjob: Sparse[TrainJob | None] = None  # of the whole run; with that form
    network: Sparse[PodNetwork | None] = None  # of a gang's pods
    scratch: Sparse[Scratch | None] = None  # of a stage's pods
    cache: Sparse[Cache | None] = None  # likewise
    prepull: Sparse[bool] = False  # of the whole run
    # Of a gang on machines that differ, in the order of their nodes; all above is then of the first.
    groups: Sparse[tuple[GroupPods, ...]] = ()

    def of_group(self, number: int) -> Self:
        """For the pods of one of the groups."""
        own = {name: value for name, value in self.groups[number]._asdict().items() if name != "num_nodes"}
        return self._replace(groups=(), **own)

    def of_run(self) -> Self:
        """For the pods that are of no stage, which keep little."""
        placement, small = self.run_placement, self._replace(scratch=None, cache=None)
        if placement is None:
            return small
        return small._replace(
            node_selector=placement.node_selector,
            tolerations=placement.tolerations,
            priority_class=placement.priority_class,
            runtime_class=placement.runtime_class,
            prefer=placement.prefer,
            run_placement=None,
        )
