"""The shipped ValidatingAdmissionPolicy on a real API server: what mlpipe renders passes, every way around it
is refused, as a pod and as the Job or JobSet that would make it. Nothing runs here."""

from __future__ import annotations

import copy
import json
import os
import re
from pathlib import Path
from unittest import mock

import pytest
import yaml
from kit import manifests
from kit.cluster_build import manifests as manifests_of
from kit.cluster_objects import named
from kit.cluster_process import ClusterError, wait_until
from kit.helm import helm

from mlpipe.submit.kubernetes.api import ApiError, connect
from mlpipe.submit.kubernetes.objects import GANGS, made_of

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "manifests"
TEAM = "guardrails.enabled=true,guardrails.images={registry.example.com/team}"
# of the golden manifests that ask for everything, which say a namespace of their own, `ml`
MORE = ",".join(
    f"guardrails.{setting}"
    for setting in (
        "hostNetwork=true",
        "workerSecrets={ml-runs,hub,tracking}",
        "driverSecrets={ml-driver}",
        "tokenAudiences={sts.amazonaws.com}",
        "tolerations={nvidia.com/gpu,reserved}",
        "priorityClasses={training,high}",
        "queues={team-a}",
    )
)
DRIVER = "system:serviceaccount:mlpipe:mlpipe-driver"


def _chart(namespace: str, *options: str) -> str:
    done = helm(
        "template", "mlpipe", ROOT / "charts/mlpipe", "--namespace", namespace, "--set", TEAM, *options
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def api(api_alone):
    """With both namespaces and their guard-rails; `refused` is what it says of an object."""
    return Api(api_alone)


class Api:
    def __init__(self, control) -> None:
        self._control, self.kubectl = control, control.kubectl
        self.kubectl("create", "-f", manifests_of("jobset") / "config/components/crd/bases")
        crds = manifests_of("trainer") / "manifests/base/crds"
        self.kubectl("create", "-f", crds / "trainer.kubeflow.org_trainjobs.yaml")
        classes = [
            named("scheduling.k8s.io/v1", "PriorityClass", name) | {"value": 1}
            for name in ("training", "mlpipe-high")
        ]
        classes += [named("node.k8s.io/v1", "RuntimeClass", "nvidia") | {"handler": "nvidia"}]
        for namespace, *options in (("mlpipe",), ("ml", "--set", MORE)):
            spec = named("v1", "Namespace", namespace)
            self.kubectl("apply", "-f", "-", stdin=json.dumps(spec))
            text = _chart(namespace, *options)
            for name in ("default", "mlpipe-worker"):  # no controller runs that would make the first
                self.kubectl("create", "serviceaccount", name, "-n", namespace)
            if namespace == "mlpipe":
                old = pod_of(golden("command"))
                old["metadata"] |= {"labels": {}, "name": "old", "finalizers": ["example.com/tracking"]}
                self.kubectl("create", "-n", namespace, "-f", "-", stdin=json.dumps(old))
            self.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=text)
        self.kubectl(
            "create", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": classes})
        )
        bad = pod_of(golden("command"), image="elsewhere.example.com/x")
        for namespace in ("mlpipe", "ml"):  # a policy holds some moments after it was made
            wait_until("the policy", lambda n=namespace: self.refused(bad, n), 30, control.processes[:2])

    def fails(self, *arguments: object, stdin: str = "") -> str:
        with pytest.raises(ClusterError) as told:
            self.kubectl(*arguments, stdin=stdin)
        return str(told.value)

    def refused(self, body, namespace: str = "mlpipe") -> str:
        """By mlpipe's own client, as `submit --dry-run=server` asks; "" when it would be made."""
        with (
            self._control.inside(),
            mock.patch.dict(os.environ, {"KUBECONFIG": str(self._control.kubeconfig)}),
        ):
            try:
                connect(None, namespace).create(body, dry_run=True)
            except ApiError as error:
                if error.kind != "input":
                    raise
                return str(error)
        return ""


def gangs(name: str):
    """All its Jobs or JobSets."""
    return [one for one in manifests.load((GOLDEN / f"{name}.yaml").read_text()) if one["kind"] in GANGS]


def golden(name: str):
    """The one Job or JobSet."""
    (gang,) = gangs(name)
    return gang


def template_of(gang):
    holder = gang["spec"]["replicatedJobs"][0]["template"] if gang["kind"] == "JobSet" else gang
    return holder["spec"]["template"]


def pod_of(gang, **container):
    """What the controllers would make."""
    pod = {"apiVersion": "v1", "kind": "Pod", **copy.deepcopy(template_of(gang))}
    pod["metadata"]["name"] = "pod"
    pod["spec"]["containers"][0] |= container
    return pod


# of Trainer 2.1, `trainjob-2.1` has fields that the 2.2 of this API server calls otherwise
@pytest.mark.parametrize("name", sorted({path.stem for path in GOLDEN.glob("*.yaml")} - {"trainjob-2.1"}))
def test_what_mlpipe_renders_passes(api, name):
    for gang in gangs(name):
        for one in (gang, *made_of(gang)):
            assert api.refused(one, gang["metadata"].get("namespace", "mlpipe")) == ""


def test_the_exporter_passes_with_the_drivers_keys(api):
    image = "registry.example.com/team/mlpipe-cli@sha256:" + "0" * 64
    text = _chart("ml", "--set", f"exporter.enabled=true,exporter.image={image},exporter.store=s3://b/p")
    (found,) = [one for one in manifests.load(text) if one["kind"] == "Deployment"]
    pod = json.dumps(pod_of(found))
    assert "not mlpipe-store" in api.refused(json.loads(pod), "ml")
    assert api.refused(json.loads(pod.replace("mlpipe-store", "ml-driver")), "ml") == ""


def _set(path, value):
    def change(template):
        *folders, last = path
        for key in folders:
            template = template[key] if isinstance(template, list) else template.setdefault(key, {})
        if isinstance(template, list):
            template.append(value)
        elif value is None:
            del template[last]
        else:
            template[last] = value

    return change


def _volume(source):
    return _set(("spec", "volumes", "-"), {"name": "more", **source})


LABELS, SPEC = ("metadata", "labels"), ("spec",)
CONTAINER = (*SPEC, "containers", 0)
OWN, FOREIGN = "registry.example.com/team", "allowed to them, not others"
SECRET = {"name": "T", "valueFrom": {"secretKeyRef": {"name": "others", "key": "token"}}}
TOKEN = {"projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}}
ATTACKS = {
    "no label": (_set((*LABELS, "app.kubernetes.io/managed-by"), None), "carry the labels of mlpipe"),
    "renamed label": (_set((*LABELS, "app.kubernetes.io/managed-by"), "me"), "carry the labels of mlpipe"),
    "no run": (_set((*LABELS, "mlpipe.dev/run"), None), "carry the labels of mlpipe"),
    "the driver's label": (_set((*LABELS, "app.kubernetes.io/component"), "driver"), "not under mlpipe-w"),
    "the driver's account": (_set((*SPEC, "serviceAccountName"), "mlpipe-driver"), "not under mlpipe-driver"),
    "no account": (_set((*SPEC, "serviceAccountName"), None), "not under default"),
    "the token": (_set((*SPEC, "automountServiceAccountToken"), True), "only a driver has a token"),
    "a projected token": (_volume(TOKEN), "only a driver has a token"),
    "image": (_set((*CONTAINER, "image"), "docker.io/x:1"), f"images come from {OWN}, not docker.io/x:1"),
    "image of a longer name": (_set((*CONTAINER, "image"), f"{OWN}-2/x"), f"come from {OWN}, not {OWN}-2/x"),
    "image of another container": (
        _set((*SPEC, "initContainers"), [{"name": "i", "image": "alpine"}]), f"from {OWN}, not alpine"
    ),
    "a foreign secret": (_set((*CONTAINER, "env", "-"), SECRET), FOREIGN),
    "all of a foreign secret": (
        _set((*CONTAINER, "envFrom"), [{"secretRef": {"name": "others"}}]), FOREIGN
    ),
    "a foreign secret's volume": (_volume({"secret": {"secretName": "others"}}), FOREIGN),
    "a foreign secret among others": (
        _volume({"projected": {"sources": [{"secret": {"name": "others"}}]}}), FOREIGN
    ),
    "the node's files": (_volume({"hostPath": {"path": "/"}}), "may not be set, or not to this: volumes"),
    "the node's network": (_set((*SPEC, "hostNetwork"), True), "may not be set, or not to this: hostNetwork"),
    "the node's processes": (_set((*SPEC, "hostPID"), True), "may not be set, or not to this: hostPID"),
    "a node of its choice": (_set((*SPEC, "nodeName"), "node-0"), "may not be set, or not to this: nodeName"),
    "another scheduler": (_set((*SPEC, "schedulerName"), "mine"), "or not to this: schedulerName"),
    "every taint": (_set((*SPEC, "tolerations"), [{"operator": "Exists"}]), "not (of every taint)"),
    "a taint": (_set((*SPEC, "tolerations"), [{"key": "vip", "operator": "Exists"}]), "gpu, not vip"),
    "priority": (_set((*SPEC, "priorityClassName"), "training"), "mlpipe-low, not training"),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_every_way_around_is_refused_in_words(api, name):
    attack, words = ATTACKS[name]
    for gang in (golden("jobset"), golden("indexed-job")):
        attack(template_of(gang))
        assert words in api.refused(gang)
    assert words in api.refused(pod_of(gang))
    said = api.refused(gang)
    assert "ValidatingAdmissionPolicy 'mlpipe-guardrails'" in said


def test_a_driver_starts_no_driver(api):
    """What a pipeline has it create is a worker, under the worker's account."""
    text = json.dumps(golden("driver"))
    command = ("create", "--dry-run=server", "-n", "mlpipe", "-f", "-")
    api.kubectl(*command, stdin=text)
    assert "a driver starts workers, not drivers" in api.fails(*command, f"--as={DRIVER}", stdin=text)
    gang = golden("jobset")  # of whoever: it may be what Trainer makes of a TrainJob
    template = template_of(gang)
    template["metadata"]["labels"]["app.kubernetes.io/component"] = "driver"
    template["spec"]["serviceAccountName"] = "mlpipe-driver"
    assert "a driver starts workers, not drivers" in api.refused(gang)
    api.kubectl(*command, f"--as={DRIVER}", stdin=json.dumps(golden("indexed-job")))


def test_a_token_for_the_store_is_none_for_the_api_server(api):
    gang = golden("everything")
    source = {"path": "token", "audience": "sts.amazonaws.com"}
    _volume({"projected": {"sources": [{"serviceAccountToken": source}]}})(template_of(gang))
    assert api.refused(gang, "ml") == ""
    source["audience"] = "https://kubernetes.default.svc.cluster.local"
    assert "only a driver has a token of the API server" in api.refused(gang, "ml")


def test_every_stage_waits_in_a_queue_that_is_allowed(api):
    gang = golden("everything")
    labels = gang["metadata"]["labels"]
    for name in (None, "team-b"):
        labels["kueue.x-k8s.io/queue-name"] = name or ""
        assert "stages wait in one of the queues team-a" in api.refused(gang, "ml")
    labels |= {"kueue.x-k8s.io/queue-name": "team-a", "kueue.x-k8s.io/priority-class": "urgent"}
    assert "priority classes: training, high, not urgent" in api.refused(gang, "ml")


def test_what_runs_cannot_be_changed_into_what_is_refused(api):
    api.kubectl("create", "-n", "mlpipe", "-f", "-", stdin=json.dumps(pod_of(golden("command"))))
    api.kubectl("label", "pod", "pod", "-n", "mlpipe", "team=a")
    words = api.fails("label", "pod", "pod", "-n", "mlpipe", "app.kubernetes.io/managed-by-")
    assert "carry the labels of mlpipe" in words
    debug = {"spec": {"ephemeralContainers": [{"name": "debug", "image": "alpine"}]}}
    command = ("patch", "pod", "pod", "-n", "mlpipe", "--subresource=ephemeralcontainers", "-p")
    assert "not alpine" in api.fails(*command, json.dumps(debug))
    # of a pod of before the policy, only what it is made of stays: controllers must be able to let it go
    api.kubectl("patch", "pod", "old", "-n", "mlpipe", "-p", '{"metadata": {"finalizers": null}}')
    assert "carry the labels" in api.fails("label", "pod", "old", "-n", "mlpipe", "team=a")


def test_policies_of_the_network_are_what_the_server_takes(api):
    """Exceptions inside their ranges, which the schema alone does not say."""
    halves = "networkPolicy.egress.cidrs={0.0.0.0/1,128.0.0.0/1,::/1,8000::/1,169.0.0.0/8}"
    text = _chart("mlpipe", "--set", halves, "--show-only", "templates/networkpolicies.yaml")
    api.kubectl("apply", "--dry-run=server", "-f", "-", stdin=text)
    outside = re.sub(r'cidr: "128.0.0.0/1"', 'cidr: "0.0.0.0/1"', text)
    assert "must be a strict subset of `cidr`" in api.fails(
        "apply", "--dry-run=server", "-f", "-", stdin=outside
    )


def test_the_overlay_is_the_chart(api):
    text = api.kubectl("kustomize", ROOT / "k8s/overlays/guardrails")
    overlay, chart = (
        {
            one["kind"]: {**one, "metadata": one["metadata"]["name"]}
            for one in found
            if "Validating" in one["kind"]
        }
        for found in (yaml.safe_load_all(text), manifests.load(_chart("mlpipe")))
    )
    assert overlay == chart
    assert len(overlay) == 2
