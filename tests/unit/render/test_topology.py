"""A thousand nodes with labels: what the numbers of ranks and the size of slices keep together on any
placement that Kueue's promises allow, and that the planner prices as links and network what the labels say.

Which rack, block or host it is, Kueue decides; the placement here is a stand-in that keeps its two promises:
pods of one slice are neighbours by number, and in one domain.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

import pytest
from kit.rendered import pipeline_of, plan_of

from mlpipe.plan.axes.axis import Layout
from mlpipe.plan.build import stage_hardware
from mlpipe.plan.hardware import Hardware
from mlpipe.plan.mesh import Mesh
from mlpipe.plan.plan import Plan
from mlpipe.plan.wire import Wire
from mlpipe.render.kubernetes import inner_nodes

pytestmark = pytest.mark.unit
GPUS, NODES = 8, 640
LABELS = {
    f"host-{n}": {"block": f"block-{n // 100}", "rack": f"rack-{n // 20}"} for n in range(1000) if n % 7
}  # every seventh is another's


def placed(slice_nodes: int) -> list[str]:
    """Of each pod, by its number, the host."""
    racks = defaultdict(list)
    hosts = list(LABELS)
    random.Random(slice_nodes).shuffle(hosts)
    for host in hosts:
        racks[LABELS[host]["rack"]].append(host)
    slices = [
        free[start : start + slice_nodes]
        for free in racks.values()
        for start in range(0, len(free) - slice_nodes + 1, slice_nodes)
    ]
    return [host for one in slices[: NODES // slice_nodes] for host in one]


def groups(places: list[dict[str, int]], axes: Iterable[str]) -> list[list[int]]:
    """Ranks that differ along these axes alone."""
    others = [axis for axis in places[0] if axis not in (*axes, "ep")]
    found = defaultdict(list)
    for rank, at in enumerate(places):
        found[tuple(at[axis] for axis in others)].append(rank)
    return list(found.values())


def numbered(at: list[str], mesh: Mesh) -> list[str]:
    """Of each node, by its number in the mesh, the host; `at`: by its place in the gang."""
    numbers = [mesh.number_at(place, GPUS) for place in range(len(at))]
    assert sorted(numbers) == list(range(len(at))), "each node has one place"
    return [host for _, host in sorted(zip(numbers, at, strict=True))]


@pytest.fixture(scope="module")
def planned() -> tuple[Plan, Hardware]:
    pipeline = pipeline_of("llm")
    return plan_of(pipeline, "train"), stage_hardware(pipeline, "train", cluster=True)


@pytest.mark.parametrize(
    ("mesh", "slice_nodes"),
    [
        (Mesh(dp_replicate=80, dp_shard=16, tp=4), 8),
        (Mesh(pp=4, dp_replicate=10, dp_shard=16, cp=2, tp=4), 16),
        (Mesh(pp=8, dp_replicate=80, tp=8), 1),
        (Mesh(pp=8, dp_replicate=40, cp=2, tp=8), 2),
        (Mesh(dp_replicate=320, dp_shard=4, cp=2, tp=2), 2),
    ],
    ids=str,
)
def test_ranks_that_share_weights_stay_near_each_other(
    planned: tuple[Plan, Hardware], mesh: Mesh, slice_nodes: int
) -> None:
    plan, hardware = planned
    work = plan.work.training._replace(mesh=mesh)
    plan = replace(plan, work=work, launch=plan.launch._replace(num_nodes=NODES))
    assert inner_nodes(plan) == slice_nodes
    at, places = placed(slice_nodes), [mesh.coordinates(rank) for rank in range(mesh.world_size)]
    hosts = numbered(at, mesh)
    assert all(len({hosts[rank // GPUS] for rank in group}) == 1 for group in groups(places, ["tp"]))
    for group in groups(places, ["dp_shard", "cp", "tp"]):
        assert len({LABELS[hosts[rank // GPUS]]["rack"] for rank in group}) == 1

    # Kueue takes as few racks as it can, one after the other: neighbours are parted where one is full
    racks = [LABELS[host]["rack"] for host in hosts]
    step = len(hosts) // mesh.pp
    parted = [number for number in range(len(hosts) - step) if racks[number] != racks[number + step]]
    assert len(parted) <= (len(set(racks)) - 1) * slice_nodes

    slower = hardware.speed._replace(network_bytes_per_second=hardware.speed.network_bytes_per_second / 10)
    stride = 1
    for axis, size in reversed(mesh.axes.items()):
        if size > 1:
            leaves = any(len({hosts[rank // GPUS] for rank in group}) > 1 for group in groups(places, [axis]))
            seconds = [
                Wire(where).all_gather(1e9, size, stride)
                for where in (hardware, hardware._replace(speed=slower))
            ]
            assert (seconds[0] < seconds[1]) == leaves, axis
        stride *= size
    assert stride == math.prod(mesh.axes.values())


@pytest.mark.parametrize(
    ("mesh", "slice_nodes", "far"),
    [
        (Mesh(pp=8, dp_replicate=80, tp=8), 8, "dp_replicate"),
        (Mesh(pp=8, dp_replicate=40, cp=2, tp=8), 16, "dp_replicate"),
        (Mesh(pp=2, dp_replicate=40, dp_shard=8, tp=8), 16, "dp_replicate"),
        (Mesh(pp=4, dp_replicate=10, dp_shard=16, cp=2, tp=4), 16, "pp dp_replicate"),
        (Mesh(pp=40, dp_shard=16, tp=8), 16, "pp"),
        (Mesh(dp_replicate=40, dp_shard=16, tp=8), 16, "dp_replicate"),
    ],
    ids=str,
)
def test_pipelines_stay_in_a_rack_that_holds_them(
    planned: tuple[Plan, Hardware], mesh: Mesh, slice_nodes: int, far: str
) -> None:
    """Where racks are known to have sixteen nodes. What is in several is priced as that, and nothing else."""
    plan, hardware = planned
    work = plan.work.training._replace(mesh=mesh)
    plan = replace(plan, work=work, launch=plan.launch._replace(num_nodes=NODES))
    assert inner_nodes(plan, 16) == slice_nodes
    racks = [LABELS[host]["rack"] for host in numbered(placed(slice_nodes), mesh)]
    places = [mesh.coordinates(rank) for rank in range(mesh.world_size)]
    speed, layout = hardware.speed, Layout(mesh)
    slow = speed._replace(rack_nodes=16, rack_bytes_per_second=speed.network_bytes_per_second / 10)
    near, between = (Wire(hardware._replace(speed=one)) for one in (speed, slow))

    def seconds(axis: str, wire: Wire) -> float:
        if axis == "pp":
            stride = layout.stage_stride(GPUS)
            return wire.over(mesh.pp * stride).send(1e9, stride)
        if axis == "dp_replicate":
            wire = wire.over(layout.replicas_over(GPUS))
            return wire.all_reduce(1e9, layout.num_replicas, layout.replica_stride)
        return wire.all_gather(1e9, layout.num_shards, layout.shard_stride)

    for axis, along in (("pp", ["pp"]), ("dp_replicate", ["dp_replicate"]), ("dp_shard", ["dp_shard", "cp"])):
        if all(mesh.axes[one] == 1 for one in along):
            continue
        several = any(len({racks[rank // GPUS] for rank in one}) > 1 for one in groups(places, along))
        assert several == (axis in far.split()), axis
        assert (seconds(axis, near) < seconds(axis, between)) == several, axis
