"""Controllers beside the test cluster's own: JobSet, Kueue, Kubeflow Trainer, kwok. They run outside pods, so
their webhooks are called by URL, on ports of their own, and they serve certificates that the kit signs."""

from __future__ import annotations

import base64
import json
import signal
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import urllib3
import yaml
from kit.cluster_build import binary, manifests
from kit.cluster_control import ControlPlane
from kit.cluster_process import Namespaces, Process, wait_until

_READY_SECONDS = 60
_JOBSET_PODS = {"matchExpressions": [{"key": "jobset.sigs.k8s.io/jobset-name", "operator": "Exists"}]}
_KUEUE_FRAMEWORKS = ("batch/job", "jobset.x-k8s.io/jobset", "trainer.kubeflow.org/trainjob")
_KUEUE_HOOKS = ("job", "jobset", "trainjob", "clusterqueue", "cohort", "resourceflavor", "workload")
# kinds that differ between the versions of its API: a webhook converts them, says its crd/kustomization.yaml
_KUEUE_CONVERTS = ("clusterqueues", "cohorts", "localqueues", "multikueueclusters", "workloads")
_STAGES = ("node/fast", "pod/fast")  # kwok looks at no node, nor at its pods, without a stage of nodes


class Addons:
    """Each method starts one, in a folder of its name below `folder`, and returns it ready. `shift`: added to
    all ports, where another cluster's are in this network."""

    def __init__(self, folder: Path, control: ControlPlane, namespaces: Namespaces, shift: int = 0) -> None:
        self._folder, self._control, self._namespaces, self._shift = folder, control, namespaces, shift

    def jobset(self) -> Process:
        folder = self._new_folder("jobset")
        source = manifests("jobset") / "config/components"
        self._create_crds(source / "crd/bases")
        config = {
            "apiVersion": "config.jobset.x-k8s.io/v1alpha1",
            "kind": "Configuration",
            "leaderElection": {"leaderElect": False},
            "internalCertManagement": {"enable": False},
            "webhook": {"host": "127.0.0.1", "port": 9443},
            "health": {"healthProbeBindAddress": "127.0.0.1:8081"},
            "metrics": {"bindAddress": "127.0.0.1:8443"},
        }
        # where it looks for its certificate is not to be configured, but for TMPDIR
        self._serve(folder / "k8s-webhook-server" / "serving-certs", "jobset")
        process = self._start("jobset", [f"--config={_json(folder, config)}"], {"TMPDIR": str(folder)})
        self._wait_until_answers(process, "http://127.0.0.1:8081/readyz")
        hooks = self._webhooks(source, "jobset", 9443)
        for hook in (hook for one in hooks for hook in one["webhooks"]):
            if hook["name"] in ("mpod.kb.io", "vpod.kb.io"):
                hook["objectSelector"] = _JOBSET_PODS  # as the module's own patches say
        self._create(hooks)
        return process

    def jobset_kinds(self) -> None:
        """For a Kueue that has others run them."""
        self._create_crds(manifests("jobset") / "config/components/crd/bases")

    def kueue(self, *, is_manager: bool = False) -> Process:
        """For Jobs, JobSets and TrainJobs with the queue label; needs JobSet. Where it was there before
        Trainer it looks for that now and then: `restart_kueue`. `is_manager`: by MultiKueue it
        has others run them."""
        folder = self._new_folder("kueue")
        source = manifests("kueue") / "config/components"
        port, health, metrics = (self._shift + one for one in (9444, 8082, 8444))
        conversion = {"conversionReviewVersions": ["v1"], "clientConfig": self._client(port, "/convert")}
        self._create_crds(source / "crd/bases", dict.fromkeys(_KUEUE_CONVERTS, conversion))
        self._create([{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "kueue-system"}}])
        self._serve(folder / "certificates", "kueue")
        # where it looks for this one is not to be configured at all
        self._serve(folder / "etc" / "kueue" / "metrics" / "certs", "kueue-metrics")
        config = {
            "apiVersion": "config.kueue.x-k8s.io/v1beta2",
            "kind": "Configuration",
            "leaderElection": {"leaderElect": False},
            "internalCertManagement": {"enable": False},
            "webhook": {"host": "127.0.0.1", "port": port, "certDir": str(folder / "certificates")},
            "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
            "metrics": {"bindAddress": f"127.0.0.1:{metrics}"},
            "featureGates": {"VisibilityOnDemand": False, "MultiKueue": is_manager},
            # a manager waits for workers that have all kinds of its own
            "integrations": {"frameworks": list(_KUEUE_FRAMEWORKS[: 2 if is_manager else None])},
        }
        process = self._start("kueue", [f"--config={_json(folder, config)}"], {}, etc=folder / "etc")
        self._wait_until_answers(process, f"http://127.0.0.1:{health}/readyz")
        hooks = self._webhooks(source, "kueue", port)
        for one in hooks:
            # the others are for kinds that this cluster lacks, or would stand before every pod
            one["webhooks"] = [hook for hook in one["webhooks"] if hook["name"][1:-6] in _KUEUE_HOOKS]
        self._create(hooks)
        return process

    def restart_kueue(self, process: Process) -> None:
        """Ready when it returns."""
        process.stop(signal.SIGKILL)
        process.start()
        self._wait_until_answers(process, "http://127.0.0.1:8082/readyz")

    def trainer(self) -> Process:
        """Makes JobSets of TrainJobs; needs JobSet."""
        folder = self._new_folder("trainer")
        source = manifests("trainer") / "manifests/base"
        self._create_crds(source / "crds")
        config = {
            "apiVersion": "config.trainer.kubeflow.org/v1alpha1",
            "kind": "Configuration",
            "leaderElection": {"leaderElect": False},
            "certManagement": {"enable": False},
            "webhook": {"host": "127.0.0.1", "port": 9445},
            "health": {"healthProbeBindAddress": "127.0.0.1:8083"},
            "metrics": {"bindAddress": "127.0.0.1:8445"},
        }
        self._serve(folder / "k8s-webhook-server" / "serving-certs", "trainer")
        process = self._start("trainer", [f"--config={_json(folder, config)}"], {"TMPDIR": str(folder)})
        self._wait_until_answers(process, "http://127.0.0.1:8083/readyz")
        self._create(self._webhooks(source, "trainer", 9445))
        return process

    def kwok(self, labels: Sequence[Mapping[str, str]]) -> Process:
        """Fake nodes fake-0, fake-1, ... with 8 GPUs, these labels and the taint
        kwok.x-k8s.io/node=fake:NoSchedule, whose pods run and end at once. Good for counting; its delays are
        far too late to measure anything with. They are Ready from the start and never say so again: the
        control plane is to be patient."""
        folder = self._new_folder("kwok")
        stages = manifests("kwok") / "kustomize/stage"
        found = [path for name in _STAGES for path in sorted((stages / name).glob("*.yaml"))]
        texts = [path.read_text() for path in found if path.name != "kustomization.yaml"]
        (folder / "stages.yaml").write_text("\n---\n".join(texts))
        process = self._start(
            "kwok",
            [
                f"--kubeconfig={self._control.kubeconfig}",
                f"--config={folder / 'stages.yaml'}",
                "--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake",
                "--node-lease-duration-seconds=0",
                "--cidr=10.128.0.0/16",
            ],
            {},
        )
        self._control.send("POST", [("/api/v1/nodes", _fake_node(*one)) for one in enumerate(labels)])

        def ready() -> bool:
            """The API server taints what is new until a controller has seen that it is Ready."""
            nodes = self._control.get("/api/v1/nodes?labelSelector=type=kwok")["items"]
            return len(labels) == sum(len(node["spec"]["taints"]) == 1 for node in nodes)

        wait_until(f"{len(labels)} fake nodes Ready", ready, _READY_SECONDS + len(labels), [process])
        return process

    def _new_folder(self, name: str) -> Path:
        (folder := self._folder / name).mkdir()
        return folder

    def _start(
        self, name: str, arguments: Sequence[str], env: Mapping[str, str], etc: Path | None = None
    ) -> Process:
        """`etc`: what it sees as /etc."""
        command: list[object] = [binary(name), *arguments]
        if etc is not None:
            script = 'mount --bind "$0" /etc && exec "$@"'
            command = ["unshare", "--mount", "--propagation", "private", "sh", "-euc", script, etc, *command]
        log = self._folder / name / f"{name}.log"
        inside = self._namespaces.network(command)
        return Process(name, inside, log, env={"KUBECONFIG": str(self._control.kubeconfig), **env}).start()

    def _create(self, objects: Sequence[Mapping[str, Any]]) -> None:
        items = {"apiVersion": "v1", "kind": "List", "items": objects}
        self._control.kubectl("create", "-f", "-", stdin=json.dumps(items))

    def _create_crds(self, folder: Path, conversions: Mapping[str, Any] | None = None) -> None:
        """Creates all of the folder and waits until the API serves them. `conversions`: the webhooks of those
        whose versions differ, by plural."""
        found = [yaml.load(path.read_text(), yaml.CSafeLoader) for path in folder.glob("*.yaml")]
        found = [one for one in found if one["kind"] == "CustomResourceDefinition"]  # no kustomization.yaml
        for spec in (one["spec"] for one in found):
            if webhook := (conversions or {}).get(spec["names"]["plural"]):
                spec["conversion"] = {"strategy": "Webhook", "webhook": webhook}
        self._create(found)
        names = [one["metadata"]["name"] for one in found]

        def established() -> bool:
            # not `kubectl wait`: it fails on a resource so new that it has no conditions
            path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
            return all(
                '"type":"Established","status":"True"' in self._control.ask(f"{path}/{n}")[1] for n in names
            )

        wait_until(f"the resources {', '.join(names)}", established, _READY_SECONDS)

    def _serve(self, folder: Path, name: str) -> None:
        """Writes tls.crt and tls.key for a server on 127.0.0.1."""
        folder.mkdir(parents=True)
        certificate, key = self._control.certificates.issue(
            f"{name}-webhook", f"/CN={name}", ["IP:127.0.0.1"]
        )
        (folder / "tls.crt").write_bytes(certificate.read_bytes())
        (folder / "tls.key").write_bytes(key.read_bytes())

    def _webhooks(self, source: Path, name: str, port: int) -> list[dict[str, Any]]:
        """The module's configurations, called at 127.0.0.1:`port`; everyone's have the same names."""
        text = (source / "webhook/manifests.yaml").read_text()
        configurations: list[dict[str, Any]] = list(yaml.load_all(text, yaml.CSafeLoader))
        for one in configurations:
            one["metadata"]["name"] = f"{name}-{one['metadata']['name']}"
            for hook in one["webhooks"]:
                hook["clientConfig"] = self._client(port, hook["clientConfig"]["service"]["path"])
        return configurations

    def _client(self, port: int, path: str) -> dict[str, str]:
        """How the API server calls a webhook that serves on this machine."""
        bundle = base64.b64encode(self._control.certificates.ca.read_bytes()).decode()
        return {"url": f"https://127.0.0.1:{port}{path}", "caBundle": bundle}

    def _wait_until_answers(self, process: Process, url: str) -> None:
        def answers() -> bool:
            with self._namespaces.inside(), urllib3.PoolManager(retries=False, timeout=2.0) as pool:
                try:
                    return pool.request("GET", url).status == 200
                except urllib3.exceptions.HTTPError:
                    return False  # not listening yet

        wait_until(f"{process.name}, ready", answers, _READY_SECONDS, [process])


def _json(folder: Path, config: Mapping[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


def _fake_node(index: int, labels: Mapping[str, str]) -> dict[str, Any]:
    resources = {
        "cpu": "64", "memory": "512Gi", "ephemeral-storage": "4Ti", "pods": "256", "nvidia.com/gpu": "8",
    }  # fmt: skip
    name, now = f"fake-{index}", datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    ready = {"type": "Ready", "status": "True", "lastHeartbeatTime": now, "lastTransitionTime": now}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": {"kwok.x-k8s.io/node": "fake"},
            "labels": {"type": "kwok", "kubernetes.io/hostname": name, **labels},
        },
        "spec": {"taints": [{"key": "kwok.x-k8s.io/node", "value": "fake", "effect": "NoSchedule"}]},
        "status": {"allocatable": resources, "capacity": resources, "conditions": [ready]},
    }
