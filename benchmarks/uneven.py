"""`python -m benchmarks.uneven`: what it saves that ranks with uneven work do not wait at every block.

The trainer's FSDP2 and schedule pass microbatches through blocks that sleep, as long as the microbatch's work
takes; so the ranks need no cores, and what is measured is who waits for whom. Three works:

- [8, 1, 8, 1] beside [1, 8, 1, 8]: with collectives each microbatch takes as long as the longer one;
- a mix of lengths as LongAlign trains on (Bai et al., 2024): half conversations, half long documents;
- one like those of agents that repair software (SWE): long ones of nearly the same kind.

The mixes have eight samples a rank on four ranks, where balancing leaves little to gain, and four samples a
rank in rows of 65,536 tokens as in the paper's own example (sail-sg/odc, examples/llm_training:
--minibatch_size 4), on eight ranks, a number that the example leaves open. There LongAlign-10k stands alone:
documents of 8k to 64k tokens, no conversations.

Lengths are drawn from log-normal distributions with a fixed seed; their quantiles stand in the results, for
nobody's data are here. Samples are packed and dealt by the trainer's own functions: with equally many rows by
whichever of its ways is expected to be the faster, and freely. Work: FLOPs, with attention's quadratic term,
of a 7B model as measured by the paper (arXiv 2601.19362): 4.348 x^2 + 8.768 x of x = tokens / 32,000.

`control`: collectives against a second copy of the same. `expected`: the ratio that follows from the works
by the planner's formula and from what the meetings themselves take, which is measured where all works are
nothing; measured over expected is to be within 10 % of 1.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import measure, ranks
from mlpipe.plan.dealing import Mode, Work, cost_of_step, deal, deal_freely, work_of
from mlpipe.plan.settings import Communication

Works = list[Work]  # of each step
GOALS: dict[Communication, float | None] = {"on_demand": 1.7, "resident": None}
MIXED_GOAL, TOLERANCE = 1.3, 0.10
NO_WORK = 1e-9  # of the works: none at all would be left out
NUM_BLOCKS = 4  # of the model


def longalign(draw: random.Random) -> int:
    median, sigma = (700, 1.0) if draw.random() < 0.5 else (14_000, 0.6)
    return int(min(65_536, max(32, draw.lognormvariate(math.log(median), sigma))))


def longalign_10k(draw: random.Random) -> int:
    while not 8_192 <= (length := int(draw.lognormvariate(math.log(14_000), 0.6))) <= 65_536:
        pass
    return length


def swe(draw: random.Random) -> int:
    return int(min(32_768, max(256, draw.lognormvariate(math.log(9_000), 0.75))))


MIXES = {
    "LongAlign-like": (longalign, 65_536),
    "SWE-like": (swe, 32_768),
    "LongAlign-10k-like": (longalign_10k, 65_536),
}
SETTINGS = (  # a mix, samples a rank and step, ranks
    ("LongAlign-like", 8, 4),
    ("SWE-like", 8, 4),
    ("LongAlign-10k-like", 4, 8),
    ("SWE-like", 4, 8),
)


def cost(length: int) -> float:
    share = length / 32_000
    return 4.348357 * share**2 + 8.768377 * share


def mixed(name: str, num_samples: int, num_ranks: int, num_steps: int) -> tuple[Works, Works, list[int]]:
    """With equally many rows, in the way that takes least time, and freely; and the lengths."""
    length, capacity = MIXES[name]
    draw = random.Random(7)
    equal, free, seen = [], [], []
    for _ in range(num_steps):
        lengths = [length(draw) for _ in range(num_samples * num_ranks)]
        costs = [cost(one) for one in lengths]
        seen += lengths
        modes: tuple[Mode, ...] = ("best_fit", "balanced")
        ways = [work_of(deal(lengths, costs, num_ranks, capacity, mode), costs) for mode in modes]
        equal.append(min(ways, key=lambda work: cost_of_step(work, "collective")))
        free.append(work_of(deal_freely(lengths, costs, num_ranks, capacity, "balanced"), costs))
    return equal, free, seen


def expected(
    equal: Works, free: Works, communication: Communication, meetings: Mapping[str, float] | None = None
) -> float:
    """The time of ranks that meet at each microbatch, over that of ranks that meet as rarely as this.
    `meetings`: what each way takes besides, in the unit of the works."""
    more = meetings or {"collective": 0.0, communication: 0.0}
    together = sum(cost_of_step(step, "collective") for step in equal) + more["collective"]
    alone = sum(cost_of_step(step, communication, "cpu", NUM_BLOCKS) for step in free) + more[communication]
    return together / alone


def measured(sides: dict[str, tuple[str, Works]], num_ranks: int, rounds: int) -> list[measure.Round]:
    asked = {"sides": sides, "rounds": rounds}
    told: list[measure.Round] = ranks.measured("benchmarks.uneven_worker", num_ranks, asked)
    return told


def scaled(works: Works, seconds: float) -> Works:
    return [[[seconds * work for work in rank] for rank in step] for step in works]


def rows_of(
    work: str,
    equal: Works,
    free: Works,
    num_ranks: int,
    rounds: int,
    goals: Mapping[Communication, float | None],
) -> list[dict[str, Any]]:
    """Work of all ranks a second, over that of collectives."""
    sides = {"collective": ("collective", equal), "control": ("collective", equal)}
    sides |= {name: (name, free) for name in goals}
    sides |= {f"{name}, no work": (name, scaled(works, NO_WORK)) for name, works in sides.values()}
    found = measured(sides, num_ranks, rounds)
    meetings = {
        name: statistics.median(one[f"{name}, no work"]["seconds"] for one in found)
        for name in ("collective", *goals)
    }
    whole = sum(sum(map(sum, step)) for step in equal) / num_ranks
    rates = [{side: {"rate": whole / one["seconds"]} for side, one in each.items()} for each in found]
    rows = [
        measure.figure(
            work, "work a second", "ratio", rates, "rate", ours=side, peer="collective",
            goal=goals.get(side), higher_is_better=True,
        )
        for side in ("control", *goals)
    ]  # fmt: skip
    for row, name in zip(rows[1:], goals, strict=True):
        told, works_alone = expected(equal, free, name, meetings), expected(equal, free, name)
        rows.append(
            measure.alone(
                work, "gain, off the expected by", "ratio", [abs(row["ratio"] / told - 1)],
                side=row["side"], goal=TOLERANCE,
            )
            | {"expected": told, "by_the_works_alone": works_alone, "no_work_seconds": meetings}
        )  # fmt: skip
    return rows


def quantiles(lengths: Sequence[int]) -> dict[str, int]:
    cuts = statistics.quantiles(lengths, n=100)
    return {f"p{p}": round(cuts[p - 1]) for p in (1, 10, 25, 50, 75, 90, 99)} | {"max": max(lengths)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="once, with short blocks: does it run?")
    parser.add_argument("--seconds", type=float, default=0.06, help="of a unit of work")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    arguments = parser.parse_args()
    seconds, rounds = (0.002, 1) if arguments.quick else (arguments.seconds, arguments.rounds)
    load_before = os.getloadavg()[0]
    crafted: Works = [[[8, 1, 8, 1], [1, 8, 1, 8]]]
    crafted = scaled(crafted, seconds)
    rows = rows_of("[8, 1, 8, 1] beside [1, 8, 1, 8]", crafted, crafted, 2, rounds, GOALS)
    drawn = {}
    for name, num_samples, num_ranks in SETTINGS:
        equal, free, lengths = mixed(name, num_samples, num_ranks, 3)
        work = f"{name}, {num_samples} samples a rank, {num_ranks} ranks"
        drawn[work] = quantiles(lengths)
        # one step in about a second
        unit = 20 * seconds / (sum(sum(map(sum, step)) for step in equal) / num_ranks / len(equal))
        goals = dict.fromkeys(GOALS, MIXED_GOAL)
        rows += rows_of(work, scaled(equal, unit), scaled(free, unit), num_ranks, rounds, goals)
    body = measure.document(rows, unit_seconds=seconds, rounds=rounds, lengths=drawn, load_before=load_before)
    measure.publish("uneven", body, arguments.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
