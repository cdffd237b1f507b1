"""The image of Containerfile.cli, built, pushed, pulled: the driver and a command stage run in it."""

from __future__ import annotations

import json

import pytest
from kit import image
from kit.servers import ServerMissingError

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
RUNTIME = "image"  # see kit/cluster_node.py
AT_MOST_BYTES = 150e6
SAYS = "mlpipe --version; id; touch /opt/mlpipe/new || echo read-only; touch /tmp/new && echo writable"


@pytest.fixture(scope="module")
def pushed(place, tmp_path_factory):
    """(Built, its name by digest, bytes to pull)"""
    try:
        built = image.build()
    except ServerMissingError as error:
        pytest.skip(str(error))
    return built, *image.push(built, place.cluster, tmp_path_factory.mktemp("registry"))


def test_the_image_is_slim_and_a_change_of_the_code_is_its_last_small_layer(pushed):
    built, _, pulled_bytes = pushed
    assert sum(built.layers_bytes) <= AT_MOST_BYTES
    assert pulled_bytes < sum(built.layers_bytes) / 2
    assert built.layers_bytes[-1] < sum(built.layers_bytes) / 16


def test_driver_and_command_run_in_the_image_and_workers_in_theirs(place, hold, pushed):
    _, name, _ = pushed
    runtime = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": RUNTIME}}
    place.cluster.apply({**runtime, "handler": RUNTIME})

    def patch(container: str, **target: str) -> dict[str, object]:
        pod = {"runtimeClassName": RUNTIME, "containers": [{"name": container, "image": name}]}
        return {"target": {"kind": "Pod", **target}, "strategic": {"spec": pod}}

    patches = [patch("driver", component="driver"), patch("worker", stage="look")]
    spec = place.spec("image", model=hold.model, nodes=1, kubernetes={"patches": patches})
    document = json.loads(spec.read_text())
    document["stages"].insert(0, {"name": "look", "command": ["sh", "-c", SAYS]})
    document["stages"][1]["needs"] = ["look"]
    spec.write_text(json.dumps(document))
    place.submit(spec, "image", "--wait")
    said = place.mlpipe("logs", "image", "--stage", "look").stdout
    for line in ("mlpipe 0.", "uid=10001(mlpipe)", "read-only", "writable"):
        assert line in said
    ran = {
        pod["spec"]["containers"][0]["name"]: pod["status"]["containerStatuses"][0]["imageID"]
        for pod in place.objects("pods", "image")
    }
    assert ran["driver"] == name
