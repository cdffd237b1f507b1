"""A real Prometheus over a real run of two pods, found as the chart's PodMonitor says; then one is killed.

There is no Prometheus operator here, and Debian's Prometheus cannot ask an API server: what those do with the
PodMonitor that the chart renders is done by `kit.prometheus.of_pod_monitor`. The pods, their addresses and
ports, the exporter's Deployment, the scrapes, the queries and the rules are real.
"""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest
from kit import boards, helm, manifests
from kit.place import ROOT
from kit.prometheus import build, has_data, of_pod_monitor, prometheus
from kit.undisturbed import ranks

from mlpipe._core.files import write_whole

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
RUN = "scraped-20261121-100000-ab12"


def _chart(place) -> dict[str, dict]:
    values = {
        "podMonitor.enabled": "true",
        "exporter.enabled": "true",
        "exporter.image": place.cluster.image.by_digest,
        "exporter.store": place.environment["MLPIPE_STORE"],
        "exporter.endpoint": place.cluster.minio.endpoint,
        "exporter.intervalSeconds": "2",
    }
    sets = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    crd = "monitoring.coreos.com/v1/PodMonitor"
    done = helm.helm(
        "template",
        "mlpipe",
        ROOT / "charts" / "mlpipe",
        "--namespace",
        place.namespace,
        "--api-versions",
        crd,
        *sets,
    )
    assert done.returncode == 0, done.stderr
    return {one["kind"]: one for one in manifests.load(done.stdout)}


def test_every_query_has_data_and_a_killed_worker_raises_its_alert(place, tmp_path):
    try:
        build()
        helm.binary()
    except helm.ServerMissingError as error:
        pytest.skip(str(error))
    chart = _chart(place)
    spec = place.spec(
        "scraped",
        model={"entry": "kit.paced:build_model", "args": {"seconds": 0.1}},
        steps=100_000,
        checkpoint={"every": "20 steps", "keep": 2},
        validate={"every": "20 steps", "max_tokens": 256},
        resources={"price_usd_per_gpu_hour": 2.5},
        kubernetes={"max_gang_restarts": 0},
    )
    built_by = {"BUILD_TAG": "jenkins-scraped-17", "BUILD_URL": "https://jenkins.example.com/job/scraped/17/"}
    place.environment |= built_by
    place.submit(spec, RUN)
    for name in built_by:
        del place.environment[name]
    place.until_step(RUN, 20)
    place.cluster.apply(chart["Deployment"])

    def targets() -> list[dict[str, Any]]:
        """Of both ranks and the exporter, once all of them have addresses."""
        pods = place.cluster.get(f"/api/v1/namespaces/{place.namespace}/pods")["items"]
        found = of_pod_monitor(chart["PodMonitor"], pods)
        return found if len(found) == 3 else []

    found = place.until("the pods' addresses", targets)
    with place.cluster.inside(), prometheus(tmp_path / "prometheus", rules=boards.RULES) as server:
        write_whole(server.targets, json.dumps(found))

        def needs(expr: str) -> None:
            place.until(f"data from {expr}", lambda: has_data(server, expr))

        needs(f'mlpipe_checkpoint_duration_seconds_count{{run="{RUN}"}} > 1')
        for query in [*boards.queries(), *boards.events()]:
            if not (query.gpu_only or query.of_some or query.only_failed) and "ALERTS" not in query.expr:
                needs(query.filled(run=RUN))
        for rule in boards.rules():
            if "record" in rule:
                needs(rule["record"])
            elif rule["alert"] not in boards.GPU_ONLY_ALERTS | boards.ONLY_FAILED_ALERTS:
                needs(boards.without_threshold(rule["expr"]))
        # each pod is a target by its own name, on its node; nothing else is scraped
        pods = {pod["metadata"]["name"]: pod["spec"]["nodeName"] for pod in place.worker_pods(RUN)}
        assert len(pods) == 2
        told = {
            one["metric"]["pod"]: one["metric"] for one in server.query(f'mlpipe_run_info{{run="{RUN}"}}')
        }
        assert {pod: labels["node"] for pod, labels in told.items()} == pods
        assert {labels["namespace"] for labels in told.values()} == {place.namespace}
        assert server.firing(RUN) == {}

        victim = next(pid for pid, rank, _, _ in ranks(RUN) if rank == 1)
        os.kill(victim, signal.SIGKILL)
        place.until("an alert about the run", lambda: server.firing(RUN))
        assert set(server.firing(RUN)) == {"MlpipeJobFailed"}
        alert = server.firing(RUN)["MlpipeJobFailed"]
        assert (alert["stage"], alert["cause"]) == ("train", "infrastructure")
    place.cluster.kubectl("delete", "deployment", "mlpipe-exporter", "-n", place.namespace)
