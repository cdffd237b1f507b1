"""A real node of the test cluster: containerd, CNI and kubelet in namespaces of their own.

Traps:
- without CAP_SYS_RESOURCE every sandbox dies with "can't get final child's PID from pipe: EOF" unless
  `restrict_oom_score_adj` is set;
- kubelet writes /proc/sys/vm and /proc/sys/kernel of the whole machine: files of our own lie over those;
- the device plugins' folder is hard-coded, so every node needs its own /var/lib/kubelet, and as kubelet
  deletes folders in /var/log/pods that it does not know, its own /var/log;
- cgroups are the machine's: each node has a root of its own there, which outlives its processes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

from kit.cluster_build import binary, tool
from kit.cluster_control import ADDRESS, REGISTRY, SERVICE_ADDRESS, ControlPlane
from kit.cluster_image import PAUSE, Image
from kit.cluster_process import ClusterError, Namespaces, Process, wait_until

_SYSCTLS = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}
_CGROUPS = Path("/sys/fs/cgroup")
_READY_SECONDS = 60
_TASKS_SECONDS = 20


def address(index: int) -> str:
    return f"10.250.0.{index + 1}"


def pods(index: int) -> str:
    """The subnet of a node's pods."""
    return f"10.251.{index}.0/24"


class Node:
    """`index` 0 shares its network with the control plane and is there for as long as the cluster; others
    come and go, each behind a link to node 0."""

    def __init__(self, index: int, folder: Path) -> None:
        self.index, self.folder, self.name = index, folder, f"node-{index}"
        for part in ("kubelet", "containerd", "sysctl", "cni", "pod-logs"):
            (folder / part).mkdir(parents=True)
        self._resolver = folder / "resolv.conf"
        self._resolver.write_text(f"nameserver {ADDRESS}\n")
        self.cgroup = f"mlpipe-{os.getpid()}-{folder.stat().st_ino}"
        self.namespaces = Namespaces(self._script())
        self._processes: list[Process] = []
        self.gpu_plugin: Process | None = None

    def link(self, first: Node) -> None:
        """Connects the network with that of node 0."""
        here, there = self.namespaces.network, first.namespaces.network
        _run(there(["ip", "link", "add", self.name, "type", "veth", "peer", "name", "eth0"]))
        _run(there(["ip", "link", "set", "eth0", "netns", self.namespaces.pid]))
        _run(there(["ip", "link", "set", self.name, "master", "nodes", "up"]))
        _run(there(["ip", "route", "add", pods(self.index), "via", address(self.index)]))
        _run(here(["ip", "address", "add", f"{address(self.index)}/24", "dev", "eth0"]))
        _run(here(["ip", "link", "set", "eth0", "up"]))
        _run(here(["ip", "route", "add", "default", "via", ADDRESS]))

    def start(self, control: ControlPlane, images: list[Image], spec: Path) -> None:
        make_cgroup(self.cgroup)
        containerd = self._process("containerd", [tool("containerd"), "--config", self._containerd(spec)])
        ctr = [tool("ctr"), "--namespace", "k8s.io", "images"]
        wait_until("containerd", lambda: self._runs([*ctr, "list"]), _READY_SECONDS, [containerd])
        for image in images:
            _run(self.namespaces.all([*ctr, "import", image.archive]))
            _run(self.namespaces.all([*ctr, "tag", image.name, image.by_digest]))
        self._process(
            "kubelet",
            [
                *(binary("kube"), "kubelet", f"--config={self._kubelet(control)}"),
                f"--kubeconfig={self._kubeconfig(control)}",
                f"--hostname-override={self.name}",
                f"--node-ip={address(self.index)}",
            ],
        )

    def set_gpus(self, total: int, healthy: int) -> None:
        """Devices that the fake plugin reports. The first call starts the plugin."""
        said, fresh = self.folder / "gpus", self.folder / "gpus.new"
        fresh.write_text(f"{total} {healthy}")
        fresh.replace(said)
        if self.gpu_plugin is None:
            self.gpu_plugin = self._process("gpuplugin", [binary("gpuplugin"), said])

    @property
    def processes(self) -> list[Process]:
        """All that should be running, but for the plugin."""
        return [process for process in self._processes if process is not self.gpu_plugin]

    def stop(self) -> None:
        """Kubelet first, so that nothing is started any more; then everything else at once, pods included."""
        for process in reversed(self._processes):
            process.stop(signal.SIGKILL)
        self.namespaces.close()
        wait_until(
            f"the end of all processes of {self.name}", lambda: drop_cgroup(self.cgroup), _TASKS_SECONDS
        )

    def _script(self) -> str:
        lines = ["mount -t tmpfs tmpfs /run", "mount -t tmpfs tmpfs /var/log", "mkdir -p /var/lib/kubelet"]
        lines += [f"mount --bind '{self.folder}/kubelet' /var/lib/kubelet", "ip link set lo up"]
        # so that pulling an image that is not there fails at once, not when the machine's resolver times out
        lines.append(f"[ ! -e /etc/resolv.conf ] || mount --bind '{self._resolver}' /etc/resolv.conf")
        for name, value in _SYSCTLS.items():
            stand_in = self.folder / "sysctl" / name.replace("/", "-")
            stand_in.write_text(value)
            lines.append(f"[ ! -e /proc/sys/{name} ] || mount --bind '{stand_in}' /proc/sys/{name}")
        lines.append("echo 1 >/proc/sys/net/ipv4/ip_forward")
        if self.index == 0:
            # a second end of its own gives the bridge a carrier while it is the only node
            lines += [
                "ip link add nodes type bridge",
                "ip link add up0 type veth peer name up1",
                "ip link set up0 master nodes up",
                "ip link set up1 up",
                f"ip address add {ADDRESS}/24 dev nodes",
                "ip link set nodes up",
                f"ip address add {SERVICE_ADDRESS}/32 dev lo",
                "ip route add default dev nodes",
            ]
        return "\n".join(lines)

    def _process(self, name: str, command: list[object]) -> Process:
        path = os.pathsep.join([str(tool("runc").parent), str(tool("containerd").parent), os.environ["PATH"]])
        log = self.folder / f"{name}.log"
        process = Process(f"{name} of {self.name}", self.namespaces.all(command), log, env={"PATH": path})
        self._processes.append(process.start())
        return process

    def _runs(self, command: list[object]) -> bool:
        done = subprocess.run(self.namespaces.all(command), capture_output=True, timeout=_READY_SECONDS)
        return done.returncode == 0

    def _containerd(self, spec: Path) -> Path:
        network = {
            "cniVersion": "0.4.0",
            "name": "pods",
            "plugins": [
                {
                    "type": "bridge",
                    "bridge": "pods",
                    "isGateway": True,
                    "ipam": {
                        "type": "host-local",
                        "subnet": pods(self.index),
                        "dataDir": "/run/cni",
                        "routes": [{"dst": "0.0.0.0/0"}],
                    },
                }
            ],
        }
        (self.folder / "cni" / "pods.conflist").write_text(json.dumps(network))
        path = self.folder / "containerd.toml"
        # the handler `image` is for pods that see nothing but their image
        path.write_text(f"""\
version = 2
root = "{self.folder}/containerd"
state = "/run/containerd"
[grpc]
address = "/run/containerd/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{PAUSE}"
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
base_runtime_spec = "{spec}"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
SystemdCgroup = false
BinaryName = "{tool("runc")}"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.image]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.image.options]
SystemdCgroup = false
BinaryName = "{tool("runc")}"
[plugins."io.containerd.grpc.v1.cri".registry.mirrors."{REGISTRY}"]
endpoint = ["http://{REGISTRY}"]
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{tool("host-local").parent}"
conf_dir = "{self.folder}/cni"
""")
        return path

    def _kubelet(self, control: ControlPlane) -> Path:
        config = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {"x509": {"clientCAFile": str(control.certificates.ca)}},
            "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
            "clusterDomain": "cluster.local",
            "clusterDNS": [ADDRESS],
            "resolvConf": str(self._resolver),
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self.cgroup}",
            "failCgroupV1": False,
            "failSwapOn": False,
            "enforceNodeAllocatable": [],
            "makeIPTablesUtilChains": False,
            "podLogsDir": str(self.folder / "pod-logs"),
            # a full disk is the machine's matter
            "evictionHard": {
                "memory.available": "100Mi",
                "nodefs.available": "1%",
                "imagefs.available": "1%",
            },
            "imageGCHighThresholdPercent": 100,
            "nodeStatusUpdateFrequency": "2s",  # changed devices show sooner,
            "nodeStatusReportFrequency": "5m",  # and what is as it was is not written again as often
            "nodeLeaseDurationSeconds": 8,  # renewed four times as often: the sooner is a lost node noticed
        }
        path = self.folder / "kubelet.json"
        path.write_text(json.dumps(config, indent=1))
        return path

    def _kubeconfig(self, control: ControlPlane) -> Path:
        own = control.certificates.issue(self.name, f"/O=system:nodes/CN=system:node:{self.name}")
        return control.certificates.kubeconfig(self.folder / "kubeconfig", own)


def make_cgroup(name: str) -> None:
    """Under every hierarchy: kubelet wants its root to exist. A new cpuset is empty until it is told
    otherwise."""
    if (_CGROUPS / "cgroup.controllers").exists():
        (_CGROUPS / name).mkdir()
        return
    for hierarchy in _hierarchies():
        (hierarchy / name).mkdir()
        for setting in ("cpuset.cpus", "cpuset.mems"):
            if (hierarchy / name / setting).exists():
                (hierarchy / name / setting).write_text((hierarchy / setting).read_text())


def drop_cgroup(name: str) -> bool:
    """False while something in it lives."""
    left = False
    for hierarchy in [_CGROUPS, *_hierarchies()]:
        for folder, _, _ in os.walk(hierarchy / name, topdown=False):
            try:
                os.rmdir(folder)
            except OSError:
                left = True
    return not left


def sweep() -> None:
    """Drops what killed test sessions left of their cgroups."""
    for folder in {
        one.name for hierarchy in [_CGROUPS, *_hierarchies()] for one in hierarchy.glob("mlpipe-*-*")
    }:
        if not Path(f"/proc/{folder.split('-')[1]}").exists():
            drop_cgroup(folder)


def _hierarchies() -> list[Path]:
    """Of cgroup v1; `cpu` and `cpuacct` may be links to one."""
    found = {one.resolve() for one in _CGROUPS.iterdir() if one.is_dir()} if _CGROUPS.exists() else set()
    return sorted(one for one in found if (one / "cgroup.procs").exists() and one.parent == _CGROUPS)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise ClusterError(f"{' '.join(command)}: {done.stderr}")
