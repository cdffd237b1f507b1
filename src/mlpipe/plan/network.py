"""The network of a gang, resolved: the profile with what the pipeline says besides."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlpipe._core.units import parse_bytes
from mlpipe.plan.cluster import PodNetwork, TopologyFile

if TYPE_CHECKING:
    from mlpipe._core.networks import Profile
    from mlpipe.plan.hardware import Hardware
    from mlpipe.plan.plan import PreflightPlan
    from mlpipe.spec.model import Pipeline, Resources
    from mlpipe.spec.network import Network, Racks


def is_used(resources: Resources | None) -> bool:
    """By gangs of GPUs alone; elastic replicas meet over TCP."""
    return resources is not None and resources.gpus_per_node > 0 and resources.gang_nodes > 1


def on_network(hardware: Hardware, pipeline: Pipeline, resources: Resources | None) -> Hardware:
    """With the link figures of the pipeline's network, unless the GPU's description has its own."""
    spec = pipeline.network
    if spec is None or resources is None or not resources.gpus_per_node:
        return hardware
    if (racks := racks_of(pipeline)) is not None:
        speed = hardware.speed._replace(
            rack_nodes=racks.nodes, rack_bytes_per_second=racks.gb_per_second * 1e9
        )
        hardware = hardware._replace(speed=speed)
    if resources.device is not None and resources.device.network_gb_per_second is not None:
        return hardware
    profile = _profile(spec)
    if spec.gb_per_second is not None:
        rate = spec.gb_per_second * 1e9
    elif profile.gb_per_second:
        rate = profile.speed_of(resources.gpu or "")
    else:
        return hardware
    return hardware._replace(speed=hardware.speed._replace(network_bytes_per_second=rate))


def racks_of(pipeline: Pipeline) -> Racks | None:
    """None: nobody tells racks apart."""
    spec = pipeline.network
    return None if spec is None else spec.racks or getattr(spec.profile, "racks", None)


def env(pipeline: Pipeline, resources: Resources | None) -> dict[str, str]:
    """Of the ranks."""
    spec = pipeline.network
    if spec is None or not is_used(resources):
        return {}
    return {**_profile(spec).env, **(spec.env or {})}


def needs_rdma(pipeline: Pipeline, resources: Resources | None) -> bool:
    """Whether a machine without a port for it is at fault."""
    spec = pipeline.network
    if spec is None or not is_used(resources):
        return False
    return bool(_profile(spec).rdma if spec.rdma is None else spec.rdma)


def with_rdma(preflight: PreflightPlan, hardware: Hardware) -> PreflightPlan:
    """A machine needs a port for it; and what GPUs send each other comes near to what the planner reckons
    with, unless the stage says itself how fast links must be."""
    speed, least = hardware.speed, preflight.link_bytes_per_second
    rates = [rate for rate in (speed.network_bytes_per_second, speed.rack_bytes_per_second) if rate]
    return preflight._replace(rdma=True, link_bytes_per_second=least or preflight.slow_ratio * min(rates))


def pod_network(pipeline: Pipeline, resources: Resources | None) -> PodNetwork | None:
    """None: nothing is asked for."""
    spec = pipeline.network
    if spec is None or resources is None or not is_used(resources):
        return None
    profile = _profile(spec)
    amounts = profile.resources_of(resources.gpu or "") | (spec.resources or {})
    hugepages = spec.hugepages or profile.hugepages
    file = spec.topology or getattr(spec.profile, "topology", None)
    topology = None if file is None else TopologyFile(file.config_map, file.key)
    return PodNetwork(
        {name: count for name, count in amounts.items() if count},
        {**profile.annotations, **(spec.annotations or {})},
        parse_bytes(hugepages) if hugepages else 0,
        bool(profile.pinned_memory if spec.pinned_memory is None else spec.pinned_memory),
        topology,
    )


def _profile(spec: Network) -> Profile:
    """Of `own`: an empty one."""
    from mlpipe._core.networks import DEFAULT, Profile, profiles  # for few pipelines

    named, nothing = spec.profile, Profile({}, {})
    if isinstance(named, str):
        return profiles().get(named, nothing)
    speed = named.gb_per_second or {}
    return (
        profiles()
        .get(named.extends or "", nothing)
        .extended(
            Profile(
                speed if isinstance(speed, dict) else {DEFAULT: speed},
                named.env,
                named.resources,
                named.annotations,
                named.hugepages,
                named.pinned_memory,
                named.rdma,
            )
        )
    )
