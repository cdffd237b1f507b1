"""`python -m benchmarks.render_scale`: `mlpipe render --for kubernetes` of 10, 100 and 1,000 stages.

A chain of commands with a training of 2 x 8 GPUs in every tenth place. Linear: the CPU seconds and the memory
that 1,000 stages take more than 100 are at most 12.5 times what 100 take more than 10.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import measure

SIZES = (10, 100, 1000)
GOAL_SECONDS = 3.0
LINEAR = 12.5


def pipeline(num_stages: int) -> dict:
    """Every tenth stage trains on what the stage before it made."""
    resources = {"nodes": 2, "gpus_per_node": 8, "gpu": "H100-80GB", "cpus": 96, "memory": "1024 GiB"}
    stages: list[dict] = []
    for number in range(num_stages):
        stage: dict = {"name": f"s{number}"}
        before = f"s{number - 1}"
        if number:
            stage["needs"] = [before]
        if number % 10 == 9:
            stage["train"] = {
                "model": {"preset": "llama-8b", "seq_len": 8192},
                "data": {"tokens": f"{{{{stages.{before}.output}}}}", "batch_tokens": 1048576},
                "steps": 1000,
                "strategy": "fsdp",
                "precision": "bf16",
            }
            stage["resources"] = resources
        else:
            stage["command"] = ["mlpipe-corpus", "--out", "{{output}}"]
        stages.append(stage)
    return {
        "version": 1,
        "name": "wide",
        "image": "registry.example.com/team/mlpipe:1.0",
        "store": "s3://ml-runs/wide",
        "stages": stages,
    }


def render(path: Path) -> dict[str, float]:
    """A process of its own: wall and CPU seconds, the peak of its memory."""
    argv = [str(Path(sys.executable).with_name("mlpipe")), "render", str(path), "--for", "kubernetes"]
    code = f"import resource, subprocess, sys\ndone = subprocess.run({argv!r}, stdout=subprocess.DEVNULL)\n"
    code += "used = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
    code += "print(used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)\nsys.exit(done.returncode)"
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
        env=measure.with_bytecode(),
    )
    seconds = time.perf_counter() - began
    if done.returncode:
        raise RuntimeError(f"render of {path} failed with {done.returncode}")
    cpu, mib = map(float, done.stdout.split())
    return {"wall": seconds, "cpu": cpu, "mib": mib}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="once: does it run?")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    arguments = parser.parse_args()
    repeats = 1 if arguments.quick else arguments.repeats
    load_before = os.getloadavg()[0]
    found: dict[int, list[dict[str, float]]] = {size: [] for size in SIZES}
    with tempfile.TemporaryDirectory() as name:
        for size in SIZES:
            Path(name, f"{size}.yaml").write_text(json.dumps(pipeline(size)))
        for _ in range(repeats):
            for size in SIZES:
                found[size].append(render(Path(name, f"{size}.yaml")))
    rows = []
    for size, runs in found.items():
        work = f"render of {size:,} stages"
        last = size == SIZES[-1]
        for key, title, unit in (
            ("wall", "wall time", "s"),
            ("cpu", "CPU time", "s"),
            ("mib", "memory", "MiB"),
        ):
            goal = GOAL_SECONDS if last and key == "wall" else None
            rows.append(measure.alone(work, title, unit, [run[key] for run in runs], goal=goal))
    for key, title in (("cpu", "CPU time"), ("mib", "memory")):
        few, some, many = (statistics.median(run[key] for run in found[size]) for size in SIZES)
        growth = (many - some) / max(some - few, 1e-9)
        rows.append(measure.alone("render", f"{title}: growth per tenfold", "ratio", [growth], goal=LINEAR))
    body = measure.document(rows, repeats=repeats, load_before=load_before)
    measure.publish("render_scale", body, arguments.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
