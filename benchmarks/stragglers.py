"""`python -m benchmarks.stragglers`: two workers of which one takes twice as long for a sample.

Each side is `mlpipe run` of the same pipeline, whose samples sleep; so the workers need no cores. A figure is
the median over the later half of the steps of samples a second, over the sum of what the workers can do:
`even` are two fast ones, `left` has equal shares (two thirds of the ideal by construction), `moved` has
`stragglers: move_load`.
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

SECONDS = 0.05  # of a sample on a fast worker
OF_THE_IDEAL = 0.9
SEQ_LEN, BATCH = 32, 24
PIPELINE = """
version: 1
name: stragglers
stages:
  - name: train
    env: {{OMP_NUM_THREADS: "1"}}
    train:
      model: {{preset: llama-1m, seq_len: {seq_len}, vocab_size: 256, num_layers: 1}}
      data:
        entry: "benchmarks.stragglers:samples"
        args: {{seconds: {seconds}}}
        batch_size: {batch}
        micro_batch: 1
      steps: {steps}
      strategy: ddp
      precision: fp32
      stragglers: {stragglers}
      checkpoint: {{every: 10000 steps}}
    resources: {{workers_per_node: 2}}
"""
SIDES = {
    "even": ([SECONDS, SECONDS], "leave"),
    "control": ([SECONDS, SECONDS], "leave"),
    "left": ([SECONDS, 2 * SECONDS], "leave"),
    "moved": ([SECONDS, 2 * SECONDS], "move_load"),
}


class Samples:
    """Random tokens; each takes its rank as long as `seconds` says."""

    def __init__(self, seconds: list[float]) -> None:
        import torch

        self.seconds = seconds[int(os.environ.get("RANK", 0))]
        self.tokens = torch.randint(256, (512, SEQ_LEN + 1), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int):
        time.sleep(self.seconds)
        return {"inputs": self.tokens[i, :-1], "targets": self.tokens[i, 1:]}


def samples(split: str, seconds: list[float]) -> Samples:
    return Samples(seconds)


def trained(seconds: list[float], stragglers: str, steps: int) -> measure.Figures:
    """Samples a second, over what the workers can do."""
    with tempfile.TemporaryDirectory() as name:
        spec = Path(name, "pipeline.yaml")
        spec.write_text(
            PIPELINE.format(seconds=seconds, stragglers=stragglers, steps=steps, seq_len=SEQ_LEN, batch=BATCH)
        )
        mlpipe = str(Path(sys.executable).with_name("mlpipe"))
        argv = [mlpipe, "run", str(spec), "--store", f"{name}/store", "--run-id", "r", "--quiet"]
        subprocess.run(argv, check=True, timeout=600, cwd=Path(__file__).parents[1])
        path = Path(name, "store/runs/r/stages/train/attempt-1/records/rank-0.jsonl")
        records = [json.loads(line) for line in path.read_text().splitlines()]
    took = [record["seconds"] for record in records if record["kind"] == "step"]
    rate = BATCH / statistics.median(took[len(took) // 2 :])
    return {"speed": rate / sum(1 / one for one in seconds)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round, few steps: does it run?")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    arguments = parser.parse_args()
    steps, number = (4, 1) if arguments.quick else (40, arguments.rounds)
    load_before = os.getloadavg()[0]
    found = measure.rounds(
        {name: lambda side=side: trained(*side, steps) for name, side in SIDES.items()}, number
    )
    goals = {"control": None, "left": None, "moved": OF_THE_IDEAL}
    rows = [
        measure.figure("one of two workers at half the speed", "samples a second over the sum of speeds",
                       "ratio", found, "speed", ours=side, peer="even", goal=goal, higher_is_better=True)
        for side, goal in goals.items()
    ]  # fmt: skip
    body = measure.document(rows, rounds=number, steps=steps, seconds=SECONDS, load_before=load_before)
    measure.publish("stragglers", body, arguments.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
