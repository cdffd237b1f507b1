"""The control plane of the test cluster: certificates, etcd, API server, controllers, scheduler, DNS.

There is no kube-proxy. The API server listens on 443 of the node's address and on that of its own Service,
which node 0 simply owns, so pods find it in the usual way; other Services must be headless.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import urllib3
from kit.cluster_build import binary, tool
from kit.cluster_process import NO_PROXY, ClusterError, Namespaces, Process, wait_until
from kit.servers import ServerMissingError

ADDRESS = "10.250.0.1"  # of node 0 and of all that runs beside it
REGISTRY = f"{ADDRESS}:5000"  # of container images, where a test starts one (kit/image.py)
SERVICE_ADDRESS = "10.96.0.1"  # of the Service `kubernetes`
SERVER = f"https://{ADDRESS}"
_SERVICES = "10.96.0.0/16"
_READY_SECONDS = 60
_KUBECTL_SECONDS = 120
# Two blocks: within one, `template` would come before `kubernetes`, whatever their order here.
_COREFILE = f"""\
cluster.local in-addr.arpa {{
  bind {ADDRESS}
  errors
  kubernetes cluster.local in-addr.arpa {{
    kubeconfig KUBECONFIG
    ttl 1
  }}
}}
. {{
  bind {ADDRESS}
  template ANY ANY . {{
    rcode NXDOMAIN
  }}
}}
"""


# What mlpipe itself asks for: its people and drivers are service accounts, as are the controllers.
_AUDIT = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {"level": "None", "userGroups": ["system:serviceaccounts:kube-system"]},
        {"level": "Metadata", "userGroups": ["system:serviceaccounts"]},
        {"level": "None"},
    ],
}


class Certificates:
    """An authority of the cluster's own, and what it signs: <name>.crt and <name>.key in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "openssl.cnf").write_text("[req]\ndistinguished_name = name\n[name]\n")
        usage = [
            "basicConstraints=critical,CA:TRUE",
            "keyUsage=critical,keyCertSign,cRLSign,digitalSignature",
        ]
        self._request("ca", "/CN=mlpipe-test-ca", usage)
        self._openssl("genrsa", "-out", folder / "service-accounts.key", "2048")

    @property
    def ca(self) -> Path:
        return self.folder / "ca.crt"

    def issue(self, name: str, subject: str, addresses: Sequence[str] = ()) -> tuple[Path, Path]:
        """Paths of a certificate for servers and clients, and of its key. `addresses`: IP:... and DNS:..."""
        extensions = [
            "basicConstraints=critical,CA:FALSE",
            "keyUsage=critical,digitalSignature",
            "extendedKeyUsage=serverAuth,clientAuth",
        ]
        if addresses:
            extensions.append(f"subjectAltName={','.join(addresses)}")
        return self._request(name, subject, extensions, "-CA", self.ca, "-CAkey", self.folder / "ca.key")

    def kubeconfig(self, path: Path, certificate: tuple[Path, Path], server: str = SERVER) -> Path:
        cert, key = certificate
        user = {"client-certificate": str(cert), "client-key": str(key)}
        return write_kubeconfig(path, self.ca, user, server=server)

    def _request(self, name: str, subject: str, extensions: list[str], *more: object) -> tuple[Path, Path]:
        cert, key = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        added = [word for extension in extensions for word in ("-addext", extension)]
        curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        where = ["-config", self.folder / "openssl.cnf", "-keyout", key, "-out", cert]
        self._openssl("req", "-x509", *curve, "-days", "365", "-subj", subject, *added, *where, *more)
        return cert, key

    def _openssl(self, *arguments: object) -> None:
        if shutil.which("openssl") is None:
            raise ServerMissingError("openssl is missing: install openssl")
        done = subprocess.run(["openssl", *map(str, arguments)], capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise ClusterError(f"openssl {arguments[0]}: {done.stderr}")


def write_kubeconfig(
    path: Path, ca: Path, user: Mapping[str, str], namespace: str = "default", server: str = SERVER
) -> Path:
    context = {"cluster": "test", "user": "test", "namespace": namespace}
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": {"server": server, "certificate-authority": str(ca)}}],
        "users": [{"name": "test", "user": dict(user)}],
        "contexts": [{"name": "test", "context": context}],
        "current-context": "test",
    }
    path.write_text(json.dumps(content, indent=1))
    path.chmod(0o600)
    return path


class ControlPlane:
    """Starts on `start`. `kubeconfig`: of a member of system:masters. `grace_seconds`: without a sign of
    life, a node is not Ready any more. `port`: of the API server; etcd has the two above 2379 - 443 + it."""

    def __init__(self, folder: Path, namespaces: Namespaces, grace_seconds: int, port: int = 443) -> None:
        self.folder, self._namespaces, self._port = folder, namespaces, port
        self.server = SERVER if port == 443 else f"{SERVER}:{port}"
        self._etcd = [f"http://127.0.0.1:{2379 - 443 + port + number}" for number in (0, 1)]
        folder.mkdir()
        self.certificates = Certificates(folder / "certificates")
        self.admin = self.certificates.issue("admin", "/O=system:masters/CN=admin")
        self.kubeconfig = self.certificates.kubeconfig(folder / "admin.kubeconfig", self.admin, self.server)
        self._pool = urllib3.PoolManager(
            retries=False,
            timeout=10.0,
            maxsize=4,
            ca_certs=str(self.certificates.ca),
            cert_file=str(self.admin[0]),
            key_file=str(self.admin[1]),
        )
        clients, peers = self._etcd
        etcd = {
            "data-dir": folder / "etcd",
            "listen-client-urls": clients,
            "advertise-client-urls": clients,
            "listen-peer-urls": peers,
            "initial-advertise-peer-urls": peers,
            "initial-cluster": f"default={peers}",
        }
        self.etcd = self._process("etcd", [tool("etcd"), *_flags(etcd)])
        self.apiserver = self._process(
            "kube-apiserver", [binary("kube"), "kube-apiserver", *self._apiserver()]
        )
        scheduler = {
            "kubeconfig": self.kubeconfig,
            "leader-elect": "false",
            "kube-api-qps": 400,
            "kube-api-burst": 800,
        }
        corefile = folder / "Corefile"
        corefile.write_text(_COREFILE.replace("KUBECONFIG", str(self.kubeconfig)))
        self._others = [
            self._controllers(grace_seconds),
            self._process("kube-scheduler", [binary("kube"), "kube-scheduler", *_flags(scheduler)]),
            self._process("coredns", [binary("coredns"), "-conf", corefile]),
        ]

    @property
    def processes(self) -> list[Process]:
        return [self.etcd, self.apiserver, *self._others]

    def start_api(self) -> None:
        self.etcd.start()
        self.apiserver.start()
        self._wait_until_ready()

    def start(self) -> None:
        self.start_api()
        for process in self._others:
            process.start()

    def start_collector(self) -> None:
        """Of the controllers only those that a cluster without nodes needs: what nobody owns goes."""
        wanted = ("garbage-collector-controller", "namespace-controller")
        flags = {"kubeconfig": self.kubeconfig, "leader-elect": "false", "secure-port": 0}
        flags["controllers"] = ",".join(wanted)
        command = [binary("kube"), "kube-controller-manager", *_flags(flags)]
        self._others = [self._process("kube-controller-manager", command).start()]

    def stop(self) -> None:
        self._pool.clear()
        for process in reversed(self.processes):  # nothing here is to be saved
            process.stop(signal.SIGKILL)

    def restart_apiserver(self) -> None:
        self.apiserver.stop(signal.SIGKILL)
        self.apiserver.start()
        self._wait_until_ready()

    @contextlib.contextmanager
    def patient(self) -> Iterator[None]:
        """A node counts as alive, however long it says nothing, in the `with`: a thousand fake ones would
        say so hundreds of times a second."""
        usual, patient = self._others[0], self._controllers(86400)
        self._replace(usual, patient)
        try:
            yield
        finally:
            self._replace(patient, usual)

    def _replace(self, process: Process, other: Process) -> None:
        process.stop(signal.SIGKILL)
        self._others[self._others.index(process)] = other.start()

    def send(self, method: str, requests: Iterable[tuple[str, object]]) -> None:
        """A body to each of these paths, several at a time. Raises ClusterError with what the server said."""

        def send(request: tuple[str, object]) -> None:
            path, body = request[0], json.dumps(request[1])
            headers = {"Content-Type": "application/json"}
            with self._namespaces.inside():
                answer = self._pool.request(method, f"{self.server}{path}", body=body, headers=headers)
            if answer.status >= 300:
                raise ClusterError(f"{method} {path}: {answer.status} {answer.data[:500].decode()}")

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            list(pool.map(send, requests))

    def ask(self, path: str) -> tuple[int, str]:
        """Status (0: no answer) and body of a GET as the administrator."""
        with self._namespaces.inside():
            try:
                answer = self._pool.request("GET", f"{self.server}{path}")
            except urllib3.exceptions.HTTPError:
                return 0, ""
        return answer.status, answer.data.decode()

    def get(self, path: str) -> Any:
        """A GET, say "/api/v1/namespaces/x/pods/y", parsed; None where there is no such thing (yet). Raises
        ClusterError."""
        status, body = self.ask(path)
        if status not in (0, 200, 404):
            raise ClusterError(f"GET {path}: {status} {body[:500]}")
        return json.loads(body) if status == 200 else None

    def requests(self, account: str) -> list[str]:
        """What mlpipe has asked the API server for, as a ServiceAccount of that name: "verb path", in order;
        a watch when it begins."""
        found = []
        for line in (self.folder / "audit.log").read_text().splitlines():
            event = json.loads(line)
            begun = event["verb"] != "watch" or event["stage"] == "ResponseStarted"
            own = event["user"]["username"].endswith(f":{account}")
            if event["userAgent"] == "mlpipe" and own and begun:
                found.append(f"{event['verb']} {event['requestURI']}")
        return found

    def inside(self) -> contextlib.AbstractContextManager[None]:
        """The calling thread in its network."""
        return self._namespaces.inside()

    def kubectl(self, *arguments: object, stdin: str = "", timeout: float = _KUBECTL_SECONDS) -> str:
        """Output of kubectl as the administrator. Raises ClusterError with what it said."""
        command = [binary("kube"), "kubectl", f"--kubeconfig={self.kubeconfig}", *arguments]
        done = subprocess.run(
            self._namespaces.network(command),
            env={**os.environ, **NO_PROXY, "HOME": str(self.folder)},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if done.returncode:
            raise ClusterError(f"kubectl {' '.join(map(str, arguments))}: {done.stderr.strip()}")
        return done.stdout

    def apply(self, *objects: Mapping[str, Any]) -> None:
        """Creates the objects, or updates them."""
        items = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self.kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(items))

    def kubeconfig_for(self, account: str, namespace: str, seconds: int = 3600) -> Path:
        """A file with a fresh token of that service account; at least 600 s."""
        token = self.kubectl("create", "token", account, "-n", namespace, f"--duration={seconds}s").strip()
        path = self.folder / f"{namespace}-{account}.kubeconfig"
        return write_kubeconfig(path, self.certificates.ca, {"token": token}, namespace, self.server)

    def _wait_until_ready(self) -> None:
        def ready() -> bool:
            return self.ask("/readyz")[0] == 200

        wait_until("a ready API server", ready, _READY_SECONDS, [self.etcd, self.apiserver])

    def _process(self, name: str, command: Sequence[object]) -> Process:
        return Process(name, self._namespaces.network(command), self.folder / f"{name}.log")

    def _controllers(self, grace_seconds: int) -> Process:
        controllers = {
            "kubeconfig": self.kubeconfig,
            "leader-elect": "false",
            "controllers": "*,-ttl-controller",  # it writes to each of a thousand fake nodes, several times
            "node-monitor-grace-period": f"{grace_seconds}s",
            "node-monitor-period": "1s",
            "root-ca-file": self.certificates.ca,
            "service-account-private-key-file": self.certificates.folder / "service-accounts.key",
            "use-service-account-credentials": "true",
            "kube-api-qps": 400,
            "kube-api-burst": 800,
        }
        command = [binary("kube"), "kube-controller-manager", *_flags(controllers)]
        return self._process("kube-controller-manager", command)

    def _apiserver(self) -> list[str]:
        own = (
            "kubernetes",
            "kubernetes.default",
            "kubernetes.default.svc",
            "kubernetes.default.svc.cluster.local",
        )
        names = [f"IP:{ADDRESS}", f"IP:{SERVICE_ADDRESS}", *(f"DNS:{name}" for name in own)]
        certificate, key = self.certificates.issue("apiserver", "/CN=kube-apiserver", names)
        accounts = self.certificates.folder / "service-accounts.key"
        policy = self.folder / "audit.json"
        policy.write_text(json.dumps(_AUDIT))
        return _flags(
            {
                "etcd-servers": self._etcd[0],
                "bind-address": "0.0.0.0",
                "secure-port": self._port,
                "advertise-address": ADDRESS,
                "service-cluster-ip-range": _SERVICES,
                "authorization-mode": "Node,RBAC",
                "enable-admission-plugins": "NodeRestriction",
                "allow-privileged": "true",
                # Debian 12's etcd cannot: else a watch without a version, as MultiKueue's, ends at once
                "feature-gates": "WatchList=false",
                "audit-policy-file": policy,
                "audit-log-path": self.folder / "audit.log",
                "client-ca-file": self.certificates.ca,
                "tls-cert-file": certificate,
                "tls-private-key-file": key,
                "service-account-issuer": "https://kubernetes.default.svc.cluster.local",
                "service-account-key-file": accounts,
                "service-account-signing-key-file": accounts,
                # else `kubectl logs` fails
                "kubelet-client-certificate": self.admin[0],
                "kubelet-client-key": self.admin[1],
                "kubelet-preferred-address-types": "InternalIP",
            }
        )


@contextlib.contextmanager
def api_server(folder: Path) -> Iterator[ControlPlane]:
    """etcd and the API server alone, in a network of their own: it says what it admits, and nothing runs.
    Raises ServerMissingError."""
    if os.geteuid() or sys.platform != "linux":
        raise ServerMissingError("a network of its own needs root on Linux")
    addresses = "\n".join(f"ip address add {one}/32 dev lo" for one in (ADDRESS, SERVICE_ADDRESS))
    namespaces = Namespaces(f"ip link set lo up\n{addresses}")
    control = ControlPlane(folder, namespaces, 10)
    try:
        control.start_api()
        yield control
    finally:
        control.stop()
        namespaces.close()


def _flags(values: Mapping[str, object]) -> list[str]:
    return [f"--{name}={value}" for name, value in values.items()]
