"""`python -m benchmarks.tuning`: what `mlpipe tune` finds, beside a full grid of the same changes.

The work is the quickstart with a smaller model, so that a trial, which is a training of its own, is little
more than its start, and a grid ends within minutes. All three use the trials of `mlpipe tune`:

tune      its own search over strategy, micro-batch, recomputation and the allocator
grid      each combination of the same changes once, in an order that was drawn
nothing   the search over changes that change nothing: variables that nobody reads

The three fastest of the grid and what was tuned take turns afterwards, since the fastest of many trials is
mostly the luckiest. Nobody tells the search anything that the grid found.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from benchmarks import measure
from mlpipe.api.pipeline import load
from mlpipe.api.tuning.decide import Change, Config, search, sets_of
from mlpipe.api.tuning.session import changes_of
from mlpipe.api.tuning.trials import Trials, shortened, tuning_backend
from mlpipe.store.open import open_store

QUICKSTART = Path(__file__).parents[1] / "pipelines" / "quickstart.yaml"
KNOBS = ("strategy", "micro_batch", "recomputation", "allocator")  # compiling takes longer than all the rest
SMALLER = ["train.model.preset=llama-1m", "train.model.seq_len=128", "train.data.batch_size=16"]
WITHIN, OF_THE_TIME = 1.03, 0.25
_HOUR = 3600.0
_FINALISTS = 3


class Console:
    quiet = False

    def note(self, text: str) -> None:
        print(text, flush=True)

    complain = note


class Timed:
    """Trials, and how long all of them took."""

    def __init__(self, trials: Trials) -> None:
        self._trials = trials
        self.seconds = 0.0
        self.number = 0

    def __call__(self, config: Config) -> float | None:
        began = time.monotonic()
        found = self._trials.seconds(config)
        self.seconds, self.number = self.seconds + time.monotonic() - began, self.number + 1
        words = " ".join(item.removeprefix("stages.train.") for item in sets_of(config)) or "as it is"
        print(f"  {1000 * (found or math.nan):7.1f} ms  {words}", flush=True)
        return found


def grid_of(changes: Sequence[Change]) -> list[Config]:
    """One change of each knob or none, in an order that is the same each time."""
    knobs = defaultdict[str, list[Config]](lambda: [()])
    for change in changes:
        knobs[change.knob].append((change,))
    found: list[Config] = [sum(parts, ()) for parts in itertools.product(*knobs.values())]
    random.Random(0).shuffle(found)
    return found


def nothing(number: int) -> list[Change]:
    return [Change(f"nothing {i}", (f"stages.train.env.NOBODY_READS_{i}=1",)) for i in range(number)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one knob, one round: does it run?")
    parser.add_argument("--steps", type=int, default=20, help="of a trial; a third warms up")
    parser.add_argument("--rounds", type=int, default=2, help="of those that are compared at the end")
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    arguments = parser.parse_args()
    knobs, steps, number = (
        (KNOBS[-1:], 6, 1) if arguments.quick else (KNOBS, arguments.steps, arguments.rounds)
    )
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        console = Console()
        pipeline = shortened(load(QUICKSTART, SMALLER), "train", steps)
        deadline, backend = time.monotonic() + _HOUR, tuning_backend(pipeline, None)
        trials = Trials(pipeline, "train", open_store(name), os.getcwd(), deadline, console.note, backend)
        trials.prepare(console)
        changes = [change for change in changes_of(trials) if change.knob in knobs]
        tuning, grid, idle = Timed(trials), Timed(trials), Timed(trials)
        trials.seconds(())  # pages of the disk, for all
        tuned = search(changes, tuning)
        tried = {config: seconds for config in grid_of(changes) if (seconds := grid(config)) is not None}
        found = search(nothing(1 if arguments.quick else 4), idle)
        best = sorted(tried, key=lambda config: tried[config])[:_FINALISTS]
        sides = {"mlpipe tune": tuned.best} | {f"grid's {i}.": config for i, config in enumerate(best, 1)}
        last = measure.rounds(
            {side: lambda config=config: {"seconds": trials.seconds(config) or math.inf}
             for side, config in sides.items()}, number
        )  # fmt: skip
    fastest = min(list(sides)[1:], key=lambda side: sum(one[side]["seconds"] for one in last))
    work = f"tuning the small quickstart, {len(changes)} changes"
    rows = [
        measure.figure(work, "seconds of a step", "s", last, "seconds", ours="mlpipe tune", peer=fastest,
                       goal=WITHIN, higher_is_better=False),
        measure.alone(work, f"time of {tuning.number} trials over that of the grid's {grid.number}", "ratio",
                      [tuning.seconds / grid.seconds], goal=OF_THE_TIME),
        measure.alone(work, "searches among changes that do nothing that find nothing", "searches",
                      [float(not found.best)], goal=1.0, higher_is_better=True),
        measure.alone(work, "noise of a trial", "ratio", [tuned.noise_ratio, found.noise_ratio]),
    ]  # fmt: skip
    body = measure.document(
        rows, steps=steps, rounds=number, load_before=load_before,
        grid_seconds=grid.seconds, tune_seconds=tuning.seconds, nothing_seconds=idle.seconds,
        sets={side: sets_of(config) for side, config in sides.items()},
    )  # fmt: skip
    measure.publish("tuning", body, arguments.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
