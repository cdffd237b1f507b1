"""`python -m benchmarks.preflight`: what a healthy gang's preflight costs whoever waits for its first step.

Machines of CPUs, which are launchers of this machine that share its cores: each looks while the others do,
so that on machines of their own it is no slower. The clock runs from the start of the launchers to the record
of the first step; against it stand starts without a preflight, in turns. A machine that was looked at within
the hour remembers its speeds: that is a row of its own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import measure
from mlpipe._core import environment
from mlpipe.plan.plan import PreflightPlan

ROOT = Path(__file__).parents[1]
AUTO = PreflightPlan(0.5, clock_seconds=1.0, disk_bytes=2**30, store_bytes_per_second=1e6)  # preflight: auto
GOAL_SECONDS = 10.0
DEADLINE_SECONDS = 300.0  # of a start


def started(size: int, limits: PreflightPlan | None, cache: Path) -> measure.Figures:
    """Seconds to the end of the first step of a gang of `size` machines of one worker each."""
    from kit import plans
    from kit.servers import free_port

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokens = plans.write_tokens(folder / "tokens", num_tokens=2000)
        plan = plans.train_plan(
            folder / "store", tokens, world_size=size, launch={"num_nodes": size}, steps=2
        )
        plan = replace(plan, launch=plan.launch._replace(nproc_per_node=1, preflight=limits))
        (folder / "plan.json").write_text(plan.to_json())
        port = free_port()
        argv = [sys.executable, "-m", "mlpipe.train.launcher", "--plan", str(folder / "plan.json")]
        began = time.time()
        launchers = [
            subprocess.Popen(
                [*argv, "--scratch", str(folder / f"scratch-{index}")],
                env=plans.environment()
                | {
                    "JOB_COMPLETION_INDEX": str(index),
                    environment.RENDEZVOUS: f"localhost:{port}",
                    environment.NODE_NAME: f"n{index}",
                    environment.CACHE: str(cache),
                },
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for index in range(size)
        ]
        codes = [launcher.wait(DEADLINE_SECONDS) for launcher in launchers]
        if any(codes):
            raise SystemExit(f"a gang of {size} failed: {plans.outcome(folder / 'store', plan)}")
        first = next(one for one in plans.records(folder / "store", plan) if one["kind"] == "step")
        return {"seconds": first["time"] - began}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of two machines: does it run?")
    parser.add_argument("--rounds", type=int, default=3, help="of two starts of each kind")
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests"))
    number = 1 if arguments.quick else arguments.rounds
    load_before, rows = os.getloadavg()[0], list[dict[str, Any]]()
    for size in (2,) if arguments.quick else (2, 3):
        with tempfile.TemporaryDirectory() as name:
            known = Path(name, "known")

            def unknown(folder: str = name) -> Path:
                return Path(tempfile.mkdtemp(dir=folder))

            def cold(size: int = size) -> measure.Figures:
                return started(size, AUTO, unknown())

            def warm(size: int = size, known: Path = known) -> measure.Figures:
                return started(size, AUTO, known)

            def without(size: int = size) -> measure.Figures:
                return started(size, None, unknown())

            warm()  # which measures what the others remember
            found = measure.rounds({"first": cold, "within the hour": warm, "without": without}, number)
        for side in ("first", "within the hour"):
            added = [one[side]["seconds"] - one["without"]["seconds"] for one in found]
            print(f"{size} machines, {side}: {[round(one, 2) for one in added]} s", flush=True)
            work = f"preflight of {size} healthy machines of CPUs, {side}"
            name = "seconds that it adds to the first step"
            rows.append(measure.alone(work, name, "s", added, goal=GOAL_SECONDS))
    body = measure.document(rows, rounds=number, load_before=load_before)
    measure.publish("preflight", body, arguments.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
