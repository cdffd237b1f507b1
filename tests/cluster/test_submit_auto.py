"""`mlpipe submit --to auto` between this machine and a real cluster."""

from __future__ import annotations

import json

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


def test_a_run_goes_to_the_cluster_once_that_says_that_it_has_room(place):
    """Before, nobody knows when it would begin there. Of equals the first one is taken, which it is."""
    spec = place.spec("auto", model={"entry": "none"})
    document = json.loads(spec.read_text())
    resources = {"cpus": 0.1, "memory": "256 MiB"}
    document["stages"] = [{"name": "c", "command": ["true"], "resources": resources}]
    spec.write_text(json.dumps(document))
    places = place.folder / "places.json"
    listed = [{"name": "cluster", "backend": "kubernetes"}, {"name": "here", "backend": "local"}]
    places.write_text(json.dumps({"version": 1, "places": listed}))
    argv = ["submit", spec, "--to", "auto", "--places", places, "--run-id", "auto"]
    asked = place.json(*argv, "--dry-run")
    assert asked["chosen"] == "here"
    assert [one["cannot"] for one in asked["places"]] == [None, None]
    assert asked["places"][0]["wait"] == "you may not list its nodes and their pods"
    role = f"{place.namespace}-lists"
    person = f"--serviceaccount={place.namespace}:person"
    place.cluster.kubectl("create", "clusterrole", role, "--verb=list", "--resource=nodes,pods")
    place.cluster.kubectl("create", "clusterrolebinding", role, f"--clusterrole={role}", person)
    try:
        place.until("the role", lambda: place.json(*argv, "--dry-run")["chosen"] == "cluster")
        place.mlpipe(*argv, "--wait")
    finally:
        place.cluster.kubectl("delete", "clusterrolebinding,clusterrole", role)
    state = place.run_state("auto")
    assert (state.backend, state.state) == ("kubernetes", "done")
    # without the right as before, it goes on where it is
    said = place.mlpipe(*argv).stderr
    assert "run auto is there, at kubernetes: it goes on where it is" in " ".join(said.split())
