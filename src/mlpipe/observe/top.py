"""The tables of `mlpipe top`: runs of a store, or the ranks of one training. From the store alone."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from mlpipe._core.errors import DamagedError
from mlpipe._core.tables import aligned
from mlpipe._core.units import format_bytes, format_seconds
from mlpipe.observe.progress import Progress, format_count, format_loss, format_mfu
from mlpipe.observe.records import Follower, Record, list_ranks
from mlpipe.store import runs
from mlpipe.store.base import Store
from mlpipe.store.runs import RUN_ENDED, RunState

MOST_RANKS = 64  # that are followed
_RECENT_STEPS = 20
_PARTS = ("data_seconds", "compute_seconds", "collective_seconds")


def straggler_scores(local_seconds: Sequence[float]) -> list[float]:
    """Each rank's own time of a step (data and compute) over the median of all: 1 is like the others. Only a
    rank's own time says anything: the whole step is equally long on all of them."""
    middle = median(local_seconds) if local_seconds else 0.0
    return [seconds / middle if middle else 1.0 for seconds in local_seconds]


class Top:
    """Follows a store. `runs()` and `ranks(run)` read what is new and return rows of plain JSON."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._progress: dict[str, tuple[Follower, Progress]] = {}
        self._ranks: dict[str, tuple[Follower, list[Record]]] = {}

    def runs(self, most: int) -> list[dict[str, Any]]:
        """The runs under way and the newest others, `most` in all, the newest first."""
        # 0: a build of Jenkins was asked for, and has not made the run
        listed = [run for run in runs.list_runs(self._store)[::-1] if run.seq > 0]
        live = [run for run in listed if run.state not in RUN_ENDED]
        over = [run for run in listed if run.state in RUN_ENDED]
        return [self._run(run.run_id) for run in (*live, *over[: max(most - len(live), 0)])][:most]

    def _run(self, run_id: str) -> dict[str, Any]:
        try:
            run = runs.read_run(self._store, run_id)
        except DamagedError as error:
            return {"run": run_id, "state": "damaged", "seconds": 0.0, "problem": str(error)}
        row: dict[str, Any] = {"run": run_id, "state": run.state, "seconds": time.time() - run.created}
        if run.state in RUN_ENDED:
            row["seconds"] = run.updated - run.created
        for name in _stages_of(run):
            row.setdefault("stage", name)
            key = run.attempt_key(name)
            tail, progress = self._progress.setdefault(key, (Follower(self._store, key), Progress()))
            for record in tail.poll():
                progress.add(record)
            found = progress.summary()
            if found["last_step_time"] is not None:
                return {**row, "stage": name, **found}
        return row

    def ranks(self, run_id: str) -> list[dict[str, Any]]:
        """Of the training under way, or of the last one; means over the last steps of each."""
        run = runs.read_run(self._store, run_id)
        keys = map(run.attempt_key, _stages_of(run))
        return next((rows for key in keys if (rows := self._ranks_of(key))), [])

    def _ranks_of(self, attempt_key: str) -> list[dict[str, Any]]:
        rows = []
        for rank in list_ranks(self._store, attempt_key)[:MOST_RANKS]:
            place = f"{attempt_key}/{rank}"
            tail, steps = self._ranks.setdefault(place, (Follower(self._store, attempt_key, rank), []))
            steps += [record for record in tail.poll() if record["kind"] == "step"]
            del steps[:-_RECENT_STEPS]
            if steps:
                row: dict[str, Any] = {"rank": rank, "step": steps[-1]["step"], "time": steps[-1]["time"]}
                row |= {field: _mean(steps, field) for field in ("seconds", *_PARTS)}
                rows.append({**row, "memory_bytes": steps[-1].get("memory_bytes")})
        scores = straggler_scores([row["data_seconds"] + row["compute_seconds"] for row in rows])
        return [{**row, "straggler_score": score} for row, score in zip(rows, scores, strict=True)]


def _stages_of(run: RunState) -> list[str]:
    """Those under way first, then the ones that were started last."""
    started = [
        (stage.state == "running", stage.started, name) for name, stage in run.stages.items() if stage.started
    ]
    return [name for _, _, name in sorted(started, reverse=True)]


def _mean(steps: Iterable[Record], field: str) -> float:
    values = [step.get(field) or 0.0 for step in steps]
    return sum(values) / len(values)


def runs_table(rows: Sequence[dict[str, Any]], now: float) -> list[str]:
    """Lines of text, heading first."""
    cells: list[tuple[str, ...]] = [
        ("RUN", "STATE", "FOR", "STAGE", "STEP", "LOSS", "TOK/S", "MFU", "ETA", "LAST STEP")
    ]
    for row in rows:
        step, steps, loss, last = (row.get(key) for key in ("step", "steps", "loss", "last_step_time"))
        live = row["state"] not in RUN_ENDED
        eta = row.get("eta_seconds") if live else None
        cells.append(
            (
                row["run"],
                row["state"],
                format_seconds(max(row["seconds"], 0.0)),
                row.get("stage", ""),
                "" if step is None else f"{step}/{steps}" if steps else str(step),
                "" if loss is None else format_loss(loss),
                "" if row.get("tokens_per_second") is None else format_count(row["tokens_per_second"]),
                "" if row.get("mfu_ratio") is None else format_mfu(row["mfu_ratio"]),
                "" if eta is None else format_seconds(eta),
                "" if last is None or not live else f"{format_seconds(max(now - last, 0.0))} ago",
            )
        )
    problems = [f"damaged: {row['problem']}" for row in rows if "problem" in row]
    return [*aligned(cells, left=range(4)), *problems]


def ranks_table(rows: Sequence[dict[str, Any]], now: float) -> list[str]:
    """The same for the ranks of a training; the slowest is marked where it is a fifth above the median."""
    cells: list[tuple[str, ...]] = [
        ("RANK", "STEP", "STEP TIME", "DATA", "COMPUTE", "WAITS", "SCORE", "MEMORY", "LAST STEP", "")
    ]
    worst = max((row["straggler_score"] for row in rows), default=0.0)
    for row in rows:
        score = row["straggler_score"]
        memory = row["memory_bytes"]
        cells.append(
            (
                str(row["rank"]),
                str(row["step"]),
                *(f"{1000 * row[field]:.1f} ms" for field in ("seconds", *_PARTS)),
                f"{score:.2f}",
                "" if memory is None else format_bytes(memory),
                f"{format_seconds(max(now - row['time'], 0.0))} ago",
                "slow" if score == worst and score > 1.2 else "",
            )
        )
    return aligned(cells, left=())
