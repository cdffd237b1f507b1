"""`mlpipe status` says why stages wait, in a real cluster's words: each reason provoked and read back."""

from __future__ import annotations

import json

import pytest
from kit.place import quick_driver

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
THING = "mlpipe.test/thing"
TAINT = "mlpipe.test/reserved"
# what changes without news of pods, as a quota, is looked at sooner than after 20 s
QUICK = quick_driver({"mlpipe.submit.kubernetes.gang:_NOTE_AGAIN_SECONDS": 3.0})


def pod(stage: str, **changes: object) -> dict[str, object]:
    return {"target": {"kind": "Pod", "stage": stage, "component": "worker"}, **changes}


def container(**changes: object) -> dict[str, object]:
    return {"spec": {"containers": [{"name": "worker", **changes}]}}


# stage -> what its file says of resources, a patch of its pods, and the words of the status
STAGES: dict[str, tuple[dict[str, object], dict[str, object] | None, str]] = {
    "cores": ({"cpus": 500}, None, "Insufficient cpu"),
    "gpus": ({"gpus_per_node": 8, "gpu": "H100-80GB"}, None, "no such node: look at resources.gpu"),
    "claim": (
        {},
        pod(
            "claim",
            strategic={
                "spec": {"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "none"}}]}
            },
        ),
        "make the claim",
    ),
    "secret": (
        {},
        pod("secret", strategic=container(envFrom=[{"secretRef": {"name": "none"}}])),
        'secret "none" not found',
    ),
    "image": (
        {},
        pod("image", strategic=container(image="registry.invalid/none:1")),
        "image 'registry.invalid/none:1' cannot be pulled",
    ),
    "selector": (
        {},
        pod("selector", strategic={"spec": {"nodeSelector": {"disk": "fast"}}}),
        "look at resources.gpu and kubernetes.node_selector",
    ),
    "taint": (
        {},
        pod("taint", json=[{"op": "remove", "path": "/spec/tolerations"}]),
        "add the nodes' taint to kubernetes.tolerations",
    ),
    "security": (
        {},
        pod("security", strategic=container(securityContext={"allowPrivilegeEscalation": True})),
        "violates PodSecurity",
    ),
    "quota": (
        {},
        pod("quota", strategic=container(resources={"limits": {THING: 1}, "requests": {THING: 1}})),
        "have the namespace's quota raised",
    ),
}


def patches() -> list[dict[str, object]]:
    return [QUICK, *(patch for _, patch, _ in STAGES.values() if patch is not None)]


def test_status_says_why_each_stage_waits(place, hold):
    """One run whose stages all wait, for different reasons."""
    cluster, path = place.cluster, place.spec("waits", model=hold.model, nodes=1)
    document = json.loads(path.read_text())
    (stage,) = document["stages"]
    document["stages"] = [
        {**stage, "name": name, "resources": {**stage["resources"], **resources}}
        for name, (resources, _, _) in STAGES.items()
    ]
    document["kubernetes"] |= {
        "patches": patches(),
        "tolerations": [{"key": TAINT}],
    }
    path.write_text(json.dumps(document))
    # what can never run is refused before anything runs
    refused = place.mlpipe("submit", path, "--to", "kubernetes", "--run-id", "waits", code=2).stderr
    assert "stage 'security'" in refused
    assert "violates PodSecurity" in refused
    assert "look at kubernetes.patches" in refused
    assert place.objects("jobs,pods,configmaps", "waits") == []
    del STAGES["security"]
    document["stages"] = [one for one in document["stages"] if one["name"] != "security"]
    document["kubernetes"]["patches"] = patches()
    path.write_text(json.dumps(document))
    cluster.kubectl("create", "quota", "things", "-n", place.namespace, f"--hard=requests.{THING}=0")
    cluster.kubectl("taint", "nodes", "--all", f"{TAINT}=yes:NoSchedule")
    try:
        place.submit(path, "waits")

        def told() -> bool:
            nonlocal found
            stages = place.json("status", "waits")["stages"]
            found = {name: stages[name]["message"] for name in STAGES}
            return all(words in found[name] for name, (_, _, words) in STAGES.items())

        found: dict[str, str] = {}
        try:
            place.until("all reasons", told, 240)
        except Exception as error:
            raise AssertionError(json.dumps(found, indent=1)) from error
        place.mlpipe("cancel", "waits")
        assert place.objects("pods", "waits", **{"app.kubernetes.io/component": "worker"}) == []
    finally:
        cluster.kubectl("taint", "nodes", "--all", f"{TAINT}-")
        cluster.kubectl("delete", "quota", "things", "-n", place.namespace)


def test_an_image_that_is_not_there_is_told_of_the_driver(place, hold):
    """Nor can it be fetched ahead: what would do so goes with the run."""
    spec = place.spec("no-image", model=hold.model, kubernetes={"prepull": True})
    document = json.loads(spec.read_text())
    document["stages"].append({"name": "next", "command": ["true"], "needs": ["train"]})
    spec.write_text(json.dumps(document))
    missing = "registry.invalid/none@sha256:" + "0" * 64
    place.submit(spec, "no-image", "--set", f"image={missing}")
    place.until(
        "the reason", lambda: "cannot be pulled" in str(place.json("status", "no-image")["waits_for"]), 120
    )
    place.cluster.kubectl("-n", place.namespace, "delete", "job", "no-image-driver")
    assert "nobody drives it: its Job is gone" in place.mlpipe("status", "no-image").stdout
    (pulls,) = place.objects("jobs", "no-image")
    assert pulls["status"]["active"] == 1
    place.mlpipe("cancel", "no-image")
    assert place.objects("jobs,pods", "no-image") == []
