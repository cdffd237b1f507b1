"""`mlpipe doctor --for kubernetes` against a stand-in API server: each thing that a cluster can lack."""

from __future__ import annotations

import pytest
from kit.apiserver import TOKEN, ApiServer, Fault
from kit.command_runs import Cli

from mlpipe.cli.doctor import store_findings
from mlpipe.cli.session import CliSession
from mlpipe.submit.kubernetes import KubernetesBackend
from mlpipe.submit.kubernetes import api as cluster_api
from mlpipe.submit.submission import Finding

pytestmark = pytest.mark.unit
GOOD = [
    "config",
    "server",
    "jobset",
    "kueue",
    "rights",
    "reasons",
    "namespace",
    "mlpipe-driver",
    "mlpipe-worker",
]


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster_api, "DEADLINE_SECONDS", 0.2)
    with ApiServer() as one:
        labels = {"pod-security.kubernetes.io/enforce": "restricted"}
        one.put("namespaces", {"metadata": {"name": "ml", "labels": labels}})
        for name in ("mlpipe-driver", "mlpipe-worker"):
            one.put("serviceaccounts", {"metadata": {"name": name}})
        monkeypatch.setenv("KUBECONFIG", str(one.kubeconfig(tmp_path)))
        yield one


def findings(folder, context=None, namespace=None) -> dict[str, Finding]:
    session = CliSession()
    session.store_url = str(folder / "store")
    backend = KubernetesBackend({"context": context, "namespace": namespace})
    return {found.name: found for found in backend.doctor(store_findings(session))}


def test_a_cluster_that_has_all(server, tmp_path):
    found = findings(tmp_path)
    assert list(found) == [*GOOD, "store", "disk"]
    assert {one.level for one in found.values()} == {"ok"}
    assert found["config"].detail == "context test, namespace ml"
    assert found["server"].detail == f"v1.36.3 at {server.url}"
    assert "restricted; no room for kubernetes.rdma" in found["namespace"].detail
    assert all(request.startswith(("GET", "POST /apis/authorization")) for request in server.requests)


def lose_namespace(server):
    del server.objects["namespaces", "ml"]


LACKS = {
    "jobset": (lambda server: server.missing.add("jobsets"), "jobset", "warn", "indexed-job"),
    "a right": (lambda server: server.denied.add("create jobs"), "rights", "fail", "mlpipe-submitter"),
    "a useful right": (lambda server: server.denied.add("list events"), "reasons", "warn", "status"),
    "namespace": (lose_namespace, "namespace", "fail", "k8s/base"),
    "pod security": (
        lambda server: server.objects["namespaces", "ml"]["metadata"].pop("labels"),
        "namespace",
        "warn",
        "kubectl label namespace ml pod-security.kubernetes.io/enforce=restricted",
    ),
    "driver": (
        lambda server: server.objects.pop(("serviceaccounts", "mlpipe-driver")),
        "mlpipe-driver",
        "fail",
        "kubernetes.driver_service_account",
    ),
    "worker": (
        lambda server: server.objects.pop(("serviceaccounts", "mlpipe-worker")),
        "mlpipe-worker",
        "fail",
        "kubernetes.service_account",
    ),
}


@pytest.mark.parametrize("case", LACKS)
def test_each_thing_that_it_lacks_has_its_remedy(server, tmp_path, case):
    take, name, level, remedy = LACKS[case]
    take(server)
    found = findings(tmp_path)
    assert (found[name].level, remedy in found[name].remedy) == (level, True)
    assert {one.level for key, one in found.items() if key != name} == {"ok"}


def test_a_cluster_without_kueue_is_fit_for_those_who_name_no_queue(server, tmp_path):
    assert findings(tmp_path)["kueue"].detail == "installed, v1beta2"
    server.missing.add("workloads")
    found = findings(tmp_path)["kueue"]
    assert (found.level, found.detail) == ("ok", "none; a pipeline file that names a `queue` is refused")


def test_what_a_submitter_may_not_look_at_is_no_fault(server, tmp_path):
    server.denied |= {"get namespaces", "get serviceaccounts"}
    found = findings(tmp_path)
    assert {one.level for one in found.values()} == {"ok"}
    assert "not known" in found["namespace"].detail


def test_without_a_configuration_or_a_server_nothing_more_is_asked(server, tmp_path, monkeypatch):
    found = findings(tmp_path, context="prod")
    assert (list(found), found["config"].level) == (["config"], "fail")
    assert "it has test" in found["config"].remedy
    assert "hint" not in found["config"].detail  # which is the remedy, and said once
    server.inject("GET", "/version", Fault("status", 401, "Unauthorized"))
    found = findings(tmp_path)
    assert (list(found), found["server"].level) == (["config", "server"], "fail")
    server.away()
    found = findings(tmp_path)
    assert (list(found), found["server"].level) == (["config", "server"], "fail")
    assert "cannot be reached" in found["server"].detail


def test_the_command_exits_0_or_4_and_never_tells_the_token(server, tmp_path):
    cli = Cli(tmp_path)
    done = cli("doctor", "--for", "kubernetes")
    assert "ok    server         v1.36.3" in done.stdout
    server.missing.add("jobsets")
    assert cli.json("doctor", "--for", "kubernetes")["usable"] is True
    server.denied.add("create jobs")
    refused = cli("doctor", "--for", "kubernetes", "--namespace", "ml", code=4)
    assert "you may not create jobs in ml" in refused.stdout
    assert TOKEN not in "".join([done.stdout, done.stderr, refused.stdout, refused.stderr])
    assert "--for kubernetes" in cli("doctor", "--context", "x", code=2).stderr
