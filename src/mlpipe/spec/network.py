"""The `network` section of a pipeline file: what lies between the nodes of a gang of GPUs; and the file of a
user's own profiles, which a platform hands out.

A profile of that file stands written out in what a run keeps: whoever submits needs the file, pods do not. It
says of networks alone, since whoever names it does not read it: no other variable, annotation or resource.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag

from mlpipe._core import environment
from mlpipe.spec import fields as f
from mlpipe.spec.base import SpecModel
from mlpipe.spec.problems import Place, Problem, SpecErrors, closest
from mlpipe.spec.tree import Node, get, parse, problem_of_key, text_of

OWN, DEFAULT = "own", "default"


class TopologyFile(SpecModel):
    """NCCL's description of a node, which a virtual machine does not show by itself."""

    config_map: f.ObjectName = Field(description="Name of the ConfigMap.")
    key: f.DataKey = Field("topology.xml", description="Its key with the file.")


class Racks(SpecModel):
    """Groups of machines with a faster network among themselves."""

    nodes: f.FewCount = Field(description="That the run may have in one rack.")
    gb_per_second: f.Positive = Field(description="Of one GPU to other racks, in one direction.")


def _with_default(by_class: dict[str, Any]) -> dict[str, Any]:
    if DEFAULT not in by_class:
        raise f.wrong("figures by class of GPU, and none of all others", f"add '{DEFAULT}: ...'")
    return by_class


def _by_class(of: Any) -> Any:
    each = Annotated[
        dict[f.Text, of], AfterValidator(_with_default), Field(json_schema_extra={"required": [DEFAULT]})
    ]
    tags = Annotated[of, Tag("all")] | Annotated[each, Tag("each")]
    return Annotated[tags, Discriminator(lambda value: "each" if isinstance(value, dict) else "all")]


_NO_OTHERS: Any = {"additionalProperties": False}
_Speed: Any = _by_class(f.Positive)
_Devices: Any = _by_class(f.FewOrZero)
# What a profile says and what a pipeline's file says for itself, alike.
_HugePages = Annotated[f.Size | None, Field(description="Of 2 MiB each, for a pod; counted beside memory.")]
_PinnedMemory = Annotated[
    bool | None,
    Field(description="The capability IPC_LOCK, which only Pod Security `privileged` allows."),
]
_Rdma = Annotated[
    bool | None, Field(description="Whether a preflight wants an active RDMA port on each machine.")
]
_Racks = Annotated[Racks | None, Field(description="Where the network between racks is a slower one.")]
_Topology = Annotated[TopologyFile | None, Field(description="NCCL_TOPO_FILE, in pods.")]


class NetworkProfile(SpecModel):
    """A network of one's own. A figure is one number, or numbers by class of GPU and `default`."""

    name: f.Name | None = Field(None, description="As it is called in the file of profiles.")
    extends: Literal["infiniband", "roce", "efa", "tcpx", "ethernet"] | None = Field(
        None, description="What it does not say is as of this one; of maps each entry by itself."
    )
    gb_per_second: _Speed | None = Field(
        None, description="Of one GPU to other nodes, in one direction, such as 50 for 400 Gb/s."
    )
    env: dict[f.NetworkEnv, f.Text] = Field(
        {},
        description="Variables of the ranks: NCCL's, libfabric's, UCX' and such.",
        json_schema_extra=_NO_OTHERS,
    )
    resources: dict[f.NetworkResource, _Devices] = Field(
        {},
        description="Devices a pod, by the name of their resource; 0: none of them.",
        json_schema_extra=_NO_OTHERS,
    )
    annotations: dict[f.NetworkAnnotation, f.Text] = Field(
        {},
        description="Of the pods, by keys of networks, such as `k8s.v1.cni.cncf.io/networks`.",
        json_schema_extra=_NO_OTHERS,
    )
    hugepages: _HugePages = None
    pinned_memory: _PinnedMemory = None
    rdma: _Rdma = None
    topology: _Topology = None
    racks: _Racks = None


class Networks(SpecModel):
    """Profiles of one's own, by the names that `network.profile` of a pipeline file has for them."""

    version: Literal[1] = Field(description="Of this format.")
    networks: dict[f.Name, NetworkProfile] = Field(description="None has the name of a built-in one.")


class Network(SpecModel):
    """A profile, and what differs from it here: a key that is there stands in place of the profile's, of maps
    each entry by itself."""

    profile: Annotated[
        Annotated[f.Text, Tag("name")] | Annotated[NetworkProfile, Tag("own")],
        Discriminator(lambda value: "own" if isinstance(value, dict | NetworkProfile) else "name"),
    ] = Field(
        description="`infiniband`, `roce`, `efa`, `tcpx`, `ethernet`, one of your platform's file; or `own`, "
        "which says nothing by itself."
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
    hugepages: _HugePages = None
    pinned_memory: _PinnedMemory = None
    rdma: _Rdma = None
    topology: _Topology = None
    racks: _Racks = None


def default_path() -> Path:
    """Of the profiles of one's own: $MLPIPE_NETWORKS, else in the folder of the user's settings."""
    from mlpipe._core.files import config_folder  # of few files

    named = os.environ.get(environment.NETWORKS)
    return Path(named) if named else config_folder() / "networks.yaml"


def built_in() -> list[str]:
    """Names that no profile of a file may have."""
    from mlpipe._core.networks import profiles  # of few files

    return [*profiles(), OWN]


def place_of(path: Path, name: str) -> Place:
    """Where the file describes that profile."""
    root, _ = parse(path.read_text(encoding="utf-8-sig"), str(path))
    node = None if root is None else get(root, "networks", name)
    return Place(str(path)) if node is None else node.key or node.place


def write_out(root: Node, read: Callable[[Path], Mapping[str, NetworkProfile]]) -> Iterator[Problem]:
    """What the file, by `read`, says of the profile that is named, in place of its name; what is wrong with
    either."""
    profile = get(root, "network", "profile")
    name = text_of(profile)
    if profile is None or name is None:
        return
    known, path = built_in(), default_path()
    if name in known:
        return
    own: Mapping[str, NetworkProfile] = {}
    if os.environ.get(environment.NETWORKS) or path.exists():
        try:
            own = read(path)
        except SpecErrors as errors:
            yield from errors.problems
            return
    if name not in own:
        hint = closest(name, [*known, *own])
        hint += f", or describe it in {path}" if hint.startswith("write") else ""
        yield Problem.at(profile.place, f"unknown network {name!r}", hint)
        return
    value, _ = parse(_json(name, own[name]), profile.place.file)
    assert value is not None
    for _, node in value.walk():
        node.place, node.key = profile.place, profile.key
    root.value["network"].value["profile"] = value


def check(root: Node) -> Iterator[Problem]:
    """What violates a rule of the section."""
    env = get(root, "network", "env")
    if env is not None and isinstance(env.value, dict):
        from mlpipe.spec.rules import is_taken

        for name, node in env.value.items():
            if is_taken(name):
                yield problem_of_key(node, f"{name} is set by torchrun and mlpipe", "remove it")


def origin(network: Network | None) -> str | None:
    """Of a profile of one's own: its name, and which file describes it."""
    profile = network.profile if network is not None else None
    if not isinstance(profile, NetworkProfile):
        return None
    path = default_path()
    if profile.name is None or not path.exists():
        return f"{profile.name or OWN}, of the pipeline itself"
    return f"{profile.name}, of {place_of(path, profile.name)}"


def _json(name: str, profile: NetworkProfile) -> str:
    return json.dumps({**profile.model_dump(exclude_unset=True), "name": name})


def written_out(network: Network | None, overrides: Sequence[str]) -> tuple[str, ...]:
    """The overrides of a pipeline with that network, by which it is the same where the file is not."""
    profile = network.profile if network is not None else None
    if not isinstance(profile, NetworkProfile) or profile.name is None:
        return tuple(overrides)
    one = f"network.profile={_json(profile.name, profile)}"
    said = [each for each in overrides if each.partition("=")[0].strip() in ("network", "network.profile")]
    return tuple(overrides) if said[-1:] == [one] else (*overrides, one)
