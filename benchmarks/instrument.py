"""`python -m benchmarks.instrument`: the time inside mlpipe's instrument over the time of a step, of rank 0.

The instrument: the clocks around waits for other ranks, the record of each step into a folder store, and the
same record into /metrics. What it costs is far below the noise of two cores, so it is not the difference of
two runs but the time that is spent inside it, in the real loop under the real launcher, with the measuring
clocks' own time in it. On CUDA the clocks are events, which this does not measure.

It also says what a step may be at least for the goal to hold.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

from benchmarks import launch, measure
from benchmarks.overhead import MODEL, VOCAB_SIZE

GOAL_RATIO = 0.005


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few steps of a small batch: does it run?")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    arguments = parser.parse_args()
    overrides = dict(MODEL)
    if arguments.quick:
        arguments.steps = 3
        overrides |= {"data__batch_size": 2, "model__seq_len": 32}
    load_before = os.getloadavg()[0]
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokens = launch.corpus(folder, vocab_size=512 if arguments.quick else VOCAB_SIZE)
        for strategy in ("ddp", "fsdp"):
            plan = launch.train_plan(folder, tokens, strategy, strategy=strategy, **overrides)
            answer = launch.measure(
                plan, folder / strategy, "benchmarks.instrument_worker", steps=arguments.steps
            )
            ratio = answer["instrument_seconds"] / answer["step_seconds"]
            shortest = answer["instrument_seconds"] / GOAL_RATIO
            found[strategy] = {
                **answer, "ratio": ratio, "met": ratio <= GOAL_RATIO, "shortest_step_seconds": shortest,
            }  # fmt: skip
    print(json.dumps(found, indent=1))
    body = measure.document(
        [], load_before=load_before, goal_ratio=GOAL_RATIO, steps=arguments.steps, workers=2, work=overrides,
        found=found,
    )  # fmt: skip
    print(f"written to {measure.write('instrument', body, arguments.results)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
