"""From the pipeline's `kubernetes` section and a stage's resources to the ClusterPlan of its pods."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

from mlpipe._core.errors import PlanError
from mlpipe._core.gpus import DEFAULT_RESOURCE, gpu_classes, vendor_of
from mlpipe._core.units import format_bytes, parse_bytes, parse_seconds
from mlpipe.plan import cluster as c
from mlpipe.plan.network import pod_network, racks_of
from mlpipe.plan.work import TrainPlan

if TYPE_CHECKING:
    from mlpipe.plan.plan import Launch
    from mlpipe.plan.work import StageWork
    from mlpipe.spec import kubernetes as k
    from mlpipe.spec import kubernetes_parts as parts
    from mlpipe.spec.model import Pipeline, Resources, Stage
    from mlpipe.spec.network import Racks

MIB, GIB = 2**20, 2**30
MAX_SHM_BYTES = 32 * GIB
BESIDE_SHARED_BYTES = 64 * MIB  # of torch's own, and data workers'
BESIDE_CACHE_BYTES = 8 * GIB
BESIDE_HOST_BYTES = 4 * GIB  # of a worker: CUDA's libraries, data workers, buffers; assumed


def host_bytes(work: StageWork, launch: Launch) -> int:
    """Of a node's memory that its workers need, since something of their GPUs' waits there; 0: nothing
    does."""
    each = work.host_memory_bytes if isinstance(work, TrainPlan) else None
    return 0 if each is None else launch.nproc_per_node * (each + BESIDE_HOST_BYTES)


def pod_resources(resources: Resources | None, *, workers: bool = True, host_bytes: int = 0) -> Resources:
    """`resources` with the defaults of a pod where they are open, so that a plan for a cluster depends on no
    machine. `workers`: whether torch runs there. `host_bytes`: see there. Raises PlanError where the memory
    that is asked for cannot hold these."""
    from mlpipe.spec.model import Resources

    resources = resources or Resources.model_construct()
    count = resources.gpus_per_node or resources.workers_per_node or 1
    cpus, memory_bytes = (4, 32 * GIB) if resources.gpus_per_node else (1, 4 * GIB)
    least = max(memory_bytes * count if workers else 2 * GIB, -(-host_bytes // MIB) * MIB)
    if resources.memory is not None and parse_bytes(resources.memory) < host_bytes:
        raise PlanError(
            f"memory of {resources.memory} a node is too little: what waits on the host, and the workers "
            f"beside it, need {format_bytes(host_bytes)}",
            where="resources.memory",
            hint="write more, or leave it away; or train.offload: off, on more GPUs",
        )
    return resources.model_copy(
        update={
            "cpus": resources.cpus or float(cpus * count),
            "memory": resources.memory or f"{least} B",
        }
    )


def cluster_plan(
    pipeline: Pipeline,
    stage: Stage,
    resources: Resources | None,
    shared_bytes: int = 0,
    host_bytes: int = 0,
) -> c.ClusterPlan | None:
    """`resources`: those the stage runs on. `shared_bytes`: what its workers need of /dev/shm; `host_bytes`:
    of memory. None for a pipeline without an image and without the section."""
    plan = _of_one_class(pipeline, stage, resources, shared_bytes, host_bytes)
    if plan is None or not stage.groups or resources is None:
        return plan
    groups = []
    for group in stage.groups:
        alone = _of_one_class(
            pipeline,
            stage,
            group.model_copy(update={"nodes": resources.nodes}),
            shared_bytes,
            host_bytes,
        )
        own = {name: getattr(alone, name) for name in c.GroupPods._fields if name != "num_nodes"}
        groups.append(c.GroupPods(num_nodes=group.gang_nodes, **own))
    return plan._replace(groups=tuple(groups))


def _of_one_class(
    pipeline: Pipeline, stage: Stage, resources: Resources | None, shared_bytes: int, host_bytes: int
) -> c.ClusterPlan | None:
    from mlpipe.spec.kubernetes import Kubernetes

    if pipeline.image is None and pipeline.kubernetes is None:
        return None
    spec = pipeline.kubernetes or Kubernetes.model_construct()
    pod = pod_resources(resources, workers=stage.kind.runs == "workers", host_bytes=host_bytes)
    memory_bytes = parse_bytes(pod.memory or "")
    everywhere = _placement(spec, spec)
    placement = everywhere
    for some in (spec.gpu_pods if pod.gpus_per_node else None, (spec.stages or {}).get(stage.name)):
        placement = _placement(some, placement) if some is not None else placement
    if own := getattr(resources, "node_selector", None):  # of a group of machines
        placement = placement._replace(node_selector={**placement.node_selector, **own})
    gpus = _gpus(spec, pod)
    return c.ClusterPlan(
        form=spec.form,
        image=pipeline.image,
        image_pull_policy=spec.image_pull_policy,
        image_pull_secrets=spec.image_pull_secrets,
        namespace=spec.namespace,
        queue=spec.queue,
        queue_priority=spec.queue_priority,
        topology=_topology(spec.topology, racks_of(pipeline)),
        volcano_queue=spec.volcano_queue,
        node_selector=placement.node_selector,
        tolerations=placement.tolerations,
        priority_class=placement.priority_class,
        runtime_class=placement.runtime_class,
        volumes=tuple(c.Volume(**volume.model_dump()) for volume in spec.volumes),
        env_from=tuple(_env_from(source) for source in spec.env_from),
        secret_env=_secret_env(spec.secret_env),
        store_secret=spec.store.secret or "mlpipe-store",
        store_endpoint=spec.store.endpoint,
        store_region=spec.store.region,
        ca_bundle=c.CaBundle(**spec.ca_bundle.model_dump()) if spec.ca_bundle else None,
        proxy=c.Proxy(**spec.proxy.model_dump()) if spec.proxy else None,
        service_account=spec.service_account,
        driver_service_account=spec.driver_service_account,
        rdma=c.Rdma(**spec.rdma.model_dump()) if spec.rdma else None,
        max_gang_restarts=spec.max_gang_restarts,
        ttl_seconds=int(parse_seconds(spec.ttl)),
        gpu_resource=gpus.resource,
        patches=tuple(map(_patch, spec.patches)),
        cpus=pod.cpus or 0.0,
        memory_bytes=memory_bytes,
        shm_bytes=_shm_bytes(spec.shm, memory_bytes, shared_bytes),
        gpus_per_node=pod.gpus_per_node,
        gpu_product=gpus.product,
        disk_bytes=_disk_bytes(pipeline, stage, pod.disk, placement.scratch, spec.cache),
        store_driver_secret=spec.store.driver_secret,
        store_web_identity=_web_identity(spec.store.web_identity),
        driver_secret_env=_secret_env(spec.driver_secret_env),
        gpu_label=gpus.label,
        gpu_sharing=pod.gpu_sharing,
        sharing_label=gpus.sharing_label,
        gpu_claims=gpus.claims,
        gpu_taint=gpus.taint if gpus.taint != gpus.resource else None,
        network=pod_network(pipeline, resources),
        prefer=placement.prefer,
        run_placement=everywhere if placement != everywhere else None,
        scratch=placement.scratch,
        cache=c.Cache(spec.cache.claim, spec.cache.sub_path) if spec.cache else None,
        prepull=bool(spec.prepull),
        trainjob=c.TrainJob(**spec.trainjob.model_dump()) if spec.trainjob else None,
    )


def _topology(spec: parts.Topology | None, racks: Racks | None) -> c.Topology | None:
    if spec is None:
        return None
    label = spec.required or cast(str, spec.preferred)
    nodes = racks.nodes if racks is not None and spec.inner is not None else None
    return c.Topology(label, required=spec.required is not None, inner=spec.inner, inner_nodes=nodes)


def _secret_env(spec: dict[str, parts.SecretKey]) -> dict[str, c.SecretKey]:
    return {name: c.SecretKey(secret.secret, secret.key) for name, secret in spec.items()}


def _env_from(spec: parts.EnvFrom) -> c.EnvFrom:
    if spec.secret is not None:
        return c.EnvFrom("secret", spec.secret)
    return c.EnvFrom("config_map", cast(str, spec.config_map))


def _web_identity(spec: parts.WebIdentity | None) -> c.WebIdentity | None:
    return None if spec is None else c.WebIdentity(**spec.model_dump())


def _patch(spec: parts.Patch) -> c.Patch:
    target = spec.target
    return c.Patch(target.kind, target.stage, target.component, spec.strategic, spec.json_)


def _disk_bytes(
    pipeline: Pipeline, stage: Stage, asked: str | None, scratch: c.Scratch | None, cache: parts.Cache | None
) -> int | None:
    """Room for the copies of a bucket's files, beside what a pod has anyway; an evaluation reads what its
    training reads. Where they lie in a volume, that has the room. Raises PlanError."""
    from mlpipe.kinds.train.spec import Train
    from mlpipe.plan.references import lender
    from mlpipe.spec.data import cache_bytes

    train = (lender(pipeline, stage) or stage).part(Train)
    cached = cache_bytes(train.data) if train is not None else 0
    if cache is None and scratch is not None and scratch.size_bytes < cached:
        raise PlanError(
            f"scratch of {format_bytes(scratch.size_bytes)} is too small: copies of data take up to "
            f"{format_bytes(cached)}",
            where="kubernetes.scratch",
            hint="write a larger size, or a smaller data.cache",
        )
    if asked is not None:
        return parse_bytes(asked)
    return cached + BESIDE_CACHE_BYTES if cached and scratch is None and cache is None else None


def _scratch(spec: parts.Scratch | c.Scratch | None) -> c.Scratch | None:
    if spec is None or isinstance(spec, c.Scratch):
        return spec
    return c.Scratch(parse_bytes(spec.size), spec.storage_class)


def _shm_bytes(asked: str | None, memory_bytes: int, shared_bytes: int) -> int:
    needed = shared_bytes + BESIDE_SHARED_BYTES if shared_bytes else 0
    if asked is None:
        usual = max(MIB, min(memory_bytes // 4, MAX_SHM_BYTES) // MIB * MIB)
        return max(usual, -(-needed // MIB) * MIB)
    if parse_bytes(asked) < needed:
        raise PlanError(
            f"/dev/shm of {asked} is too small: communication: on_demand needs {format_bytes(needed)}",
            where="kubernetes.shm",
            hint="leave it away, or write communication: resident",
        )
    return parse_bytes(asked)


def _placement(spec: parts.Placement | k.Kubernetes, others: k.Kubernetes | c.Placement) -> c.Placement:
    """What `spec` does not say is as of `others`."""

    def said(key: str) -> Any:
        value = getattr(spec, key)
        return getattr(others, key) if value is None else value

    tolerations = (
        c.Toleration(one.key, one.operator, one.value, one.effect, one.toleration_seconds)
        for one in said("tolerations")
    )
    return c.Placement(
        dict(said("node_selector")),
        tuple(tolerations),
        said("priority_class"),
        said("runtime_class"),
        said("prefer") or None,
        _scratch(said("scratch")),
    )


class _Gpus(NamedTuple):
    """How a pod asks for its GPUs."""

    resource: str
    label: str = c.GPU_LABEL
    product: str | None = None
    sharing_label: str | None = None
    claims: c.GpuClaims | None = None
    taint: str | None = None


def _gpus(spec: k.Kubernetes, resources: Resources) -> _Gpus:
    """By the class of the GPU, as far as the section does not say otherwise. A product of one's own says that
    whole nodes are cut into slices: their plugin calls a slice a GPU."""
    resource, product = spec.gpu_resource, spec.gpu_product
    if not resources.gpus_per_node:
        return _Gpus(resource)
    known, vendor = gpu_classes().get(resources.gpu or ""), vendor_of(resources.gpu, resource)
    claims = _claims(spec.gpu_claims, resources)
    if vendor is None:
        return _Gpus(resource, product=product, claims=claims)
    if resource == DEFAULT_RESOURCE:
        resource = vendor.resource
        if resources.slice is not None and product is None:
            resource = vendor.slice_resource.format(slice=resources.slice)
        if product is None and known is not None:
            product = known.product + (vendor.shared_suffix if resources.gpu_sharing else "")
    shared_or_gang = resources.gpu_sharing is not None or (product is None and _is_gang(resources))
    return _Gpus(
        resource,
        vendor.label,
        product,
        (vendor.sharing_label or None) if shared_or_gang else None,
        claims,
        vendor.resource if vendor.slice_resource else None,  # of slices and shared GPUs it is the whole one's
    )


def _is_gang(resources: Resources) -> bool:
    return resources.gpus_per_node * (2 if resources.replicas else resources.gang_nodes) > 1


def _claims(spec: parts.GpuClaims | None, resources: Resources) -> c.GpuClaims | None:
    """Raises PlanError for a class of a GPU that nobody knows."""
    if spec is None:
        return None
    known = gpu_classes().get(resources.gpu or "")
    vendor, sliced = known.vendor if known else None, resources.slice is not None
    device_class, expression = spec.device_class, spec.expression
    if device_class is None and vendor is not None:
        device_class = vendor.slice_device_class if sliced else vendor.device_class
    if not device_class:
        raise PlanError(
            f"nobody knows the device class of {resources.gpu!r}",
            where="kubernetes.gpu_claims",
            hint="add 'device_class: ...' as kubectl get deviceclasses shows it",
        )
    if expression is None and known is not None and spec.device_class is None:
        pattern = known.vendor.slice_expression if sliced else known.vendor.product_expression
        expression = pattern.format(name=known.name, slice=resources.slice)
    return c.GpuClaims(device_class, expression or None)
