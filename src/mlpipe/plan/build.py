"""A Pipeline's stage on given hardware to a Plan: pure arithmetic, no torch, no network, no clock. Only the
manifest of the tokens is read, once they exist."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from mlpipe._core.units import parse_bytes
from mlpipe.plan import network
from mlpipe.plan.hardware import Hardware, detect_hardware, together
from mlpipe.plan.launch import Given, preflight_plan
from mlpipe.plan.plan import SCHEMA_VERSION, Plan
from mlpipe.plan.pods import cluster_plan, host_bytes, pod_resources
from mlpipe.plan.references import lender, stage_named
from mlpipe.plan.work import StageWork, TrainPlan
from mlpipe.spec.model import Pipeline, Resources, Stage

if TYPE_CHECKING:
    from mlpipe.plan.shapes.traced import Traced


def stage_hardware(pipeline: Pipeline, stage_name: str, *, cluster: bool = False) -> Hardware:
    """What the stage runs on. What its resources leave open is on a `cluster` a pod's default, else what this
    machine has."""
    stage = stage_named(pipeline, stage_name)

    unpredicted = cluster or stage.kind.runs != "workers"  # by what is known of this machine

    def found(resources: Resources | None) -> Hardware:
        hardware = detect_hardware(pod_resources(resources) if cluster else resources, elsewhere=unpredicted)
        if resources is not None and resources.replicas is not None:
            hardware = hardware._replace(comes_and_goes=True)
        return network.on_network(hardware, pipeline, resources)

    if not stage.groups:
        return found(stage_resources(pipeline, stage))
    groups, whole = [], stage.resources
    assert whole is not None
    per_node = whole.gpus_per_node or whole.workers_per_node or 1
    # workers on CPUs stand side by side on this machine, and share what it has
    here, num_workers = not cluster and not whole.gpus_per_node, whole.gang_nodes * per_node
    for group in stage.groups:
        asked = group.model_copy(update={"workers_per_node": num_workers}) if here else group
        hardware = found(asked)._replace(devices_per_node=per_node, relative_speed=group.speed)
        if here and group.memory:  # which is of a node of theirs
            hardware = hardware._replace(memory_bytes=parse_bytes(group.memory) // per_node)
        groups.append(hardware)
    gang = together(groups)
    return gang._replace(num_nodes=1, devices_per_node=num_workers) if here else gang


def stage_resources(pipeline: Pipeline, stage: Stage) -> Resources | None:
    """Its own, or those of the stage that it is about: of groups, of its first one."""
    if stage.resources is None and (other := lender(pipeline, stage)) is not None:
        return other.groups[0] if other.groups else other.resources
    return stage.resources


class Start(NamedTuple):
    """Which start of a stage is planned. `inputs`: stage name -> local folder of its output;
    `{{stages.NAME.output}}` of a stage that is not among them stays as it is, so that a pipeline can be
    planned before it has run. `resume`: from the latest checkpoint of the stage, if it has one."""

    run_id: str
    attempt: int
    store_url: str
    inputs: Mapping[str, str] = {}
    resume: bool = False


def build_plan(
    pipeline: Pipeline, stage_name: str, start: Start, hardware: Hardware, traced: Traced | None = None
) -> Plan:
    """The same arguments (and token manifests) give the same bytes. `traced`: the numbers of a user's own
    model. Raises PlanError."""
    stage = stage_named(pipeline, stage_name)
    known = {"store": start.store_url, "run.id": start.run_id}
    known |= {f"stages.{name}.output": folder for name, folder in start.inputs.items()}
    given = Given(hardware, known, start.resume, traced)
    work, launch = stage.kind.part("build").plan(pipeline, stage, given)
    resources = stage_resources(pipeline, stage)
    if stage.kind.runs == "workers":
        preflight = preflight_plan(resources, hardware, work.training.precision)
        if preflight is not None and network.needs_rdma(pipeline, resources):
            preflight = network.with_rdma(preflight, hardware)
        launch = launch._replace(preflight=preflight)
    launch = launch._replace(env={**network.env(pipeline, resources), **launch.env})
    return Plan(
        schema_version=SCHEMA_VERSION,
        run_id=start.run_id,
        pipeline=pipeline.name,
        stage=stage_name,
        attempt=start.attempt,
        store_url=start.store_url,
        spec_digest=pipeline.digest,
        code_digest="",
        launch=launch,
        work=work,
        inputs=tuple(f"runs/{start.run_id}/stages/{name}" for name in sorted(start.inputs)),
        cluster=cluster_plan(
            pipeline, stage, resources, _shared_memory_bytes(work), host_bytes(work, launch)
        ),
        price_usd_per_device_hour=hardware.price_usd_per_device_hour,
    )


def _shared_memory_bytes(work: StageWork) -> int:
    return work.shared_memory_bytes or 0 if isinstance(work, TrainPlan) else 0
