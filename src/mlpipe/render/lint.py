"""What will probably go wrong on a cluster, with the reason in words, before anything is sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from posixpath import normpath
from urllib.parse import urlsplit

from mlpipe._core.units import format_bytes, format_seconds
from mlpipe.plan.cluster import ClusterPlan
from mlpipe.plan.grace import checkpoint_bytes, save_seconds
from mlpipe.plan.model import InitPlan
from mlpipe.plan.plan import Plan
from mlpipe.plan.work import TrainPlan
from mlpipe.render.names import MAX_NAME, gang_name
from mlpipe.render.patches import targets

_MAX_GPUS = 16  # of one node: HGX-2 and the largest instances of the clouds


def lint(plan: Plan) -> list[str]:
    """Each begins with 'error: ' (it will not run) or 'warning: '; what concerns the whole run is the same
    for every stage. Of a plan without `cluster`: none."""
    if plan.cluster is None:
        return []
    if plan.kind.runs == "driver":  # it has no pod of its own
        return [*_image(plan.cluster), *_store(plan, plan.cluster)]
    lines = [*_names(plan), *_pod(plan, plan.cluster)]
    if (training := plan.part(TrainPlan)) is not None:
        lines += _grace(plan, training)
        if training.init_from is not None:
            lines += _weights(training.init_from, plan.cluster)
    of_stage = [line.replace(": ", f": stage {plan.stage}: ", 1) for line in lines]
    return [*_image(plan.cluster), *_store(plan, plan.cluster), *of_stage]


def lint_patches(plans: Sequence[Plan], objects: Sequence[Sequence[dict[str, object]]]) -> list[str]:
    """Patches that change nothing: `objects` are those of each plan, and last those of the driver."""
    patches = next((plan.cluster.patches for plan in plans if plan.cluster is not None), ())
    return [
        f"error: kubernetes.patches[{number}] fits no {patch.kind}"
        f"{f' of stage {patch.stage}' if patch.stage else ''}: there is none in what is rendered"
        for number, patch in enumerate(patches)
        if not any(
            targets(patch, rendered, plan.stage if plan else None, "worker" if plan else "driver")
            for plan, rendered in zip([*plans, None], objects, strict=True)
        )
    ]


def _image(cluster: ClusterPlan) -> Iterator[str]:
    if cluster.image is not None and "@sha256:" not in cluster.image:
        yield (
            f"warning: image {cluster.image} is a tag, which may be another image on the next node or after "
            "a restart; write NAME@sha256:DIGEST"
        )


def _store(plan: Plan, cluster: ClusterPlan) -> Iterator[str]:
    host = urlsplit(cluster.store_endpoint or "").hostname or ""
    if plan.store_url.startswith("s3://") and (host in ("localhost", "::1") or host.startswith("127.")):
        yield (
            f"error: kubernetes.store.endpoint {cluster.store_endpoint} is the pod itself; "
            "write the endpoint as seen in the cluster"
        )


def _weights(init: InitPlan, cluster: ClusterPlan) -> Iterator[str]:
    """What a stage starts from is read by all its pods."""
    place = init.path or init.asked.get("store")
    if place is None or "://" in place.replace("file://", "") or "{{" in place:
        return
    key = "model.pretrained" if init.config else "init_from"
    folder = PurePosixPath(normpath(place.removeprefix("file://")))
    if not any(folder.is_relative_to(volume.path) for volume in cluster.volumes):
        yield (
            f"error: {key} {place} is a place that the pods do not share; write s3://bucket/..., or "
            f"mount a claim there with 'kubernetes.volumes: [{{claim: NAME, path: {folder.parent}}}]'"
        )


def _names(plan: Plan) -> Iterator[str]:
    plain = f"{plan.run_id}-{plan.stage}-a{plan.attempt}"
    if len(plain) > MAX_NAME:
        yield (
            f"warning: {plain} has {len(plain)} characters; with pod names of at most 63 there is room for "
            f"{MAX_NAME}, so its objects are named {gang_name(plan)}"
        )


def _pod(plan: Plan, cluster: ClusterPlan) -> Iterator[str]:
    launch = plan.launch
    if cluster.shm_bytes >= cluster.memory_bytes:
        yield (
            f"error: /dev/shm of {format_bytes(cluster.shm_bytes)} counts as memory, of which the pod has "
            f"{format_bytes(cluster.memory_bytes)}: filling it kills the pod; write a smaller shm"
        )
    elif cluster.shm_bytes > cluster.memory_bytes / 2:
        yield (
            f"warning: /dev/shm of {format_bytes(cluster.shm_bytes)} may take more than half of the pod's "
            f"{format_bytes(cluster.memory_bytes)}"
        )
    pinned = cluster.network is not None and cluster.network.pinned_memory
    if pinned or (cluster.rdma is not None and launch.num_nodes > 1):
        yield (
            "warning: rdma needs the capability IPC_LOCK, which Pod Security refuses at the levels baseline "
            "and restricted: label the namespace pod-security.kubernetes.io/enforce=privileged"
        )
    elif cluster.rdma is not None and launch.device == "cuda":
        yield "warning: kubernetes.rdma is of no use on one node"
    if cluster.gpu_sharing is not None:
        yield "warning: others use its GPUs, too: memory and seconds of the plan are those of a whole one"
    if cluster.gpus_per_node > _MAX_GPUS:
        yield (
            f"error: no node has {cluster.gpus_per_node} GPUs, so the pod would be pending for ever; use "
            "more nodes"
        )


def _grace(plan: Plan, train: TrainPlan) -> Iterator[str]:
    grace, save = plan.launch.shutdown_seconds, save_seconds(train, plan.launch.nproc_per_node)
    if save is not None and save > grace:
        yield (
            f"warning: a checkpoint of {format_bytes(checkpoint_bytes(train) or 0)} takes up to "
            f"{format_seconds(save)} (100 MB/s a node), but {format_seconds(grace)} after SIGTERM the pod is "
            "killed: an eviction may cost the work since the last periodic checkpoint"
        )
