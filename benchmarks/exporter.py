"""`python -m benchmarks.exporter`: how long a scrape of `mlpipe exporter` takes over ten thousand runs, and
how long its looks at the store take, which no scrape waits for. Real files in a folder store, real HTTP.

The runs are made up: their files are written as mlpipe writes them, but without waiting for the disk, and
each training has the records of one rank, a few steps. Of a hundred runs under way new steps are written
between two looks.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

from benchmarks import measure
from mlpipe._core.record_lines import encode, parse
from mlpipe._core.serial import to_json
from mlpipe.observe.exporter import Fleet
from mlpipe.observe.serve import Serving
from mlpipe.store.open import open_store
from mlpipe.store.runs import RunState, StageState

GOAL_SECONDS = 1.0
NUM_LIVE = 100
NUM_STEPS = 20


def write_run(root: Path, number: int, plan: str) -> str:
    """The run's id. Every tenth has failed, the last ones are under way."""
    live = number < NUM_LIVE
    state = "running" if live else "failed" if number % 10 == 0 else "done"
    run_id, now = f"run-{number:06d}", time.time() - 10 * number
    outcome = {"kind": "failed", "cause": "not_finite"} if state == "failed" else {}
    stage = StageState(state, 1, "", now, None if live else now + 60, None if live else 0, outcome)
    run = RunState(1, run_id, "bench", "local", state, now, now + 60, "0", 3, {"train": stage}, None, "", {})
    attempt = root / "runs" / run_id / "stages" / "train" / "attempt-1"
    (attempt / "records").mkdir(parents=True)
    (root / "runs" / run_id / "run.json").write_text(to_json(run))
    (attempt / "plan.json").write_text(plan.replace("RUN", run_id))
    known = {"world_size": 1, "steps": 1000, "start_step": 0, "seconds_since_spawn": 2.0}
    start = line("start", **known)
    (attempt / "records" / "rank-0.jsonl").write_bytes(start + steps(0, now))
    index = root / "index" / run_id
    index.mkdir(parents=True)
    for seq, name in enumerate(
        ("pending", "running", state) if not live else ("pending", "running"), start=1
    ):
        (index / f"{seq:06d}-{name}").touch()
    return run_id


def steps(first: int, now: float) -> bytes:
    parts = {"seconds": 0.5, "data_seconds": 0.01, "compute_seconds": 0.4, "collective_seconds": 0.08}
    return b"".join(
        line("step", step=first + n, loss=2.0, tokens=512, **parts) for n in range(1, NUM_STEPS + 1)
    )


def line(kind: str, **fields: float) -> bytes:
    record = parse({"kind": kind, "time": time.time(), "rank": 0, **fields})
    assert record is not None
    return encode(record)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two hundred runs: does it run at all?")
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--scrapes", type=int, default=20)
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    arguments = parser.parse_args()
    num_runs = 200 if arguments.quick else arguments.runs
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        plan = made_plan(root)
        ids = [write_run(root, number, plan) for number in range(num_runs)]
        fleet = Fleet(open_store(str(root)))
        first = timed(lambda: fleet.round(seconds=float("inf")))
        serving = Serving(fleet, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{serving.port}/metrics"
        rounds, scrapes, num_bytes = [], [], 0
        for number in range(arguments.scrapes):
            for run_id in ids[:NUM_LIVE]:
                path = root / "runs" / run_id / "stages/train/attempt-1/records/rank-0.jsonl"
                with path.open("ab") as records:
                    records.write(steps(NUM_STEPS * (number + 1), time.time()))
            rounds.append(timed(fleet.round))
            began = time.perf_counter()
            with urllib.request.urlopen(url, timeout=60) as answer:
                body = answer.read()
            scrapes.append(time.perf_counter() - began)
            num_bytes = len(body)
        serving.close()
    num_series = sum(not line.startswith(b"#") for line in body.splitlines())
    found = {
        "num_runs": num_runs,
        "num_runs_under_way": min(NUM_LIVE, num_runs),
        "scrape_seconds": {"median": statistics.median(scrapes), "max": max(scrapes)},
        "round_seconds": {"median": statistics.median(rounds), "max": max(rounds)},
        "first_round_seconds": first,
        "num_series": num_series,
        "num_bytes": num_bytes,
    }
    body = measure.document(rows_of(found), load_before=load_before, **found)
    measure.publish("exporter", body, arguments.results)
    return 0


def rows_of(found: dict) -> list[dict]:
    work = f"exporter, {found['num_runs']:,} runs"
    slowest = [found["scrape_seconds"]["max"]]
    return [
        measure.alone(work, "scrape, the slowest", "s", slowest, goal=GOAL_SECONDS),
        measure.alone(work, "scrape, median", "s", [found["scrape_seconds"]["median"]]),
        measure.alone(work, "look at the store, median", "s", [found["round_seconds"]["median"]]),
        measure.alone(work, "first look at the store", "s", [found["first_round_seconds"]]),
    ]


def timed(call) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def made_plan(root: Path) -> str:
    """plan.json of the quickstart's training with a price; RUN stands for its id."""
    from benchmarks import launch

    tokens = launch.corpus(root / "corpus", vocab_size=512)
    plan = launch.train_plan(root, tokens, "run", strategy="ddp")
    return replace(plan, run_id="RUN", price_usd_per_device_hour=2.5).to_json()


if __name__ == "__main__":
    raise SystemExit(main())
