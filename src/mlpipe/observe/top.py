"""The tables of `mlpipe top`: runs of a store, or the ranks of one training. From the store alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from mlpipe._core.errors import DamagedError
from mlpipe._core.records import Start, Step
from mlpipe._core.tables import aligned
from mlpipe._core.units import format_bytes, format_seconds
from mlpipe.observe.members import members
from mlpipe.observe.plans import read_plan
from mlpipe.observe.progress import Progress, Summary, format_count, format_loss, format_mfu
from mlpipe.observe.records import Follower, list_ranks
from mlpipe.plan.shares import SLOW_RATIO
from mlpipe.store import runs
from mlpipe.store.base import Store
from mlpipe.store.runs import RUN_ENDED, RunState

MOST_RANKS = 64  # that are followed
_RECENT_STEPS = 20


@dataclass(frozen=True)
class RunRow:
    """A run; `seconds`: since it was made, or from then to its end. `problem`: why it cannot be read."""

    run: str
    state: str
    seconds: float
    stage: str | None = None
    problem: str | None = None
    progress: Summary | None = None

    def document(self) -> dict[str, Any]:
        """Plain JSON, of what is known."""
        own = {name: value for name, value in vars(self).items() if name != "progress" and value is not None}
        return own if self.progress is None else {**own, **self.progress}


@dataclass(frozen=True)
class RankRow:
    """A rank: its last step, and means over its last ones. `straggler_score`: see `straggler_scores`. `left`:
    its replica takes no part in the elastic training now."""

    rank: int
    step: int
    time: float
    seconds: float
    data_seconds: float
    compute_seconds: float
    collective_seconds: float
    memory_bytes: int | None
    straggler_score: float
    left: bool = False

    def document(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)


def straggler_scores(local_seconds: Sequence[float], stages: Sequence[int]) -> list[float]:
    """Each rank's own time of a step (data and compute) over the median of those with the same `stages`: 1 is
    like the others. Only a rank's own time says anything: the whole step is equally long on all of them; and
    ranks of different stages of a pipeline have different work."""
    by_stage: dict[int, list[float]] = {}
    for seconds, stage in zip(local_seconds, stages, strict=True):
        by_stage.setdefault(stage, []).append(seconds)
    middles = {stage: median(of_stage) for stage, of_stage in by_stage.items()}
    return [
        seconds / middles[stage] if middles[stage] else 1.0
        for seconds, stage in zip(local_seconds, stages, strict=True)
    ]


class Top:
    """Follows a store. `runs()` and `ranks(run)` read what is new."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._progress: dict[str, tuple[Follower, Progress]] = {}
        self._ranks: dict[str, tuple[Follower, list[Step]]] = {}
        self._stages: dict[str, int] = {}
        self._per_replica: dict[str, int] = {}

    def runs(self, most: int) -> list[RunRow]:
        """The runs under way and the newest others, `most` in all, the newest first."""
        # 0: a build of Jenkins was asked for, and has not made the run
        listed = [run for run in runs.list_runs(self._store)[::-1] if run.seq > 0]
        live = [run for run in listed if run.state not in RUN_ENDED]
        over = [run for run in listed if run.state in RUN_ENDED]
        return [self.run(run.run_id) for run in (*live, *over[: max(most - len(live), 0)])][:most]

    def run(self, run_id: str) -> RunRow:
        """One of them, as it stands."""
        try:
            run = runs.read_run(self._store, run_id)
        except DamagedError as error:
            return RunRow(run_id, "damaged", 0.0, problem=str(error))
        seconds = (run.updated if run.state in RUN_ENDED else time.time()) - run.created
        stages = _stages_of(run)
        for name in stages:
            key = run.attempt_key(name)
            tail, progress = self._progress.setdefault(key, (Follower(self._store, key), Progress()))
            for record in tail.poll():
                progress.add(record)
            summary = progress.summary()
            if summary["last_step_time"] is not None:
                return RunRow(run_id, run.state, seconds, name, progress=summary)
        return RunRow(run_id, run.state, seconds, stages[0] if stages else None)

    def ranks(self, run_id: str) -> list[RankRow]:
        """Of the training under way, or of the last one; means over the last steps of each."""
        run = runs.read_run(self._store, run_id)
        keys = map(run.attempt_key, _stages_of(run))
        return next((rows for key in keys if (rows := self._ranks_of(key))), [])

    def _ranks_of(self, attempt_key: str) -> list[RankRow]:
        recent = {}
        for rank in list_ranks(self._store, attempt_key)[:MOST_RANKS]:
            place = f"{attempt_key}/{rank}"
            tail, steps = self._ranks.setdefault(place, (Follower(self._store, attempt_key, rank), []))
            for record in tail.poll():
                if isinstance(record, Step):
                    steps.append(record)
                elif isinstance(record, Start):
                    self._stages[place] = record.pipeline_stage(rank)
            del steps[:-_RECENT_STEPS]
            if steps:
                recent[rank] = steps
        data = [fmean(step.data_seconds or 0.0 for step in steps) for steps in recent.values()]
        compute = [fmean(step.compute_seconds or 0.0 for step in steps) for steps in recent.values()]
        stages = [self._stages.get(f"{attempt_key}/{rank}", 0) for rank in recent]
        # where load is moved, what it would take for an even share
        shares = [fmean(step.share_ratio or 1.0 for step in steps) for steps in recent.values()]
        spent = zip(data, compute, shares, strict=True)
        local = [(waited + computed) / share for waited, computed, share in spent]
        scores = straggler_scores(local, stages)
        taking_part = self._taking_part(attempt_key)
        return [
            RankRow(
                rank=rank,
                step=steps[-1].step,
                time=steps[-1].time,
                seconds=fmean(step.seconds or 0.0 for step in steps),
                data_seconds=waited,
                compute_seconds=computed,
                collective_seconds=fmean(map(_waited, steps)),
                memory_bytes=steps[-1].memory_bytes,
                straggler_score=score,
                left=taking_part is not None and rank not in taking_part,
            )
            for (rank, steps), waited, computed, score in zip(
                recent.items(), data, compute, scores, strict=True
            )
        ]

    def _taking_part(self, attempt_key: str) -> set[int] | None:
        """Ranks of the replicas that do; None of a training that is not elastic."""
        change = members(self._store, attempt_key)
        if change is None or change.members is None:
            return None
        if attempt_key not in self._per_replica:
            self._per_replica[attempt_key] = read_plan(self._store, attempt_key).launch.nproc_per_node
        number = self._per_replica[attempt_key]
        return {replica * number + rank for replica in change.members for rank in range(number)}


def _stages_of(run: RunState) -> list[str]:
    """Those under way first, then the ones that were started last."""
    started = [
        (stage.state == "running", stage.started, name) for name, stage in run.stages.items() if stage.started
    ]
    return [name for _, _, name in sorted(started, reverse=True)]


def runs_table(rows: Sequence[RunRow], now: float) -> list[str]:
    """Lines of text, heading first."""
    cells: list[tuple[str, ...]] = [
        ("RUN", "STATE", "FOR", "STAGE", "STEP", "LOSS", "TOK/S", "MFU", "ETA", "LAST STEP")
    ]
    for row in rows:
        shown = ("",) * 6 if row.progress is None else _of_progress(row.progress, row.state, now)
        replicas = None if row.progress is None else row.progress["replicas"]
        stage = (row.stage or "") + (f", {replicas} nodes" if replicas else "")
        cells.append((row.run, row.state, format_seconds(max(row.seconds, 0.0)), stage, *shown))
    problems = [f"damaged: {row.problem}" for row in rows if row.problem is not None]
    return [*aligned(cells, left=range(4)), *problems]


def _of_progress(summary: Summary, state: str, now: float) -> tuple[str, ...]:
    """STEP and what is right of it."""
    step, steps, rate, ratio = (
        summary["step"],
        summary["steps"],
        summary["tokens_per_second"],
        summary["mfu_ratio"],
    )
    eta, last = summary["eta_seconds"], summary["last_step_time"]
    live = state not in RUN_ENDED
    return (
        "" if step is None else f"{step}/{steps}" if steps else str(step),
        format_loss(summary["loss"]),
        "" if rate is None else format_count(rate),
        "" if ratio is None else format_mfu(ratio),
        "" if eta is None or not live else format_seconds(eta),
        "" if last is None or not live else f"{format_seconds(max(now - last, 0.0))} ago",
    )


def ranks_table(rows: Sequence[RankRow], now: float) -> list[str]:
    """The same for the ranks of a training; the slowest is marked where it is a fifth above the median."""
    cells: list[tuple[str, ...]] = [
        ("RANK", "STEP", "STEP TIME", "DATA", "COMPUTE", "WAITS", "SCORE", "MEMORY", "LAST STEP", "")
    ]
    worst = max((row.straggler_score for row in rows), default=0.0)
    for row in rows:
        spent = (row.seconds, row.data_seconds, row.compute_seconds, row.collective_seconds)
        cells.append(
            (
                str(row.rank),
                str(row.step),
                *(f"{1000 * seconds:.1f} ms" for seconds in spent),
                f"{row.straggler_score:.2f}",
                "" if row.memory_bytes is None else format_bytes(row.memory_bytes),
                f"{format_seconds(max(now - row.time, 0.0))} ago",
                "left" if row.left else "slow" if row.straggler_score == worst and worst > SLOW_RATIO else "",
            )
        )
    return aligned(cells, left=())


def _waited(step: Step) -> float:
    """For other ranks, of whatever kind."""
    return (step.collective_seconds or 0.0) + (step.bubble_seconds or 0.0)
