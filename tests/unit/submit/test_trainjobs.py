"""What is different about a gang that another controller makes a JobSet of."""

from __future__ import annotations

import pytest
from kit.command_runs import until
from kit.rendered import QUICKSTART, pipeline_of, plan_of

from mlpipe.render.kubernetes import stage_objects
from mlpipe.render.names import QUEUE
from mlpipe.store.folder import FolderStore
from mlpipe.submit.kubernetes import availability
from mlpipe.submit.kubernetes.api import ApiError
from mlpipe.submit.kubernetes.gang import Gang
from mlpipe.submit.kubernetes.objects import clear, server_dry_run
from mlpipe.submit.kubernetes.pending import why_pending

pytestmark = pytest.mark.unit
FORM = ("kubernetes.form=trainjob", "kubernetes.trainjob={runtime: mlpipe}")
PLAN = plan_of(pipeline_of("quickstart", *QUICKSTART, *FORM), "train")
TRAINJOB = stage_objects(PLAN)[-1]
NAME, LABELS = TRAINJOB["metadata"]["name"], TRAINJOB["metadata"]["labels"]


def event(server, kind, name, reason, message):
    body = {"involvedObject": {"kind": kind, "name": name}, "type": "Warning", "reason": reason}
    server.put("events", {"metadata": {"name": f"{name}.{reason}"}, "message": message, **body})


def test_its_restarts_are_told_by_its_pods(server, api, tmp_path, monkeypatch):
    monkeypatch.setattr("mlpipe.submit.kubernetes.gang._NOTE_SECONDS", 0.0)
    gang = Gang(FolderStore(tmp_path), api, PLAN)
    made = until(lambda: server.objects.get(("trainjobs", NAME)), "the TrainJob")
    labels = {**LABELS, "jobset.sigs.k8s.io/restart-attempt": "2"}
    for name in ("w-0", "w-1"):
        metadata = {"name": name, "uid": name, "labels": labels}
        server.put("pods", {"metadata": metadata, "spec": {}, "status": {"phase": "Running"}})
    until(lambda: gang.note() == "restarted 2 times", "the note")
    for name in ("w-0", "w-1"):
        server.drop("pods", name)
    conditions = [{"type": "Failed", "status": "True", "reason": "FailedJobs"}]
    server.put("trainjobs", {**made, "status": {"conditions": conditions}})
    assert until(gang.poll, "its end").message == f"TrainJob {NAME} failed: left no word"


def test_what_trainer_made_is_left_to_go_with_it(server, api, monkeypatch):
    """A JobSet that goes first would be made again."""
    asked = []
    request = api.request

    def noted(method, path, **more):
        asked.append(
            (method, path.rpartition("/apis/")[2], (more.get("body") or {}).get("propagationPolicy"))
        )
        return request(method, path, **more)

    monkeypatch.setattr(api, "request", noted)
    server.put("trainjobs", TRAINJOB)
    owner = {"kind": "TrainJob", "name": NAME, "uid": "u", "controller": True}
    owned = {"name": NAME, "labels": LABELS, "ownerReferences": [owner]}
    server.put("jobsets", {"metadata": owned})
    clear(api, PLAN.run_id, timeout_seconds=60.0)
    deleted = [(path, policy) for method, path, policy in asked if method == "DELETE"]
    assert deleted == [(f"trainer.kubeflow.org/v1alpha1/namespaces/ml/trainjobs/{NAME}", "Background")]


def test_why_it_has_no_pods(server, api):
    server.put("trainjobs", {**TRAINJOB, "status": {}})
    assert why_pending(api, LABELS) == ""
    of_jobset = {"jobset.sigs.k8s.io/jobset-name": NAME}  # Trainer 2.1 gives the Job no labels of ours
    server.put("jobs", {"metadata": {"name": f"{NAME}-node-0", "labels": of_jobset}, "spec": {}})
    event(server, "Job", f"{NAME}-node-0", "FailedCreate", "pods are forbidden: exceeded quota: a")
    assert f"Job {NAME}-node-0 lacks pods: pods are forbidden: exceeded quota: a" in why_pending(api, LABELS)
    server.put("jobsets", {"metadata": {"name": NAME, "labels": LABELS}, "spec": {}})
    event(server, "JobSet", NAME, "JobCreationFailed", "admission webhook says no")
    assert why_pending(api, LABELS) == f"JobSet {NAME} lacks pods: admission webhook says no"
    said = "TrainJob resources reconciliation failed: clusterTrainingRuntime not found"
    event(server, "TrainJob", NAME, "TrainJobResourcesCreationFailed", said)
    assert why_pending(api, LABELS).startswith(f"TrainJob {NAME} lacks pods: {said}")


def test_in_a_queue_it_waits_as_a_jobset_does(server, api):
    """Admitted by Kueue, which has it created suspended; what it would take is known before."""
    plan = plan_of(pipeline_of("quickstart", *QUICKSTART, *FORM, "kubernetes.queue=team-a"), "train")
    trainjob = stage_objects(plan)[-1]
    assert (trainjob["spec"]["suspend"], trainjob["metadata"]["labels"][QUEUE]) == (True, "team-a")
    made = server.put("trainjobs", {**trainjob, "status": {}})
    workload = {"name": "w", "labels": {"kueue.x-k8s.io/job-uid": made["metadata"]["uid"]}}
    condition = {"type": "QuotaReserved", "status": "False", "message": "LocalQueue team-a doesn't exist"}
    server.put("workloads", {"metadata": workload, "status": {"conditions": [condition]}})
    told = f"TrainJob {NAME} is suspended: Kueue: LocalQueue team-a doesn't exist; "
    assert why_pending(api, LABELS).startswith(told)
    (pods,) = availability._pods([trainjob])
    assert (pods.number, pods.queue, pods.requests["cpu"]) == (2, "team-a", 1.0)


@pytest.mark.parametrize("older", [False, True])
def test_pods_that_trainer_would_make_are_counted(older):
    field = "{runtime: mlpipe, overrides: podTemplateOverrides}" if older else "{runtime: mlpipe}"
    more = (f"kubernetes.trainjob={field}", "kubernetes.node_selector={pool: a}")
    trainjob = stage_objects(plan_of(pipeline_of("quickstart", *QUICKSTART, *FORM, *more), "train"))[-1]
    (pods,) = availability._pods([trainjob])
    assert (pods.number, pods.queue, pods.spec["nodeSelector"]) == (2, None, {"pool": "a"})
    assert pods.requests["memory"] == 4 * 2**30


def test_a_cluster_without_trainer_is_refused_before_anything_runs(server, api):
    server.missing.add("trainjobs")
    with pytest.raises(ApiError, match="this cluster has no Kubeflow Trainer 2") as caught:
        server_dry_run(api, stage_objects(PLAN))
    assert caught.value.kind == "input"


def test_a_field_of_another_trainer_is_to_be_refused(server, api):
    """By the real API server, where it is not told to it drops the field."""
    server_dry_run(api, stage_objects(PLAN))
    (asked,) = [one for one in server.requests if one.startswith("POST") and "/trainjobs" in one]
    assert "fieldValidation=Strict" in asked
