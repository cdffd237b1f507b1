"""The `network` section of a pipeline file: what lies between the nodes of a gang of GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from mlpipe.spec import fields as f
from mlpipe.spec.base import SpecModel
from mlpipe.spec.problems import Problem, closest
from mlpipe.spec.tree import Node, get, text_of


class TopologyFile(SpecModel):
    """NCCL's description of a node, which a virtual machine does not show by itself."""

    config_map: f.ObjectName = Field(description="Name of the ConfigMap.")
    key: f.DataKey = Field("topology.xml", description="Its key with the file.")


class Network(SpecModel):
    """A profile, and what differs from it here: a key that is there stands in place of the profile's, of maps
    each entry by itself."""

    profile: f.Text = Field(
        description="`infiniband`, `roce`, `efa`, `tcpx`, `ethernet`; or `own`, which says nothing by itself."
    )
    gb_per_second: f.Positive | None = Field(
        None, description="Of one GPU to other nodes, in one direction, such as 50 for 400 Gb/s."
    )
    env: dict[f.EnvName, f.Text] | None = Field(
        None, description="Variables of the ranks, such as NCCL's. Those of a stage go before."
    )
    resources: dict[f.ResourceName, f.FewOrZero] | None = Field(
        None, description="Devices a pod, by the name of their resource; 0: none of them."
    )
    annotations: dict[f.LabelKey, f.Text] | None = Field(
        None, description="Of the pods, such as Multus' `k8s.v1.cni.cncf.io/networks`."
    )
    hugepages: f.Size | None = Field(None, description="Of 2 MiB each, for a pod; counted beside memory.")
    pinned_memory: bool | None = Field(
        None, description="The capability IPC_LOCK, which only Pod Security `privileged` allows."
    )
    rdma: bool | None = Field(
        None, description="Whether a preflight wants an active RDMA port on each machine."
    )
    topology: TopologyFile | None = Field(None, description="NCCL_TOPO_FILE, in pods.")


OWN = "own"


def problems(root: Node) -> Iterator[Problem]:
    """What violates a rule of the section."""
    profile = get(root, "network", "profile")
    name = text_of(profile)
    if profile is None:
        return
    from mlpipe._core.networks import profiles  # of few files

    if name is not None and name not in (*profiles(), OWN):
        yield Problem.at(profile.place, f"unknown network {name!r}", closest(name, [*profiles(), OWN]))
