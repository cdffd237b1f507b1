"""`python -m benchmarks.instrument`: the time inside mlpipe's instrument over the time of a step, of rank 0.

The instrument: the clocks around waits for other ranks, the record of each step into a folder store, and the
same record into /metrics. What it costs is far below the noise of two cores, so it is not the difference of
two runs but the time that is spent inside it, in the real loop under the real launcher, with the measuring
clocks' own time in it. On CUDA the clocks are events, which this does not measure.

It also says what a step may be at least for the goal to hold.
"""

from __future__ import annotations

import argparse
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
            found[strategy] = {
                **answer, "shortest_step_seconds": answer["instrument_seconds"] / GOAL_RATIO
            }  # fmt: skip
    body = measure.document(
        rows_of(found), load_before=load_before, steps=arguments.steps, workers=2, work=overrides,
        found=found,
    )  # fmt: skip
    measure.publish("instrument", body, arguments.results)
    return 0


def rows_of(found: dict) -> list[dict]:
    return [
        measure.alone(
            f"recording and metrics, {strategy}", "share of a step", "ratio",
            [one["instrument_seconds"] / one["step_seconds"]], goal=GOAL_RATIO,
        )
        for strategy, one in found.items()
    ]  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
