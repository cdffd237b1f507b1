"""`python -m benchmarks.loading`: a training whose samples cost 5 ms each, and one whose samples are free.

Each side is `mlpipe run` of the same pipeline, one worker on one core (OMP_NUM_THREADS=1), with a data set of
one's own. `read by the rank` has no data workers, `auto` as many as it finds it needs. A figure is the median
of the tokens a second of the later half of the steps. It needs two idle cores: one computes, one reads. As
many rounds are taken as fit into `--seconds`, at least two.
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

COST_SECONDS = 0.005
OF_THE_FREE = 0.95
SEQ_LEN, BATCH = 256, 4
PIPELINE = """
version: 1
name: loading
stages:
  - name: train
    env: {{OMP_NUM_THREADS: "1"}}
    train:
      model: {{preset: llama-1m, seq_len: {seq_len}, vocab_size: 1024}}
      data:
        entry: "benchmarks.loading:samples"
        args: {{cost_seconds: {cost}}}
        batch_size: {batch}
        workers: {workers}
      steps: {steps}
      strategy: single
      precision: fp32
      checkpoint: {{every: 10000 steps}}
    resources: {{workers_per_node: 1}}
"""
SIDES = {"free": (0.0, 0), "free again": (0.0, 0), "read by the rank": (COST_SECONDS, 0),
         "one worker": (COST_SECONDS, 1), "auto": (COST_SECONDS, "auto")}  # fmt: skip


class Samples:
    """Random tokens; each sample takes `cost_seconds` of a CPU."""

    def __init__(self, cost_seconds: float) -> None:
        import torch

        self.cost_seconds = cost_seconds
        self.tokens = torch.randint(1024, (4096, SEQ_LEN + 1), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int):
        until = time.thread_time() + self.cost_seconds
        while time.thread_time() < until:
            pass
        return {"inputs": self.tokens[i, :-1], "targets": self.tokens[i, 1:]}


def samples(split: str, cost_seconds: float) -> Samples:
    return Samples(cost_seconds)


def trained(cost: float, workers: object, steps: int) -> measure.Figures:
    """Tokens a second, by wall time."""
    with tempfile.TemporaryDirectory() as name:
        spec = Path(name, "pipeline.yaml")
        settings = {"cost": cost, "workers": workers, "steps": steps, "seq_len": SEQ_LEN, "batch": BATCH}
        spec.write_text(PIPELINE.format(**settings))
        mlpipe = str(Path(sys.executable).with_name("mlpipe"))
        argv = [mlpipe, "run", str(spec), "--store", f"{name}/store", "--run-id", "r", "--quiet"]
        subprocess.run(argv, check=True, timeout=600, cwd=Path(__file__).parents[1])
        path = Path(name, "store/runs/r/stages/train/attempt-1/records/rank-0.jsonl")
        records = [json.loads(line) for line in path.read_text().splitlines()]
    rates = [record["tokens_per_second"] for record in records if record["kind"] == "step"]
    return {"speed": statistics.median(rates[len(rates) // 2 :])}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round, few steps: does it run?")
    parser.add_argument("--seconds", type=float, default=280.0, help="no round begins that would end later")
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    arguments = parser.parse_args()
    seconds, least, steps, sides = arguments.seconds, 2, 40, dict(SIDES)
    if arguments.quick:
        seconds, least, steps = 0.0, 1, 4
        sides = {name: sides[name] for name in ("free", "one worker")}
    load_before = os.getloadavg()[0]
    found = measure.rounds_within(
        {name: lambda side=side: trained(*side, steps) for name, side in sides.items()}, seconds, least
    )
    goals = {"free again": None, "read by the rank": None, "one worker": OF_THE_FREE, "auto": OF_THE_FREE}
    rows = [
        measure.figure("samples of 5 ms", "speed", "tok/s", found, "speed", ours=side, peer="free", goal=goal,
                       higher_is_better=True)
        for side, goal in goals.items() if side in sides
    ]  # fmt: skip
    body = measure.document(
        rows, rounds=len(found), steps=steps, cost_seconds=COST_SECONDS, batch=BATCH, seq_len=SEQ_LEN,
        load_before=load_before,
    )  # fmt: skip
    measure.publish("loading", body, arguments.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
