"""`python -m benchmarks.newcomer`: `make run` on a machine that has never seen mlpipe.

Each start is `mlpipe run` of the quickstart's corpus and training, with a store, a cache and a home of its
own. Predicted is the step that the plan had before the training began, measured the median of its steps.
Against it stand starts with `MLPIPE_CALIBRATE=off`, which measure nothing: whether the first step comes later
for what is measured beside the corpus.
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
from mlpipe._core import environment
from mlpipe.plan.plan import Plan

QUICKSTART = Path(__file__).parents[1] / "pipelines" / "quickstart.yaml"
WITHIN = 0.25
_WARM_UP = 5  # steps


def started(steps: int, more: dict[str, str]) -> measure.Figures:
    """Seconds to the end of the first step, of a step as predicted and as measured, and the error."""
    with tempfile.TemporaryDirectory() as name:
        spec = Path(name, "quickstart.yaml")
        spec.write_text(QUICKSTART.read_text().partition("  - name: evaluate")[0])
        new = {"HOME": name, "XDG_STATE_HOME": f"{name}/state", environment.CACHE: f"{name}/cache"}
        mlpipe = str(Path(sys.executable).with_name("mlpipe"))
        argv = [mlpipe, "run", str(spec), "--store", f"{name}/store", "--run-id", "r", "--quiet"]
        began = time.time()
        subprocess.run(
            [*argv, "--set", f"train.steps={steps}", "--set", "train.optimizer.warmup_steps=0"],
            check=True, timeout=600, cwd=name, stdout=subprocess.DEVNULL,
            env=measure.with_bytecode() | new | more,
        )  # fmt: skip
        attempt = Path(name, "store/runs/r/stages/train/attempt-1")
        plan = Plan.from_json((attempt / "plan.json").read_bytes())
        lines = (attempt / "records" / "rank-0.jsonl").read_text().splitlines()
    done = [record for record in map(json.loads, lines) if record["kind"] == "step"]
    predicted = plan.work.predicted.step_seconds
    took = statistics.median(record["seconds"] for record in done[_WARM_UP:])
    return {
        "first": done[0]["time"] - began,
        "predicted": predicted,
        "measured": took,
        "error": abs(predicted / took - 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round, few steps: does it run?")
    parser.add_argument("--rounds", type=int, default=3, help="of two starts each")
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    arguments = parser.parse_args()
    steps, number = (_WARM_UP + 1, 1) if arguments.quick else (30, arguments.rounds)
    load_before = os.getloadavg()[0]
    starts: list[measure.Figures] = []

    def unasked() -> measure.Figures:
        starts.append(started(steps, {}))
        print({key: round(value, 3) for key, value in starts[-1].items()}, flush=True)
        return starts[-1]

    started(_WARM_UP + 1, {})  # pages of the disk, for both
    sides = {
        "mlpipe run": unasked,
        "nothing is measured": lambda: started(steps, {environment.CALIBRATE: "off"}),
    }
    found = measure.rounds(sides, number)
    work = "a newcomer's quickstart"
    rows = [
        measure.alone(work, f"worst error of the predicted step, {len(starts)} starts", "ratio",
                      [max(one["error"] for one in starts)], goal=WITHIN),
        measure.alone(work, "error of the predicted step", "ratio", [one["error"] for one in starts]),
        measure.figure(work, "seconds to the end of the first step", "s", found, "first", ours="mlpipe run",
                       peer="nothing is measured", goal=1.0, higher_is_better=False),
        measure.figure(work, "error of the predicted step", "ratio", found, "error", ours="mlpipe run",
                       peer="nothing is measured", goal=None, higher_is_better=False),
    ]  # fmt: skip
    body = measure.document(rows, rounds=number, steps=steps, load_before=load_before, starts=starts)
    measure.publish("newcomer", body, arguments.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
