"""`python -m benchmarks.bubble`: how long the ranks of a pipeline are idle, against theory.

The schedules' own runner passes microbatches through blocks that sleep: a fixed time for a forward pass, as
long for the gradient of the input, and as long for those of the weights. So the ranks need no cores, and what
is measured is the order of passes and what waits for what. Everything else is the trainer's: the cut into
stages, the transfers over gloo, the backward passes in two parts.

Theory, of p ranks and m microbatches, where a backward pass takes twice as long as a forward pass:
(p - 1) / (m + p - 1) of 1f1b (Narayanan et al., PipeDream, 2019), (p - 1) / (v m + p - 1) of v stages a rank
(interleaved; Narayanan et al., 2021), (p - 1) / (3 m + p - 1) of zero_bubble (ZB-H1; Qi et al., 2023).
"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import measure, ranks
from mlpipe._core.pipelines import SCHEDULES, Schedule, stages_per_rank, why_not

NUM_RANKS = (2, 4)
TOLERANCE = 0.10  # of the theory


def theory(schedule: Schedule, num_ranks: int, num_microbatches: int) -> float:
    """Share of the time in which a rank has nothing to do."""
    factor = 3 if schedule == "zero_bubble" else stages_per_rank(schedule)
    return (num_ranks - 1) / (factor * num_microbatches + num_ranks - 1)


def works(num_ranks: int) -> list[tuple[Schedule, int]]:
    """Schedules with numbers of microbatches."""
    return [
        (schedule, number)
        for number in (num_ranks, 2 * num_ranks)
        for schedule in SCHEDULES
        if why_not(schedule, num_ranks, number) is None
    ]


def measured(num_ranks: int, seconds: float, steps: int) -> list[dict[str, Any]]:
    """Of each work the idle share of each of its steps, by a clock around them (`idle`), and by the clocks of
    the trainer's records (`bubble`)."""
    asked = {"works": works(num_ranks), "seconds": seconds, "steps": steps}
    told: list[dict[str, Any]] = ranks.measured("benchmarks.bubble_worker", num_ranks, asked)
    return told


def rows_of(num_ranks: int, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The idle share over theory, which is to be within the tolerance on either side; and how much of the
    idle time of 1f1b zero_bubble leaves."""
    rows: list[dict[str, Any]] = []
    idle: dict[tuple[str, int], float] = {}
    for one in found:
        schedule, number = one["schedule"], one["num_microbatches"]
        expected = theory(schedule, num_ranks, number)
        work = f"{schedule}, {num_ranks} stages, {number} microbatches"
        if schedule == "interleaved":
            work = work.replace("stages", "ranks of 2 stages")
        for key, title in (("idle", "idle share"), ("bubble", "idle share, as recorded")):
            row = measure.alone(work, title, "ratio", one[key], goal=expected)
            row |= {"peer": "theory", "goal": 1 + TOLERANCE, "met": abs(row["ratio"] - 1) <= TOLERANCE}
            rows.append(row)
        idle[schedule, number] = rows[-2]["ours"]
    for (schedule, number), share in idle.items():
        if schedule == "zero_bubble":
            work = f"zero_bubble over 1f1b, {num_ranks} stages, {number} microbatches"
            other = idle["1f1b", number]
            row = measure.alone(work, "idle share", "ratio", [share], goal=other)
            rows.append(row | {"peer": "1f1b", "met": share < other})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="once, with short blocks: does it run?")
    parser.add_argument("--seconds", type=float, default=0.4, help="of a stage's forward pass")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    arguments = parser.parse_args()
    seconds, steps = (0.01, 1) if arguments.quick else (arguments.seconds, arguments.steps)
    load_before = os.getloadavg()[0]
    with ThreadPoolExecutor() as pool:  # side by side: they sleep
        found = list(pool.map(lambda num_ranks: measured(num_ranks, seconds, steps), NUM_RANKS))
    rows = [row for each in map(rows_of, NUM_RANKS, found) for row in each]
    body = measure.document(rows, stage_seconds=seconds, steps=steps, load_before=load_before)
    measure.publish("bubble", body, arguments.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
