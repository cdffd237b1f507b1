"""`python -m benchmarks.elastic`: from `kill -9` of one of three workers to the next step of the others.

Three replicas of a small Llama on this machine, each in a launcher of its own (`nodes: 2..3`, three wanted).
One of them is killed at a random step, again and again, each time when all three take part; then the same
with three workers of one node, whose gang goes on from its last checkpoint. Then both again with workers of
two ranks that share the weights (fsdp, in the gang hsdp), one of which is killed. Steps sleep for a fixed
time, so that what is measured is who waits for what; everything else is the trainer's. The clock runs from
just before the blow to the record of the first step that the ones who were not killed did together (of the
gang: of rank 0 after its restart). Steps that no rank recorded, or one twice, are counted in the same run.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks import measure

ROOT = Path(__file__).parents[1]
GOAL_SECONDS = 2.0
WORKERS = 3
DEADLINE_SECONDS = 600.0  # of anything that is waited for


class Training:
    """Three workers of so many `ranks` that are killed. `elastic`: each a replica; else they are a gang."""

    def __init__(self, folder: Path, *, elastic: bool, ranks: int, step_seconds: float, every: int) -> None:
        from kit import plans, processes

        from mlpipe.plan.entry import Entry
        from mlpipe.plan.mesh import Mesh
        from mlpipe.plan.model import ModelPlan
        from mlpipe.plan.plan import Replicas
        from mlpipe.store import replicas
        from mlpipe.store.folder import FolderStore

        self.plans, self.processes, self.elastic, self.ranks = plans, processes, elastic, ranks
        self.store, self.scratch, self.slow = folder / "store", folder / "scratch", folder / "slow"
        folder.mkdir()
        self.slow.touch()
        arguments = {"seconds": step_seconds, "while_file": str(self.slow), "dropout": 0.0}
        model = ModelPlan(Entry("kit.models:slow", arguments), None, 32, ())
        launch: dict[str, Any] = {"max_restarts": 1000}
        if elastic:
            launch["replicas"] = Replicas(WORKERS - 1, WORKERS)
        mesh = Mesh(dp_replicate=1 if elastic else WORKERS, dp_shard=ranks)
        self.plan = plans.train_plan(
            self.store,
            plans.write_tokens(folder / "tokens"),
            strategy=("fsdp" if ranks > 1 else "single") if elastic else "hsdp" if ranks > 1 else "ddp",
            mesh=mesh,
            world_size=mesh.world_size,
            steps=100_000,
            every=every,
            model=model,
            launch=launch,
            micro_batch=16,
        )
        if elastic:
            replicas.want(FolderStore(self.store), self.plan.attempt_key, WORKERS)
        self.process = plans.start(self.plan, self.scratch)

    def records(self, worker: int, kind: str) -> list[dict[str, Any]]:
        """Of its first rank."""
        found = self.plans.records(self.store, self.plan, worker * self.ranks)
        return [one for one in found if one["kind"] == kind]

    def until(self, what: str, check: Any) -> Any:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not (found := check()):
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise RuntimeError(f"waited for {what}: {self.plans.log_of(self.scratch)}")
            time.sleep(0.05)
        return found

    def last_step(self, worker: int) -> int:
        return max((one["step"] for one in self.records(worker, "step")), default=0)

    def all_there(self) -> bool:
        """All have done the newest steps."""
        last = [self.last_step(worker) for worker in range(WORKERS)]
        full = not self.elastic or all(
            self.records(worker, "step")[-1]["replicas"] == WORKERS
            for worker in range(WORKERS)
            if last[worker]
        )
        return full and min(last) > 0 and max(last) - min(last) <= 1

    def kill(self, victim: int) -> float:
        """Seconds to the next step of the others."""
        scratch, rank = self.scratch, victim * self.ranks
        if self.elastic:
            scratch, rank = scratch / f"replica-{victim}", 0
        witness = min({*range(WORKERS)} - {victim}) if self.elastic else 0
        lives = len(self.records(witness, "start"))
        pid = self.processes.worker_of(scratch, rank)
        assert pid is not None
        struck = time.time()
        os.kill(pid, 9)

        def next_step() -> dict[str, Any] | None:
            if not self.elastic and len(self.records(witness, "start")) == lives:
                return None
            began = struck if self.elastic else self.records(witness, "start")[-1]["time"]
            later = [one for one in self.records(witness, "step") if one["time"] > began]
            if self.elastic:
                later = [one for one in later if one.get("membership_seconds") is not None]
            return later[0] if later else None

        step: dict[str, Any] = self.until("the next step", next_step)
        return float(step["time"]) - struck

    def end(self) -> None:
        self.processes.kill(self.processes.tree(self.process.pid))
        self.process.wait(DEADLINE_SECONDS)

    def counts(self, kills: Counter[int]) -> dict[str, float]:
        """Of the whole: restarts of workers that nobody killed, steps that nobody did, steps done twice."""
        starts = {one: len(self.records(one, "start")) - 1 for one in range(WORKERS)}
        steps = {
            worker: Counter(one["step"] for one in self.records(worker, "step")) for worker in range(WORKERS)
        }
        done = set().union(*steps.values())
        last = max(done)
        return {
            "restarts of workers that were not killed": sum(
                max(0, starts[worker] - kills[worker]) for worker in starts
            ),
            "steps that nobody recorded": len(set(range(1, last + 1)) - done),
            "steps done again": sum(count - 1 for count in steps[0].values()),
        }


def struck(training: Training, kills: int, seed: int) -> tuple[list[float], dict[str, float]]:
    """Seconds of each blow, and what the whole came to."""
    draw, victims, seconds = random.Random(seed), Counter[int](), []
    try:
        for _ in range(kills):
            training.until("all of them", training.all_there)
            at = training.last_step(0) + draw.randint(2, 10)
            training.until(f"step {at}", lambda at=at: training.last_step(0) >= at)
            victim = draw.randrange(WORKERS)
            seconds.append(training.kill(victim))
            victims[victim] += 1
        training.until("all of them", training.all_there)
    finally:
        training.end()
    return seconds, training.counts(victims)


def _rows(work: str, found: dict[str, tuple[list[float], dict[str, float]]]) -> list[dict[str, Any]]:
    """Of both sides."""
    ours, counts = found["elastic"]
    rows = [measure.alone(work, "kill to next step, elastic", "s", ours, goal=GOAL_SECONDS)]
    gang, of_gang = found["gang restart"]
    rows.append(measure.alone(work, "kill to next step, gang restart", "s", gang))
    for what, count in counts.items():
        row = measure.alone(work, what, "", [count])
        rows.append({**row, "met": count == 0, "goal": 0.0})
    rows.append(measure.alone(work, "steps done again, gang restart", "", [of_gang["steps done again"]]))
    rows.append(measure.alone(work, "longest kill to next step, elastic", "s", [max(ours)]))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one blow each: does it run?")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="of a worker")
    parser.add_argument("--step-seconds", type=float, default=0.2)
    parser.add_argument("--every", type=int, default=20, help="steps between the gang's checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    arguments = parser.parse_args()
    kills = 1 if arguments.quick else arguments.kills
    sys.path.insert(0, str(ROOT / "tests"))
    load_before = os.getloadavg()[0]
    settings = {"step_seconds": arguments.step_seconds, "every": arguments.every}
    rows = []
    for ranks in arguments.ranks:
        with tempfile.TemporaryDirectory() as name:
            found = {}
            for side, elastic in (("elastic", True), ("gang restart", False)):
                folder = Path(name) / side.replace(" ", "-")
                training = Training(folder, elastic=elastic, ranks=ranks, **settings)
                found[side] = struck(training, kills, arguments.seed)
                print(f"{ranks} ranks, {side}: {found[side]}", flush=True)
        of_each = f" of {ranks} ranks" if ranks > 1 else ""
        rows += _rows(f"{WORKERS} workers{of_each}, {kills} kills", found)
    body = measure.document(rows, kills=kills, seed=arguments.seed, load_before=load_before, **settings)
    measure.publish("elastic", body, arguments.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
