"""A real Kubernetes on one machine, without a registry: real pods, real torchrun, up in seconds.

    PYTHONPATH=tests python -m kit.cluster build           # once: Go and Debian packages, minutes
    PYTHONPATH=tests python -m kit.cluster up [COMMAND]    # a shell, or the command, in a fresh cluster

It lives in namespaces of its own: the machine's network, mounts and processes stay as they are, addresses
never clash, and nothing outlives the process that made it. It needs root and Linux. What it is not: there is
no kube-proxy (Services must be headless), no network policy is enforced, and there is one image,
`Cluster.image`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import urllib3
from kit import cluster_build, servers
from kit.cluster_addons import Addons
from kit.cluster_control import ADDRESS, SERVER, ControlPlane, write_kubeconfig
from kit.cluster_image import base_spec, pause_image, worker_image
from kit.cluster_node import Node, sweep
from kit.cluster_process import NO_PROXY, ClusterError, Process, wait_until
from kit.servers import S3Server, ServerMissingError

__all__ = ["Cluster", "ClusterError", "ServerMissingError", "cluster"]

T = TypeVar("T")
_READY_SECONDS = 60
_IDENTITY = {
    "MINIO_IDENTITY_OPENID_CONFIG_URL": f"{SERVER}/.well-known/openid-configuration",
    "MINIO_IDENTITY_OPENID_CLIENT_ID": "sts.amazonaws.com",
    "MINIO_IDENTITY_OPENID_CLAIM_NAME": "sub",
}
_PROGRAMS = {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "openssl": "openssl"}


class Cluster:
    """A running one, made by `cluster`.

    kubeconfig: of an administrator. image: what workers run; `image.name` and `image.by_digest` both resolve.
    minio: its S3 server (`endpoint` is good for pods and for `inside`), if it has one.
    """

    def __init__(self, folder: Path, disk: Path, grace_seconds: int) -> None:
        self.folder, self._disk = folder, disk
        self.nodes = [Node(0, disk / "node-0")]
        self._first = self.nodes[0].namespaces
        self.control = ControlPlane(folder / "control", self._first, grace_seconds)
        self.kubeconfig = self.control.kubeconfig
        self.kubectl, self.apply, self.get = self.control.kubectl, self.control.apply, self.control.get
        self.kubeconfig_for = self.control.kubeconfig_for
        self.image = worker_image(folder)
        self._pause, self._spec = pause_image(folder), base_spec(folder / "base-spec.json")
        self.addons: list[Process] = []
        self._addons = Addons(folder, self.control, self._first)
        self._minio: Process | None = None
        programs = folder / "bin"
        programs.mkdir()
        kubectl = programs / "kubectl"
        kubectl.write_text(f'#!/bin/sh\nexec "{cluster_build.binary("kube")}" kubectl "$@"\n')
        kubectl.chmod(0o755)

    # What a test talks to it with.

    def environment(self, namespace: str = "default") -> dict[str, str]:
        """KUBECONFIG (administrator, that namespace), AWS_* of its MinIO, and a PATH with kubectl of its
        version."""
        path = self.folder / f"{namespace}.kubeconfig"
        cert, key = map(str, self.control.admin)
        user = {"client-certificate": cert, "client-key": key}
        write_kubeconfig(path, self.control.certificates.ca, user, namespace)
        programs = os.pathsep.join([f"{self.folder}/bin", f"{sys.prefix}/bin", os.environ["PATH"]])
        found = {"KUBECONFIG": str(path), "PATH": programs}
        return {**found, **(self.minio.environment() if self._minio else {})}

    def run(
        self,
        argv: Sequence[object],
        *,
        env: Mapping[str, str] | None = None,
        timeout: float,
        cwd: Path | None = None,
        check: bool = False,
        stdin: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """subprocess.run in its network, output captured as text. `env` is added to this process's."""
        return subprocess.run(
            self._first.network(argv),
            env={**os.environ, **NO_PROXY, **(env or {})},
            timeout=timeout,
            cwd=cwd,
            check=check,
            input=stdin or "",
            capture_output=True,
            text=True,
        )

    def popen(
        self, argv: Sequence[object], *, env: Mapping[str, str] | None = None, **more: Any
    ) -> subprocess.Popen[bytes]:
        """subprocess.Popen in its network; `pid` is the program's own. It dies with the calling thread."""
        return subprocess.Popen(
            self._first.network(argv),
            env={**os.environ, **NO_PROXY, **(env or {})},
            preexec_fn=servers.die_with_parent,
            **more,
        )

    @property
    def network(self) -> str:
        """The file of its network namespace."""
        return f"/proc/{self._first.pid}/ns/net"

    def inside(self) -> contextlib.AbstractContextManager[None]:
        """The calling thread in its network, and threads started meanwhile: connections opened there stay
        usable."""
        return self._first.inside()

    def wait_until(self, what: str, check: Callable[[], T | None], seconds: float) -> T:
        """The first true answer. Raises ClusterError when a process of the cluster ended, AssertionError at
        the deadline, with all pods and the events that warn."""
        return wait_until(what, check, seconds, self.processes, self._explain)

    def namespace(self, name: str, *, pod_security: str | None = "restricted") -> str:
        """Creates it, enforcing that level of the Pod Security standards; returns its name."""
        labels = {"pod-security.kubernetes.io/enforce": pod_security} if pod_security else {}
        self.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
        account = f"/api/v1/namespaces/{name}/serviceaccounts/default"
        self.wait_until(f"the default service account of {name}", lambda: self.get(account), _READY_SECONDS)
        return name

    def wait_for_job(self, name: str, namespace: str, seconds: float) -> None:
        """Until it is complete. Raises ClusterError, with its pods' logs, when it failed."""
        path = f"/apis/batch/v1/namespaces/{namespace}/jobs/{name}"

        def complete() -> bool:
            found = self.get(path) or {"status": {}}
            conditions = [
                one["type"] for one in found["status"].get("conditions", []) if one["status"] == "True"
            ]
            if {"Failed", "FailureTarget"} & set(conditions):
                logs = self.kubectl(
                    "logs", "-n", namespace, "-l", f"job-name={name}", "--prefix", "--tail=50"
                )
                raise ClusterError(f"the job {name} failed:\n{logs}")
            return "Complete" in conditions

        self.wait_until(f"the job {name}, complete", complete, seconds)

    @property
    def minio(self) -> S3Server:
        if self._minio is None:
            raise ClusterError("this cluster was started without MinIO")
        return S3Server("minio", f"http://{ADDRESS}:9000", self._minio.pid, self.folder / "minio")

    def make_bucket(self, bucket: str) -> str:
        with self.inside():
            self.minio.make_bucket(bucket)
        return bucket

    # What a test does to it.

    def restart_apiserver(self) -> None:
        """Kills it and waits until the new one is ready."""
        self.control.restart_apiserver()

    def stop_minio(self) -> None:
        assert self._minio is not None
        self._minio.stop(signal.SIGKILL)

    def start_minio(self) -> None:
        """Starts it, or starts it again with the data it had, and waits until it answers. A pod's token for
        the audience sts.amazonaws.com is lent keys of the policy with the name of its subject."""
        if self._minio is None:
            data, trusted = self.folder / "minio", self.folder / "minio-certs"
            data.mkdir()
            (trusted / "CAs").mkdir(parents=True)
            shutil.copy(self.control.certificates.ca, trusted / "CAs")
            program = servers.binary("minio")
            command, environment = servers.command_of("minio", program, f"{ADDRESS}:9000", data)
            command += ["--certs-dir", str(trusted)]
            environment |= _IDENTITY
            self._minio = Process(
                "minio", self._first.network(command), self.folder / "minio.log", env=environment
            )
        process = self._minio.start()

        def ready() -> bool:
            with self.inside(), urllib3.PoolManager(retries=False, timeout=2.0) as pool:
                try:
                    return pool.request("GET", f"http://{ADDRESS}:9000/minio/health/ready").status == 200
                except urllib3.exceptions.HTTPError:
                    return False  # not listening yet

        wait_until("MinIO", ready, _READY_SECONDS, [process])

    def kill_node(self, index: int) -> None:
        """Ends everything on it at once, as a power cut does. Its pods stay Terminating until
        the node is tainted node.kubernetes.io/out-of-service."""
        self._other(index).stop()

    def cut_node(self, index: int) -> None:
        """Takes its network away; what runs there goes on."""
        self._link(index, "down")

    def heal_node(self, index: int) -> None:
        self._link(index, "up")

    def set_gpus(self, index: int, total: int, healthy: int | None = None) -> None:
        """Gives a node that many devices of nvidia.com/gpu, with nothing behind them, and waits until it
        offers the healthy ones: a pod that asks for one runs, and sees NVIDIA_VISIBLE_DEVICES."""
        healthy = total if healthy is None else healthy
        self.nodes[index].set_gpus(total, healthy)

        def offered() -> bool:
            node = self.get(f"/api/v1/nodes/node-{index}")
            return bool(node) and node["status"]["allocatable"].get("nvidia.com/gpu") == str(healthy)

        self.wait_until(f"{healthy} GPUs on node-{index}", offered, _READY_SECONDS)

    def add_node(self) -> Node:
        """Starts one more, up to 250; Ready when it returns."""
        index = len(self.nodes)
        node = Node(index, self._disk / f"node-{index}")
        self.nodes.append(node)
        node.link(self.nodes[0])
        node.start(self.control, [self._pause, self.image], self._spec)
        self.wait_until_node(index, ready=True)
        return node

    @contextlib.contextmanager
    def fake_nodes(self, labels: Sequence[Mapping[str, str]]) -> Iterator[None]:
        """One for each of these labels, once, for a while (see `Addons.kwok`)."""
        with self.control.patient():
            process = self._addons.kwok(labels)
            self.addons.append(process)
            try:
                yield
            finally:
                self.addons.remove(process)
                process.stop()
                options = {"apiVersion": "v1", "kind": "DeleteOptions"}
                nodes = [(f"/api/v1/nodes/fake-{number}", options) for number in range(len(labels))]
                self.control.send("DELETE", nodes)

    def add_trainer(self) -> None:
        """Starts Kubeflow Trainer, ready when it returns. Raises ServerMissingError if it was not built."""
        cluster_build.binary("trainer")
        self.addons.append(self._addons.trainer())
        for process in self.addons:
            if process.name == "kueue":
                self._addons.restart_kueue(process)

    def wait_until_node(self, index: int, *, ready: bool, seconds: float = _READY_SECONDS) -> None:
        """Until the control plane calls it Ready, or not any more."""
        path = f"/api/v1/nodes/node-{index}"

        def seen() -> bool:
            conditions = (self.get(path) or {"status": {}})["status"].get("conditions", [])
            return ready == any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)

        self.wait_until(f"node-{index} {'Ready' if ready else 'not Ready'}", seen, seconds)

    # Start and stop.

    @property
    def processes(self) -> list[Process]:
        """All that should be running, but for MinIO and for nodes that may be lost."""
        return [*self.control.processes, *self.nodes[0].processes, *self.addons]

    def start(self, *, nodes: int, jobset: bool, kueue: bool, minio: bool, fake_nodes: int) -> None:
        self.control.start()
        self.nodes[0].start(self.control, [self._pause, self.image], self._spec)
        if minio:
            discovery = (
                "oidc --clusterrole=system:service-account-issuer-discovery --group=system:unauthenticated"
            )
            self.kubectl("create", "clusterrolebinding", *discovery.split())
            self.start_minio()
        addons = self._addons
        if jobset or kueue:
            self.addons.append(addons.jobset())
        if kueue:
            self.addons.append(addons.kueue())
        if fake_nodes:
            self.addons.append(addons.kwok([{}] * fake_nodes))
        self.wait_until_node(0, ready=True)
        for _ in range(1, nodes):
            self.add_node()

    def stop(self) -> None:
        for node in reversed(self.nodes):
            node.stop()  # the network of node 0 lives on with the processes below
        for process in self.addons:
            process.stop(signal.SIGKILL)  # nothing here is to be saved
        if self._minio is not None:
            self._minio.stop(signal.SIGKILL)
        self.control.stop()

    def _explain(self) -> str:
        try:
            warnings = self.kubectl("get", "events", "-A", "--field-selector=type!=Normal", timeout=20)
            return self.kubectl("get", "pods", "-A", "-o", "wide", timeout=20) + warnings
        except (ClusterError, subprocess.TimeoutExpired) as error:
            return f"{error}\n{self.control.apiserver.tail()}"

    def _other(self, index: int) -> Node:
        if index == 0:
            raise ValueError(
                "node 0 carries the control plane: start the cluster with nodes=2 and lose node 1"
            )
        return self.nodes[index]

    def _link(self, index: int, state: str) -> None:
        self.run(["ip", "link", "set", self._other(index).name, state], timeout=10, check=True)


def check_place() -> None:
    """Raises ServerMissingError where pods would not see the code; nothing need be built then."""
    for place in (Path(sys.prefix), Path(__file__)):
        if Path("/tmp") in place.resolve().parents:
            raise ServerMissingError(f"pods have a /tmp of their own, which hides {place}: work elsewhere")


def check_machine() -> None:
    """Raises ServerMissingError where no cluster can run, whatever is built."""
    if os.geteuid() or sys.platform != "linux":
        raise ServerMissingError(
            "the test cluster makes network and mount namespaces: run it as root on Linux"
        )
    check_place()
    for program, package in _PROGRAMS.items():
        if shutil.which(program) is None:
            raise ServerMissingError(f"{program} is missing: install {package}")


@contextlib.contextmanager
def cluster(
    folder: Path,
    *,
    disk: Path | None = None,
    nodes: int = 1,
    jobset: bool = True,
    kueue: bool = False,
    minio: bool = True,
    fake_nodes: int = 0,
) -> Iterator[Cluster]:
    """Starts a cluster with all its files in `folder` and stops it in the end.

    disk: for the gigabytes that nodes unpack, if `folder` has no room. kueue: with it comes JobSet.
    fake_nodes: of kwok (see `Addons.kwok`). Raises ServerMissingError, which says what to install, when this
    machine cannot run one, ClusterError when something ended, AssertionError when it was not up in time."""
    check_machine()
    wanted = {"jobset": jobset or kueue, "kueue": kueue, "kwok": fake_nodes}
    for name in ("kube", "coredns", "pause", *(name for name, needed in wanted.items() if needed)):
        cluster_build.binary(name)
    for name in cluster_build.TOOLS:
        cluster_build.tool(name)
    if minio:
        servers.binary("minio")
    sweep()
    # a lost node is noticed soon, yet nodes do not flap; fake ones never say that they live
    running = Cluster(folder.resolve(), (disk or folder).resolve(), 86400 if fake_nodes else 10)
    try:
        running.start(nodes=nodes, jobset=jobset, kueue=kueue, minio=minio, fake_nodes=fake_nodes)
        yield running
    finally:
        running.stop()


def main(arguments: list[str]) -> int:
    if arguments[:1] not in (["build"], ["up"]):
        print(__doc__)
        return 2
    try:
        check_place()
        print("building what is missing, the first time takes minutes ...", flush=True)
        found = [*cluster_build.build_all(), servers.build("minio")]
        for one in found:
            print(f"  {one}")
        missing = any(isinstance(one, ServerMissingError) for one in found)
        return _up(arguments[1:]) if arguments[0] == "up" else 4 * missing
    except ServerMissingError as error:
        print(error, file=sys.stderr)
        return 4
    except cluster_build.BuildError as error:
        print(error, file=sys.stderr)
        return 1


def _up(command: list[str]) -> int:
    started = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="mlpipe-cluster-") as folder, cluster(Path(folder)) as running:
        namespace, bucket = running.namespace("mlpipe"), running.make_bucket("mlpipe")
        environment = running.environment(namespace)
        print(f"""\
cluster up in {time.monotonic() - started:.0f} s, in namespaces of its own; all of it goes when you leave
  namespace   {namespace} (enforces the Pod Security level restricted)
  image       {running.image.name}
  store       s3://{bucket} at {environment["AWS_ENDPOINT_URL_S3"]}
  KUBECONFIG  {environment["KUBECONFIG"]}
  logs        {folder}/control/*.log {folder}/node-0/*.log
""")
        # an interactive shell's Ctrl-C is its own matter; a handler, unlike SIG_IGN, is not inherited
        signal.signal(signal.SIGINT, lambda *_: None)
        return running.popen(command or [os.environ.get("SHELL", "/bin/sh")], env=environment).wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
