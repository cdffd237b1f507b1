"""A namespace set up as docs/how-to/cluster-setup.md says, and a person who may submit there, no more."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlencode

from kit.cluster import Cluster
from kit.cluster_process import NO_PROXY
from kit.helm import helm
from kit.run_ids import claim_named
from kit.servers import ACCESS_KEY, SECRET_KEY
from kit.warm import Popen

from mlpipe.store import runs
from mlpipe.store.base import Store
from mlpipe.store.open import open_store
from mlpipe.store.s3_policy import policy

ROOT = Path(__file__).parents[2]
BUCKET = "ml-runs"
STEPS = 24
RUN_SECONDS = 600  # of a run of seconds, on a machine that others use, too
_GROUPS = {
    "pods": "/api/v1",
    "configmaps": "/api/v1",
    "jobs": "/apis/batch/v1",
    "jobsets": "/apis/jobset.x-k8s.io/v1alpha2",
    "trainjobs": "/apis/trainer.kubeflow.org/v1alpha1",
}
_FLUSHED = {"mlpipe.store.s3_log:FLUSH_SECONDS": 1.0}  # what a test looks for in the store
_IDLE = {"GOMP_SPINCOUNT": "0", "OPENBLAS_NUM_THREADS": "1"}  # as of the tests themselves: tests/conftest.py


def shortened(seconds: dict[str, float]) -> dict[str, str]:
    """The environment of a process of mlpipe with these constants (`kit/shortened`)."""
    paths = (ROOT / "tests", ROOT / "tests/kit/shortened")
    return {"PYTHONPATH": ":".join(map(str, paths)), "KIT_SHORTENED": json.dumps(seconds)}


def quick_driver(seconds: dict[str, float]) -> dict[str, Any]:
    """A patch of the pipeline file, for what waits in the driver's pod."""
    env = [{"name": name, "value": value} for name, value in shortened(seconds).items()]
    spec = {"spec": {"containers": [{"name": "driver", "env": env}]}}
    return {"target": {"kind": "Pod", "component": "driver"}, "strategic": spec}


def training(
    model: dict[str, Any], resources: dict[str, Any], *, env: dict[str, str] | None = None, **changes: Any
) -> dict[str, Any]:
    """The stage `train` of a model of the kit, on data that need no files. `changes`: of the training."""
    train = {
        "model": {**model, "seq_len": 32},
        "data": {"entry": "kit.models:numbers", "batch_size": 8},
        "steps": STEPS,
        "strategy": "ddp",
        "deterministic": True,
        "precision": "fp32",
        "max_restarts": 0,
        "checkpoint": {"every": "4 steps", "keep": 20},
        **changes,
    }
    environment = {**_IDLE, **shortened(_FLUSHED), **(env or {})}
    return {"name": "train", "train": train, "resources": resources, "env": environment}


class Place:
    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.namespace = f"ml-{secrets.token_hex(4)}"
        overlay = folder / "overlay"
        overlay.mkdir()
        base = os.path.relpath(ROOT / "k8s" / "base", overlay)
        (overlay / "kustomization.yaml").write_text(f"namespace: {self.namespace}\nresources: [{base}]\n")
        cluster.kubectl("apply", "--server-side", "-k", overlay)
        for arguments in (
            f"create secret generic mlpipe-store --from-literal=AWS_ACCESS_KEY_ID={ACCESS_KEY} "
            f"--from-literal=AWS_SECRET_ACCESS_KEY={SECRET_KEY}",
            "create serviceaccount person",
            f"create rolebinding person --role=mlpipe-submitter --serviceaccount={self.namespace}:person",
        ):
            cluster.kubectl("-n", self.namespace, *arguments.split())
        self.environment = {
            **cluster.minio.environment(),
            "KUBECONFIG": str(cluster.kubeconfig_for("person", self.namespace)),
            "MLPIPE_STORE": f"s3://{BUCKET}/{self.namespace}",
            "MLPIPE_CACHE": str(folder / "cache"),
        }

    def policies(self) -> None:
        """The store's, of tokens of the namespace's workers and drivers."""
        with self.cluster.inside():
            for who in ("worker", "driver"):
                document = policy(self.environment["MLPIPE_STORE"], who)
                self.cluster.minio.add_policy(
                    f"system:serviceaccount:{self.namespace}:mlpipe-{who}", document
                )

    def guard(self, image: str) -> None:
        """The chart's guard-rails over the namespace, for pods of this image."""
        options = {"enabled": "true", "images": f"{{{image}}}", "tokenAudiences": "{sts.amazonaws.com}"}
        self.chart(
            "guardrails", "--set", ",".join(f"guardrails.{key}={value}" for key, value in options.items())
        )

    def chart(self, template: str, *options: str) -> None:
        """Applies one of the chart's, for the namespace."""
        done = helm(
            "template",
            self.namespace,  # as the release, too: a policy is the cluster's, and has its name
            ROOT / "charts/mlpipe",
            *("--namespace", self.namespace, "--show-only", f"templates/{template}.yaml"),
            *options,
        )
        assert done.returncode == 0, done.stderr
        self.cluster.kubectl("apply", "--server-side", "-f", "-", stdin=done.stdout)

    def secret(self, name: str, who: Literal["worker", "driver"], run_id: str | None = None) -> str:
        """A Secret with keys of a user of that policy; its name."""
        with self.cluster.inside():
            document = policy(self.environment["MLPIPE_STORE"], who, run_id)
            found = self.cluster.minio.add_user(f"{self.namespace}-{name}", document)
        keys = (f"--from-literal={key}={value}" for key, value in found.items() if "_KEY" in key)
        self.cluster.kubectl("-n", self.namespace, "create", "secret", "generic", name, *keys)
        return name

    # What the person does.

    def mlpipe(self, *arguments: object, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        """The command line, to its end; checks the exit code (None: any)."""
        claim_named(arguments)
        argv = [sys.executable, "-m", "mlpipe.cli", *map(str, arguments)]
        process = Popen(
            "cli",
            argv,
            network=self.cluster.network,
            env={**os.environ, **NO_PROXY, **self.environment},
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            out, err = process.communicate(timeout=RUN_SECONDS)
        finally:
            process.kill()
        if code is not None and process.returncode != code:
            text = f"mlpipe {' '.join(argv[3:])} exited {process.returncode}"
            raise AssertionError(f"{text}\n{out}\n{err}\n{self.pods()}")
        return subprocess.CompletedProcess(argv, process.returncode, out, err)

    def start(self, *arguments: object, **env: str) -> subprocess.Popen[bytes]:
        """The command line, left running, with these variables; nobody reads what it says."""
        claim_named(arguments)
        return self.cluster.popen(
            [sys.executable, "-m", "mlpipe.cli", *arguments],
            env={**self.environment, **env},
            cwd=self.folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def json(self, *arguments: object, code: int | None = 0) -> Any:
        return json.loads(self.mlpipe(*arguments, "--output", "json", code=code).stdout)

    def submit(self, spec: Path, run_id: str, *arguments: object, code: int | None = 0) -> str:
        """Standard error, where progress is told."""
        argv = ["submit", spec, "--to", "kubernetes", "--run-id", run_id, *arguments]
        return self.mlpipe(*argv, code=code).stderr

    # What it works with.

    def spec(self, name: str, *, model: dict[str, Any], nodes: int = 2, **changes: Any) -> Path:
        """One training stage of a model of the kit, on data that need no files. `changes`: of the training,
        but for `kubernetes`, `resources` and `env`."""
        cluster = {"store": {"endpoint": self.cluster.minio.endpoint}, **changes.pop("kubernetes", {})}
        resources = {"nodes": nodes, "cpus": 0.25, "memory": "2 GiB", **changes.pop("resources", {})}
        stage = training(model, resources, **changes)
        document = {
            "version": 1,
            "name": name,
            "image": self.cluster.image.by_digest,
            "kubernetes": cluster,
            "stages": [stage],
        }
        path = self.folder / f"{name}.yaml"
        path.write_text(json.dumps(document, indent=1))  # JSON is YAML enough
        return path

    def store(self) -> Store:
        """To be used within `cluster.inside()`."""
        for name in ("AWS_ENDPOINT_URL_S3", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
            os.environ[name] = self.environment[name]
        return open_store(self.environment["MLPIPE_STORE"])

    def run_state(self, run_id: str) -> runs.RunState:
        with self.cluster.inside():
            return runs.read_run(self.store(), run_id)

    def last_step(self, run_id: str, stage: str = "train", attempt: int = 1) -> int:
        from mlpipe._core.records import Step
        from mlpipe.observe.records import read_records

        with self.cluster.inside():
            key = f"runs/{run_id}/stages/{stage}/attempt-{attempt}"
            found = read_records(self.store(), key, 0)
        return max((record.step for record in found if isinstance(record, Step)), default=0)

    def until(self, what: str, check: Callable[[], Any], seconds: float = 300) -> Any:
        return self.cluster.wait_until(what, check, seconds)

    def until_step(self, run_id: str, step: int, attempt: int = 1) -> None:
        self.until(f"step {step} of {run_id}", lambda: self.last_step(run_id, attempt=attempt) >= step)

    def objects(self, kind: str, run_id: str, **labels: str) -> list[dict[str, Any]]:
        """`kind`: one or several, with commas, as kubectl takes them; asked of the API server itself, since
        tests do so again and again."""
        wanted = {"mlpipe.dev/run": run_id, **labels}
        query = urlencode({"labelSelector": ",".join(f"{key}={value}" for key, value in wanted.items())})
        found: list[dict[str, Any]] = []
        for one in kind.split(","):
            page = self.cluster.get(f"{_GROUPS[one]}/namespaces/{self.namespace}/{one}?{query}")
            assert page is not None, f"the API server lists no {one}"
            found += ({"kind": page["kind"].removesuffix("List"), **item} for item in page["items"])
        return found

    def worker_pods(self, run_id: str) -> list[dict[str, Any]]:
        found = self.objects("pods", run_id, **{"mlpipe.dev/stage": "train"})
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def pods(self) -> str:
        return self.cluster.kubectl("-n", self.namespace, "get", "pods", "-o", "wide")


def add_queue(place: Place, name: str, **flavor: Any) -> str:
    """The chart's, with two priorities, in the newest version of Kueue's API that is served here."""
    served = place.cluster.get("/apis/kueue.x-k8s.io")
    assert served["preferredVersion"]["version"] == "v1beta2"
    known = [f"--api-versions={one['groupVersion']}/ClusterQueue" for one in served["versions"]]
    priorities = {"low": 1, "high": 1000, "mlpipe-low": None, "mlpipe-high": None}
    values = {"enabled": True, "name": name, "priorities": priorities, "flavors": [{"name": name, **flavor}]}
    place.chart("kueue", "--set-json", f"kueue={json.dumps(values)}", *known)
    return name
