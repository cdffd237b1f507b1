"""Requests to an API server that is away, overloaded, cut off, or says no: a stand-in on a real socket."""

from __future__ import annotations

import json
import threading
import time

import pytest
from kit.apiserver import NAMESPACE, TOKEN, ApiServer, Fault
from kit.command_runs import until
from kit.rendered import QUICKSTART, pipeline_of, plan_of

from mlpipe._core import retry
from mlpipe._core.errors import SubmitError
from mlpipe.render.kubernetes import stage_objects
from mlpipe.render.names import PIPELINE_DIGEST, SPEC_DIGEST, VERSION
from mlpipe.store.folder import FolderStore
from mlpipe.submit.kubernetes import api as cluster_api
from mlpipe.submit.kubernetes import config as cluster_config
from mlpipe.submit.kubernetes.api import ApiError, connect, is_away
from mlpipe.submit.kubernetes.gang import Gang
from mlpipe.submit.kubernetes.objects import create_all, server_dry_run

pytestmark = pytest.mark.unit
BUSY = Fault("status", 429, "too many requests", {"Retry-After": "0"})


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(cluster_api, "_REQUEST_SECONDS", 5.0)
    monkeypatch.setattr(cluster_api, "_GONE_SECONDS", 0.3)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


def job(name: str = "a", digest: str = "1", kind: str = "Job") -> dict:
    versions = {"Job": "batch/v1", "JobSet": "jobset.x-k8s.io/v1alpha2"}
    return {
        "apiVersion": versions.get(kind, "v1"),
        "kind": kind,
        "metadata": {"name": name, "annotations": {SPEC_DIGEST: digest}, "labels": {"run": "r"}},
    }


def gang() -> list[dict]:
    return [job("plan", kind="ConfigMap"), job("a", kind="Service"), job("a", kind="JobSet")]


def posts(server: ApiServer) -> int:
    return sum(request.startswith("POST") for request in server.requests)


# What is wrong before any request


def test_the_context_and_the_namespace_come_from_the_kubeconfig(api, server, tmp_path, monkeypatch):
    assert (api.host, api.context, api.namespace) == (server.url, "test", NAMESPACE)
    assert connect(namespace="other").namespace == "other"
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path, namespace=None)))
    assert connect("test").namespace == "default"


def test_an_unknown_context_is_told_with_those_that_there_are(api):
    with pytest.raises(SubmitError, match="no context 'prod'") as caught:
        connect("prod")
    assert (caught.value.kind, caught.value.hint) == ("input", "it has test")


BROKEN = {
    "absent": None,
    "empty": "",
    "no YAML": "users: [{token: " + TOKEN + "\n  - :",
    "a list": "- " + TOKEN,
    "no clusters": '{"contexts": [{"name": "test"}], "current-context": "test", "users": []}',
    "of another type": '{"contexts": 7, "current-context": "test"}',
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_kubeconfig_that_is_none_is_bad_input_and_is_not_shown(case, tmp_path, monkeypatch):
    path = tmp_path / "config"
    if BROKEN[case] is not None:
        path.write_text(BROKEN[case])
    monkeypatch.setenv("KUBECONFIG", str(path))
    with pytest.raises(SubmitError) as caught:
        connect()
    assert caught.value.kind == "input"
    assert TOKEN not in str(caught.value)


def test_a_login_program_that_is_not_there_is_told_before_anything_is_asked(tmp_path, monkeypatch, server):
    path = server.kubeconfig(tmp_path)
    asks = {"apiVersion": "client.authentication.k8s.io/v1", "command": "no-such-login", "args": [TOKEN]}
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"users": [{"name": "u", "user": {"exec": asks}}]})
    )
    monkeypatch.setenv("KUBECONFIG", str(path))
    with pytest.raises(SubmitError, match=r"login program.*no-such-login") as caught:
        connect()
    assert caught.value.kind == "input"
    assert TOKEN not in str(caught.value)
    assert server.requests == []


def test_in_a_pod_its_own_token_is_used(tmp_path, monkeypatch, server):
    from kubernetes.config import incluster_config

    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "namespace").write_text(NAMESPACE + "\n")
    (tmp_path / "ca.crt").write_text("certificate")
    monkeypatch.setattr(cluster_config, "_NAMESPACE_FILE", tmp_path / "namespace")
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    with pytest.raises(ApiError, match="no safe connection") as caught:  # the certificate is none
        connect().list("Pod")
    assert caught.value.kind == "input"
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    with pytest.raises(SubmitError, match="no Kubernetes configuration"):
        connect()


# What the server says


SAYS_NO = {
    "401": (Fault("status", 401, "Unauthorized"), "input", r"does not know you \(401\)", "log in again"),
    "422": (
        Fault("status", 422, 'Job "a" is invalid: spec.parallelism: must be >= 0'),
        "input",
        r"cannot create Job a in namespace ml \(422\): Job \"a\" is invalid: spec.parallelism",
        "",
    ),
    "quota": (
        Fault("status", 403, 'jobs "a" is forbidden: exceeded quota: mlpipe, requested: count/jobs.batch=1'),
        "infrastructure",
        "no room to create Job a",
        "wait for other runs",
    ),
    "webhook": (
        Fault("status", 403, 'admission webhook "policy.example.com" denied the request: no owner label'),
        "input",
        "no owner label",
        "",
    ),
    "302": (Fault("page", 302), "input", r"\(302\): an answer that is no JSON", ""),
}


@pytest.mark.parametrize("case", SAYS_NO)
def test_a_refusal_is_told_at_once(api, server, case):
    fault, kind, words, hint = SAYS_NO[case]
    server.inject("POST", "/jobs", fault)
    with pytest.raises(ApiError, match=words) as caught:
        api.create(job())
    assert caught.value.kind == kind
    assert hint in (caught.value.hint or "")
    assert posts(server) == 1
    assert ("jobs", "a") not in server.objects


def test_a_missing_right_names_the_role_to_ask_for(api, server):
    server.denied.add("create jobs")
    with pytest.raises(ApiError, match=r"you may not create Job a in namespace ml \(403\)") as caught:
        api.create(job())
    assert (caught.value.kind, "k8s/base" in caught.value.hint) == ("input", True)


def test_a_missing_namespace_and_a_missing_crd_are_told_apart(server, api):
    server.missing.add("jobsets")
    with pytest.raises(ApiError, match=r"this cluster has no JobSet") as caught:
        api.create(job(kind="JobSet"))
    assert "form: indexed-job" in caught.value.hint
    assert api.get("JobSet", "a") is None
    with pytest.raises(ApiError, match="this cluster has no JobSet"):
        api.list("JobSet")
    server.missing.clear()
    with pytest.raises(ApiError, match='namespaces "none" not found') as caught:
        connect(namespace="none").create(job(kind="JobSet"))
    assert "kubectl create namespace none" in caught.value.hint
    assert caught.value.kind == "input"


# What passes


PASSES = {
    "429": BUSY,
    "500": Fault("status", 500, "etcdserver: leader changed"),
    "503 of a proxy": Fault("page", 503),
    "reset": Fault("reset"),
    "cut": Fault("cut"),
    "lost answer": Fault("lose"),
}


@pytest.mark.parametrize("case", PASSES)
def test_a_fault_that_passes_makes_one_object(api, server, case):
    server.inject("POST", "/jobs", PASSES[case], times=2)
    found, new = api.create_or_adopt(job())
    assert found["metadata"]["uid"] == server.objects["jobs", "a"]["metadata"]["uid"]
    assert new  # also where the second POST met the first's object
    server.inject("GET", "/jobs", PASSES[case], times=2)
    assert [one["metadata"]["name"] for one in api.list("Job")] == ["a"]
    server.inject("DELETE", "/jobs", PASSES[case], times=1)
    api.delete("Job", "a")
    assert not any(kind == "jobs" for kind, _ in server.objects)


@pytest.mark.parametrize("case", [case for case in PASSES if case != "lost answer"])
def test_one_that_does_not_pass_is_told_at_the_deadline(api, server, case):
    server.inject("GET", "/jobs", PASSES[case], times=1000)
    with pytest.raises(ApiError) as caught:
        api.list("Job")
    assert caught.value.kind == "infrastructure"
    assert len(server.requests) > 2
    assert "\n" not in caught.value.message


def test_retry_after_is_obeyed_up_to_the_deadline(api, server, clock):
    server.inject("GET", "/jobs", Fault("status", 429, "slow down", {"Retry-After": "7"}), times=1)
    api.list("Job")
    assert clock.pauses == [pytest.approx(0.3)]


def test_a_server_that_is_away_is_waited_for_and_then_told(api, server, monkeypatch):
    server.away()
    with pytest.raises(ApiError, match=f"the API server {server.url} cannot be reached") as caught:
        api.list("Job")
    assert caught.value.kind == "infrastructure"
    assert "Connection refused" in caught.value.message
    assert "HTTPConnection" not in caught.value.message
    monkeypatch.setattr(cluster_api, "DEADLINE_SECONDS", 300.0)
    monkeypatch.setattr(retry, "time", time)
    threading.Timer(0.2, server.back).start()
    assert api.list("Job") == []


def test_no_server_at_that_name_and_no_trust_in_it(tmp_path, monkeypatch, server):
    path = server.kubeconfig(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(path))
    text = path.read_text()
    path.write_text(text.replace(server.url, server.url.replace("http", "https")))
    with pytest.raises(ApiError) as caught:
        connect().list("Job")
    assert (caught.value.kind, "no safe connection" in caught.value.message) == ("input", True)
    path.write_text(text.replace(server.url, "http://[nonsense"))
    with pytest.raises(SubmitError) as wrong:
        connect().list("Job")
    assert wrong.value.kind == "input"


# Create or adopt


def test_one_that_is_there_is_adopted_if_it_is_the_same(api, server):
    assert api.create_or_adopt(job())[1] is True
    assert api.create_or_adopt(job())[1] is False
    with pytest.raises(SubmitError, match="Job a exists and was made from another spec") as caught:
        api.create_or_adopt(job(digest="2"))
    assert caught.value.kind == "input"
    server.objects["jobs", "a"]["metadata"]["annotations"] = None  # somebody else's
    with pytest.raises(SubmitError, match="another spec"):
        api.create_or_adopt(job())


def test_what_another_version_made_of_the_same_pipeline_is_adopted(api, server):
    """It may render the same pipeline differently."""

    def made(version: str, pipeline: str, digest: str) -> dict:
        annotations = {SPEC_DIGEST: digest, PIPELINE_DIGEST: pipeline}
        return job() | {"metadata": {"name": "a", "annotations": annotations, "labels": {VERSION: version}}}

    api.create_or_adopt(made("1.0", "p", "1"))
    assert api.create_or_adopt(made("1.1", "p", "2"))[1] is False
    for other in (made("1.1", "q", "2"), made("1.0", "p", "2")):
        with pytest.raises(SubmitError, match="another spec"):
            api.create_or_adopt(other)


def test_one_that_is_being_deleted_is_waited_for(api, server, monkeypatch):
    server.held.add("a")
    api.create_or_adopt(job())
    api.delete("Job", "a")
    with pytest.raises(SubmitError, match="still being deleted after") as caught:
        api.create_or_adopt(job())
    assert caught.value.kind == "infrastructure"
    monkeypatch.setattr(cluster_api, "_GONE_SECONDS", 30.0)
    threading.Timer(0.1, lambda: server.objects.pop(("jobs", "a"))).start()
    assert api.create_or_adopt(job(digest="2"))[1] is True


def test_two_clients_at_once_make_one_gang(server, api):
    clients = [connect() for _ in range(8)]
    threads = [threading.Thread(target=create_all, args=(one, gang())) for one in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    made = sorted(key for key in server.objects if key[0] != "namespaces")
    assert made == [("configmaps", "plan"), ("jobsets", "a"), ("services", "a")]
    uid = server.objects["jobsets", "a"]["metadata"]["uid"]
    for kind, name in made:
        if kind != "jobsets":
            owner = server.objects[kind, name]["metadata"]["ownerReferences"]
            assert [one["uid"] for one in owner] == [uid]


@pytest.mark.parametrize("broken", ["configmaps", "services", "jobsets"])
@pytest.mark.parametrize("answers", ["lost", "heard"])
def test_all_or_nothing(api, server, broken, answers):
    made: list[dict] = []
    if answers == "lost":  # of all that was sent before; the one that is not heard of is there
        for plural in ("configmaps", "services", "jobsets"):
            server.inject("POST", f"/{plural}", Fault("lose"), times=1)
        server.inject("POST", f"/{broken}", Fault("status", 503), times=1000)
        with pytest.raises(SubmitError) as away:
            create_all(api, gang(), made)
        assert is_away(away.value)
        assert [key for key in server.objects if key[0] == broken]
        server.faults.clear()
        server.denied.add("patch services")
    else:
        server.inject("POST", f"/{broken}", Fault("status", 422, "invalid"), times=1000)
    with pytest.raises(SubmitError):
        create_all(api, gang(), made)
    assert [key for key in server.objects if key[0] != "namespaces"] == []


def test_what_a_quota_refuses_and_is_there_is_adopted(api, server):
    """The server looks at quotas before it looks whether the name is taken."""
    create_all(api, gang())
    uid = server.objects["jobsets", "a"]["metadata"]["uid"]
    server.inject("POST", "/jobsets", Fault("status", 403, "exceeded quota: count/jobsets=1"), times=1000)
    create_all(api, gang())
    assert server.objects["jobsets", "a"]["metadata"]["uid"] == uid


def stage_of(api, tmp_path, monkeypatch) -> Gang:
    monkeypatch.setattr("mlpipe.submit.kubernetes.gang._POLL_SECONDS", 0.02)
    return Gang(FolderStore(tmp_path), api, plan_of(pipeline_of("quickstart", *QUICKSTART), "corpus"))


def test_a_server_that_is_away_while_a_stage_is_created_is_waited_for(api, server, tmp_path, monkeypatch):
    """Longer than the deadline of a request."""
    server.away()
    handle = stage_of(api, tmp_path, monkeypatch)
    until(lambda: handle.note() or handle.poll(), "the word on it")
    assert (handle.poll(), "cannot be reached" in handle.note()) == (None, True)
    server.back()
    until(
        lambda: {kind for kind, _ in server.objects} == {"namespaces", "configmaps", "jobs"},
        "its objects",
    )
    until(lambda: handle.note() == "", "no word on it")
    server.drop("jobs", handle._name)
    until(handle.poll, "its end")
    assert "somebody deleted Job" in handle.poll().message


def test_a_stage_that_is_stopped_while_the_server_is_away_leaves_nothing(api, server, tmp_path, monkeypatch):
    server.inject("POST", "/configmaps", Fault("lose"), times=1)
    server.inject("POST", "/configmaps", Fault("status", 503), times=1000)
    handle = stage_of(api, tmp_path, monkeypatch)
    until(lambda: handle.note() or handle.poll(), "the word on it")
    assert {kind for kind, _ in server.objects} == {"namespaces", "configmaps"}
    handle.terminate()
    until(handle.poll, "its end")
    assert handle.poll().state == "cancelled"
    assert {kind for kind, _ in server.objects} == {"namespaces"}


def test_what_another_made_is_not_rolled_back(api, server):
    api.create_or_adopt(gang()[0])
    server.missing.add("jobsets")
    with pytest.raises(SubmitError, match="no JobSet"):
        create_all(api, gang())
    assert [key for key in server.objects if key[0] != "namespaces"] == [("configmaps", "plan")]


def test_a_dry_run_makes_nothing(api, server):
    plan = plan_of(pipeline_of("quickstart", *QUICKSTART), "train")
    server_dry_run(api, stage_objects(plan))
    assert [request.split("/")[-1].partition("?")[0] for request in server.requests] == [
        "configmaps",
        "jobsets",
        "jobs",
        "pods",
    ]
    assert [key for key in server.objects if key[0] != "namespaces"] == []
    assert all(request.endswith("dryRun=All") for request in server.requests)


def test_a_job_that_jobset_could_not_make_is_refused(api, server):
    objects = stage_objects(plan_of(pipeline_of("quickstart", *QUICKSTART), "train"))
    server.inject("POST", "/jobs", Fault("status", 422, "spec.podFailurePolicy is invalid"))
    with pytest.raises(SubmitError, match="podFailurePolicy is invalid") as raised:
        server_dry_run(api, objects)
    assert raised.value.where == "stage 'train'"


# Lists


def test_lists_come_in_pages(api, server):
    server.page = 3
    for number in range(8):
        api.create(job(f"j{number}"))
    assert len(api.list("Job", {"run": "r"})) == 8
    assert len(api.list("Job", {"run": "other"})) == 0
    assert sum("continue=" in request for request in server.requests) == 2


def test_pages_that_grew_too_old_are_listed_anew(api, server):
    server.page = 3
    for number in range(8):
        api.create(job(f"j{number}"))
    expired = Fault("status", 410, "The provided continue parameter is too old")
    server.inject("GET", "continue=3", expired)
    assert [one["metadata"]["name"] for one in api.list("Job")] == [f"j{number}" for number in range(8)]
    server.inject("GET", "/jobs", expired)
    with pytest.raises(ApiError, match="too old"):
        api.list("Job")


# Credentials


def test_the_token_is_sent_and_never_told(api, server, monkeypatch, capfd):
    api.list("Job")
    assert server.headers[-1]["authorization"] == f"Bearer {TOKEN}"
    words = []
    for fault in (*PASSES.values(), *(case[0] for case in SAYS_NO.values())):
        server.inject("POST", "/jobs", fault, times=1)
        monkeypatch.setattr(cluster_api, "DEADLINE_SECONDS", 0.0)
        with pytest.raises(ApiError) as caught:
            api.create(job())
        words.append(f"{caught.value!s} {caught.value!r}")
        server.objects.pop(("jobs", "a"), None)
    out, err = capfd.readouterr()
    assert TOKEN not in "".join([*words, out, err, repr(api), repr(vars(api)["_pool"])])


def test_a_token_is_read_again_when_the_kubeconfig_says_how_to_get_it(server, tmp_path, monkeypatch):
    """An exec plugin, as all clouds have: asked once more when what it gave has expired."""
    import json

    path = server.kubeconfig(tmp_path)
    plugin = tmp_path / "plugin"
    status = {"token": TOKEN, "expirationTimestamp": "2020-01-01T00:00:00Z"}
    answer = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": status}
    plugin.write_text(f"#!/bin/sh\necho asked >> {tmp_path}/asked\ncat <<'E'\n{json.dumps(answer)}\nE\n")
    plugin.chmod(0o755)
    body = json.loads(path.read_text())
    version = answer["apiVersion"]
    user = {"apiVersion": version, "command": str(plugin), "interactiveMode": "Never"}
    body["users"][0]["user"] = {"exec": user}
    path.write_text(json.dumps(body))
    monkeypatch.setenv("KUBECONFIG", str(path))
    api = connect()
    api.list("Job")
    api.list("Job")
    assert (tmp_path / "asked").read_text().count("asked") >= 2
