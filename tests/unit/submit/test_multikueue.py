"""A gang that MultiKueue has another cluster run; of real ones: tests/cluster/test_submit_multikueue.py."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
from kit.apiserver import ApiServer, Fault
from kit.command_runs import until
from kit.rendered import QUICKSTART, pipeline_of, plan_of

from mlpipe._core.errors import SubmitError
from mlpipe.render import kubernetes
from mlpipe.render.kubernetes import stage_objects
from mlpipe.render.names import PLAN as ANNOTATION
from mlpipe.render.pod import PLAN_FOLDER
from mlpipe.store.folder import FolderStore
from mlpipe.store.outcome import AttemptOutcome, write_outcome
from mlpipe.submit.handle import outcome_keys
from mlpipe.submit.kubernetes.api import DEADLINE_SECONDS, ApiError
from mlpipe.submit.kubernetes.gang import Gang
from mlpipe.submit.kubernetes.objects import clear, server_dry_run
from mlpipe.submit.kubernetes.pending import why_pending

pytestmark = pytest.mark.unit
QUEUE = "kubernetes.queue=team-a"


def of(*changes: str):
    return plan_of(pipeline_of("quickstart", *QUICKSTART, *changes), "train")


PLAN = of(QUEUE)
JOBSET = stage_objects(PLAN)[-1]
NAME = JOBSET["metadata"]["name"]
READY = {"replicatedJobsStatus": [{"name": "worker", "ready": 1}]}


def marked(gang, **spec):
    """As Kueue's webhook and MultiKueue leave it."""
    return {**gang, "spec": {**gang["spec"], "managedBy": "kueue.x-k8s.io/multikueue", **spec}}


def test_what_a_queue_may_send_elsewhere_is_the_gang_and_nothing_else(monkeypatch):
    """Its pods find the plan where others find a ConfigMap's."""
    (jobset,) = stage_objects(PLAN)
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    (volume,) = (one for one in pod["spec"]["volumes"] if one["name"] == "plan")
    (item,) = volume["downwardAPI"]["items"]
    assert item == {
        "path": "plan.json",
        "fieldRef": {"fieldPath": f"metadata.annotations['{ANNOTATION}']"},
    }
    mounts = {one["name"]: one["mountPath"] for one in pod["spec"]["containers"][0]["volumeMounts"]}
    assert mounts["plan"] == PLAN_FOLDER
    assert json.loads(pod["metadata"]["annotations"][ANNOTATION]) == json.loads(PLAN.to_json())
    whole = "json: [{op: add, path: /metadata/annotations, value: {a: b}}]"
    (jobset,) = stage_objects(of(QUEUE, f"kubernetes.patches=[{{target: {{kind: Pod}}, {whole}}}]"))
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    assert pod["metadata"]["annotations"].keys() == {"a", ANNOTATION}
    of_config = "kubernetes.patches=[{target: {kind: ConfigMap}, strategic: {metadata: {labels: {a: b}}}}]"
    assert [one["kind"] for one in stage_objects(of(QUEUE, of_config))] == ["ConfigMap", "JobSet"]
    monkeypatch.setattr(kubernetes, "MAX_IN_POD_BYTES", len(PLAN.to_json()) - 1)
    assert [one["kind"] for one in stage_objects(PLAN)] == ["ConfigMap", "JobSet"]


@pytest.mark.parametrize(
    ("changes", "stays"),
    [
        ((), None),
        (("kubernetes.form=trainjob", "kubernetes.trainjob={runtime: mlpipe}"), "ConfigMap"),
        (("kubernetes.form=indexed-job",), "ConfigMap, Service"),
    ],
    ids=["JobSet", "TrainJob", "Job"],
)
def test_a_stage_that_needs_more_than_its_gang_is_refused(server, api, monkeypatch, changes, stays):
    create = api.create

    def sent(body, **more):
        made = create(body, **more)
        return marked(made) if body["kind"] in ("TrainJob", "JobSet", "Job") else made

    monkeypatch.setattr(api, "create", sent)
    if stays is None:
        server_dry_run(api, stage_objects(of(QUEUE)))
        return
    with pytest.raises(SubmitError, match=f"not the stage's {stays}\n") as refused:
        server_dry_run(api, stage_objects(of(QUEUE, *changes)))
    assert (refused.value.kind, refused.value.where) == ("input", "train")


def test_worker_clusters_that_the_kubeconfig_knows_are_asked_for_what_the_pods_name(
    server, api, tmp_path, monkeypatch
):
    """By the names that their manager has for them; of a cluster that nobody knows nothing is asked."""
    create = api.create
    monkeypatch.setattr(
        api,
        "create",
        lambda body, **more: marked(made) if (made := create(body, **more))["kind"] == "JobSet" else made,
    )
    server.put("localqueues", {"metadata": {"name": "team-a"}, "spec": {"clusterQueue": "all"}})
    server.put("clusterqueues", {"metadata": {"name": "all"}, "spec": {"admissionChecks": ["check"]}})
    check = {"controllerName": "kueue.x-k8s.io/multikueue", "parameters": {"name": "workers"}}
    server.put("admissionchecks", {"metadata": {"name": "check"}, "spec": check})
    server.put("multikueueconfigs", {"metadata": {"name": "workers"}, "spec": {"clusters": ["west", "far"]}})
    with ApiServer() as west:
        path = Path(os.environ["KUBECONFIG"])
        document = json.loads(path.read_text())
        document["clusters"].append({"name": "w", "cluster": {"server": west.url}})
        document["contexts"].append({"name": "west", "context": {"cluster": "w", "user": "u"}})
        path.write_text(json.dumps(document))
        objects = stage_objects(of(QUEUE, "kubernetes.env_from=[{secret: token}, {config_map: flags}]"))
        with pytest.raises(SubmitError, match="cluster west, which lacks ConfigMap flags, Secret") as refused:
            server_dry_run(api, objects)
        assert refused.value.kind == "input"
        for kind, name in (("secrets", "token"), ("secrets", "mlpipe-store"), ("configmaps", "flags")):
            west.put(kind, {"metadata": {"name": name}})
        with pytest.raises(SubmitError, match="cluster west, which lacks LocalQueue team-a"):
            server_dry_run(api, objects)
        west.put("localqueues", {"metadata": {"name": "team-a"}})
        server_dry_run(api, objects)
        assert ("jobsets", NAME) not in west.objects
        west.inject("POST", "/pods", Fault("status", 403, 'serviceaccount "mlpipe-worker" not found'))
        with pytest.raises(SubmitError, match="mlpipe-worker") as refused:
            server_dry_run(api, objects)
        assert (refused.value.where, refused.value.hint) == (
            "cluster west",
            "apply k8s/base (docs/how-to/cluster-setup.md)",
        )
        west.denied |= {"create jobsets", "get secrets", "get configmaps"}
        server_dry_run(api, objects)
    for name in ("east", "south"):
        document["clusters"].append({"name": name, "cluster": {"server": f"http://{name}.invalid"}})
        document["contexts"].append({"name": name, "context": {"cluster": name, "user": "u"}})
    path.write_text(json.dumps(document))
    workers = {"clusters": ["west", "far", "east", "south"]}
    server.put("multikueueconfigs", {"metadata": {"name": "workers"}, "spec": workers})
    together, said = threading.Barrier(3, timeout=60), []

    def away(there, _):
        assert there.deadline_seconds < DEADLINE_SECONDS
        together.wait()  # each while the others are asked
        raise ApiError(f"{there.context} is away", status=0, kind="infrastructure")

    monkeypatch.setattr("mlpipe.submit.kubernetes.objects.server_dry_run", away)
    server_dry_run(api, objects, said.append)
    assert said == [
        f"MultiKueue's cluster {name} was not asked what it would refuse: {name} is away"
        for name in ("west", "east", "south")
    ]


def workload(server, made, **status):
    metadata = {"name": "w", "labels": {"kueue.x-k8s.io/job-uid": made["metadata"]["uid"]}}
    server.put("workloads", {"metadata": metadata, "status": status})


def test_where_it_was_sent_is_told_and_one_that_is_taken_back_goes_on_as_another_attempt(
    server, api, tmp_path, monkeypatch
):
    """Once all that ran there have said that they ended: they may be saving."""
    monkeypatch.setattr("mlpipe.submit.kubernetes.gang._NOTE_SECONDS", 0.0)
    store = FolderStore(tmp_path)
    gang = Gang(store, api, PLAN)
    made = until(lambda: server.objects.get(("jobsets", NAME)), "the JobSet")
    check = {"name": "workers", "state": "Pending", "message": ""}
    workload(server, made, admissionChecks=[check], nominatedClusterNames=["east", "west"])
    server.put("jobsets", marked(made))
    labels = made["metadata"]["labels"]
    words = "Kueue: its admission check workers is Pending: not yet admitted by east, west"
    told = why_pending(api, {"mlpipe.dev/run": labels["mlpipe.dev/run"]})
    assert told == f"JobSet {NAME} is suspended: {words}"
    workload(server, made, clusterName="west")
    server.put("jobsets", marked(made, suspend=False))
    until(lambda: gang.note().startswith("MultiKueue sent it to cluster west, where not all"), "the note")
    server.put("jobsets", {**marked(made, suspend=False), "status": READY})
    until(lambda: gang.note() == "MultiKueue sent it to cluster west", "the note")
    server.put("jobsets", marked(made))
    until(lambda: ("jobsets", NAME) not in server.objects, "its end")
    first, second = outcome_keys(PLAN)
    write_outcome(store, second, AttemptOutcome("saved", kind="cancelled"))
    until(lambda: gang._sent._unheard == [first], "it is heard")
    assert gang.poll() is None
    write_outcome(store, first, AttemptOutcome("saved", kind="cancelled"))
    ended = until(gang.poll, "its end")
    assert (ended.state, ended.lost, ended.kind) == ("failed", True, "infrastructure")
    assert ended.message == "MultiKueue took it back from cluster west"


def test_one_in_a_cluster_that_nobody_reaches_is_given_up_when_it_has_had_its_time(server, api, tmp_path):
    """Done is what is said to be done until then."""
    for is_done in (False, True):
        store = FolderStore(tmp_path / str(is_done))
        gang = Gang(store, api, PLAN)
        made = until(lambda: server.objects.get(("jobsets", NAME)), "the JobSet")
        server.put("jobsets", {**marked(made, suspend=False), "status": READY})
        until(lambda run=gang: run._sent.ran, "it runs")
        gang._sent._grace_seconds = 0.0
        if is_done:
            write_outcome(store, outcome_keys(PLAN)[0], AttemptOutcome("done"))
        server.put("jobsets", marked(made))
        ended = until(gang.poll, "its end")
        assert (ended.state, ended.lost) == (("done", False) if is_done else ("failed", True))


@pytest.mark.parametrize("is_ready", [True, False])
def test_one_that_is_cancelled_has_saved_when_it_has_ended(server, api, tmp_path, is_ready):
    """There is nothing to wait for before all its pods run."""
    store = FolderStore(tmp_path)
    gang = Gang(store, api, PLAN)
    made = until(lambda: server.objects.get(("jobsets", NAME)), "the JobSet")
    server.put("jobsets", {**marked(made, suspend=False), "status": READY if is_ready else {}})
    until(lambda: gang._sent.ran, "it runs")
    gang.terminate()
    if not is_ready:
        assert until(gang.poll, "its end").message == "stopped before a checkpoint could be saved"
        return
    until(lambda: ("jobsets", NAME) not in server.objects, "its end")
    for key in outcome_keys(PLAN):
        assert gang.poll() is None
        write_outcome(store, key, AttemptOutcome("saved", message="saved step 7"))
    assert until(gang.poll, "its end").message == "saved step 7"


@pytest.mark.parametrize("is_ready", [True, False])
def test_a_cancel_without_a_driver_waits_for_what_is_elsewhere(server, api, monkeypatch, is_ready):
    monkeypatch.setattr("mlpipe.submit.kubernetes.objects._POLL_SECONDS", 0.01)
    listed = {key: value for key, value in JOBSET.items() if key not in ("apiVersion", "kind")}
    server.put("jobsets", {**marked(listed, suspend=False), "status": READY if is_ready else {}})
    said = iter([False, True])
    clear(api, PLAN.run_id, timeout_seconds=60.0, have_said=lambda: next(said))
    assert next(said, None) == (None if is_ready else False)
    assert ("jobsets", NAME) not in server.objects
