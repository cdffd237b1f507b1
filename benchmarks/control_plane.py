"""`python -m benchmarks.control_plane`: what many runs cost the API server and the client.

The API server is a real one, with fake nodes (kwok). Counted, not timed: fake pods run when kwok comes to it.
At each size so many runs have been submitted by the real client; the stages of the latest hundred of them are
created, watched and ended by the driver's own code, twenty at a time. Needs root on Linux and what
`make cluster-build` builds.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import measure

ROOT = Path(__file__).parents[1]
SIZES, QUICK_SIZES = (100, 300, 1000), (3, 6)
NUM_NODES, QUICK_NODES = 20, 3
FOLLOWED = 100  # of each size: what more would cost, they show
AT_ONCE = 20  # gangs that one process drives
SECONDS = 1200.0  # of one part, on a busy machine
STORE = "s3://ml-runs/scale"


def run_id(number: int) -> str:
    return f"scale-{number:04d}"


# What runs within the cluster's network, as a person or as a driver


def submit(spec: str, first: int, last: int) -> dict[str, float]:
    from mlpipe.cli.app import run_app

    for number in range(first, last):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
            try:
                run_app(["submit", spec, "--to", "kubernetes", "--run-id", run_id(number), "--store", STORE])
            except SystemExit as ended:
                if ended.code:
                    raise RuntimeError(said.getvalue()) from None
    return memory()


def follow(spec: str, first: int, last: int) -> dict[str, float]:
    """Nobody runs in a fake pod: the outcome that its launcher would leave is put there beforehand."""
    from mlpipe.plan.ahead import plan_ahead
    from mlpipe.spec.load import load_pipeline
    from mlpipe.store.open import open_store
    from mlpipe.submit.kubernetes.api import connect
    from mlpipe.submit.kubernetes.gang import Gang

    pipeline, store, api = load_pipeline(spec), open_store(STORE), connect()
    outcome = {"outcome": "done", "kind": None, "message": "", "exit_code": 0, "time": time.time()}

    def drive(number: int) -> None:
        plan = plan_ahead(pipeline, "work", store.url, run_id(number), cluster=True)
        store.put(f"{plan.attempt_key}/outcome.json", json.dumps(outcome).encode())
        gang, deadline = Gang(store, api, plan), time.monotonic() + SECONDS
        while (ended := gang.poll()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{plan.run_id} has not ended: {gang.note()}")
            time.sleep(0.2)
        if ended.state != "done":
            raise RuntimeError(f"{plan.run_id}: {ended}")

    with ThreadPoolExecutor(AT_ONCE) as pool:
        for future in [pool.submit(drive, number) for number in range(first, last)]:
            future.result()
    return memory()


def memory() -> dict[str, float]:
    return {"peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


PARTS = {"submit": submit, "follow": follow}


# What stands outside


class Scale:
    def __init__(self, running: Any, folder: Path) -> None:
        from kit.place import BUCKET, Place

        running.make_bucket(BUCKET)
        self.place, self.running, self.folder = Place(running, folder), running, folder
        running.kubectl("-n", self.place.namespace, "delete", "quota", "--all")
        self.spec = folder / "scale.yaml"
        stage = {"name": "work", "command": ["true"], "resources": {"cpus": 0.1, "memory": "128 MiB"}}
        cluster = {
            "store": {"endpoint": running.minio.endpoint},
            "node_selector": {"type": "kwok"},
            "tolerations": [{"key": "kwok.x-k8s.io/node"}],
        }
        body = {"version": 1, "name": "scale", "image": running.image.by_digest, "stages": [stage]}
        self.spec.write_text(json.dumps({**body, "store": STORE, "kubernetes": cluster}))

    def part(self, name: str, account: str, first: int, last: int) -> dict[str, Any]:
        """Of the API: requests a run, by verb; of the process: its memory."""
        kubeconfig = self.running.kubeconfig_for(account, self.place.namespace, 4 * 3600)
        environment = {**self.place.environment, "KUBECONFIG": str(kubeconfig), "PYTHONPATH": str(ROOT)}
        before = len(self.running.control.requests(account))
        command = [sys.executable, "-m", "benchmarks.control_plane", "--part", name, str(self.spec)]
        done = self.running.run(
            [*command, str(first), str(last)], env=environment, timeout=SECONDS, cwd=self.folder
        )
        if done.returncode:
            raise RuntimeError(done.stderr)
        asked = Counter(one.partition(" ")[0] for one in self.running.control.requests(account)[before:])
        each = {verb: count / (last - first) for verb, count in sorted(asked.items())}
        return {**json.loads(done.stdout), "requests_per_run": sum(each.values()), "by_verb": each}

    def listed(self, expected: int) -> dict[str, float]:
        """`mlpipe list`, the quickest of three."""
        found = []
        for _ in range(3):
            process = self.running.popen(
                [sys.executable, "-m", "mlpipe.cli", "list", "--store", STORE, "--output", "json"],
                env=self.place.environment, cwd=self.folder, stdout=subprocess.PIPE,
            )  # fmt: skip
            assert process.stdout is not None
            document = json.loads(process.stdout.read())
            _, _, used = os.wait4(process.pid, 0)
            assert len(document["runs"]) == expected, f"{len(document['runs'])} runs, not {expected}"
            found.append((used.ru_utime + used.ru_stime, used.ru_maxrss / 1024))
        return {"cpu_seconds": min(found)[0], "peak_mib": min(one[1] for one in found)}


def rows_of(sizes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for one in sizes:
        work = f"control plane, {one['runs']:,} runs"
        for part in ("submit", "follow"):
            count = [one[part]["requests_per_run"]]
            rows.append(measure.alone(work, f"{part}: API requests a run", "1", count))
            rows.append(measure.alone(work, f"{part}: memory", "MiB", [one[part]["peak_mib"]]))
        rows.append(measure.alone(work, "list: CPU time", "s", [one["list"]["cpu_seconds"]]))
        rows.append(measure.alone(work, "list: memory", "MiB", [one["list"]["peak_mib"]]))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few runs: does it run at all?")
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    parser.add_argument("--part", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        name, spec, first, last = arguments.part
        print(json.dumps(PARTS[name](spec, int(first), int(last))))
        return 0
    sys.path.insert(0, str(ROOT / "tests"))
    from kit.cluster import cluster

    sizes, num_nodes = (QUICK_SIZES, QUICK_NODES) if arguments.quick else (SIZES, NUM_NODES)
    found, load_before = [], os.getloadavg()[0]
    with (
        tempfile.TemporaryDirectory() as folder,
        cluster(Path(folder), jobset=False, fake_nodes=num_nodes) as running,
    ):
        scale = Scale(running, Path(folder))
        empty = scale.listed(0)
        for first, last in zip((0, *sizes), sizes, strict=False):
            row = {
                "runs": last,
                "submit": scale.part("submit", "person", first, last),
                "follow": scale.part("follow", "mlpipe-driver", max(first, last - FOLLOWED), last),
                "list": scale.listed(last),
            }
            found.append(row)
            print(json.dumps(row), flush=True)
            # after each: the largest takes long
            body = measure.document(
                rows_of(found), sizes=found, list_without_runs=empty, followed=FOLLOWED, at_once=AT_ONCE,
                load_before=load_before,
            )  # fmt: skip
            path = measure.write("control_plane", body, arguments.results)
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
