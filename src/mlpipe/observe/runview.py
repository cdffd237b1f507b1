"""Everything the store knows about one run, gathered for a report.

What is missing or cannot be read becomes a line in `problems`: a report of a run that went wrong is the
one that matters most, so it is written whatever else is broken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from statistics import fmean
from typing import Any, TypeVar

from mlpipe._core.cpu_load import Load
from mlpipe._core.errors import StoreError
from mlpipe._core.record_lines import NOT_STARTED, read_fields
from mlpipe._core.records import Evaluation, Fallback, Launched, Record, Start, Submitted
from mlpipe._core.serial import read_json
from mlpipe.kinds.evaluate.plan import EvaluatePlan
from mlpipe.observe.goodput import Attempt, Ledger, account, add
from mlpipe.observe.profiles.stored import StoredProfile, profiles_of_stage
from mlpipe.observe.records import Timeline, decode_lines, list_attempts, list_ranks, merge, read_records
from mlpipe.plan.plan import AnyWork, Plan
from mlpipe.plan.work import TrainPlan
from mlpipe.store.base import Store
from mlpipe.store.catalogue import Checkpoint, list_checkpoints
from mlpipe.store.preflight import Checked, read_checked
from mlpipe.store.runs import RunState, StageState, read_run

MOST_RANKS = 16  # ranks that are read and drawn
_MOST_STEPS_OF_A_PEER = 1000  # rank 0 is read in full
T = TypeVar("T")


@dataclass
class AttemptView:
    """One attempt of a stage, as it left its files."""

    number: int
    plan: Plan | None
    outcome: dict[str, Any]  # outcome.json; {} while it runs or when its launcher was killed
    events: list[Record]
    preflight: Checked | None = None  # of one whose machines were checked


@dataclass
class StageView:
    """One stage over all its attempts and restarts."""

    name: str
    state: StageState
    attempts: list[AttemptView] = field(default_factory=list)
    num_ranks: int = 0  # that wrote records
    timelines: dict[int, Timeline] = field(default_factory=dict)  # by rank, the first MOST_RANKS
    checkpoints: list[Checkpoint] = field(default_factory=list)  # committed now
    profiles: list[StoredProfile] = field(default_factory=list)
    ledger: Ledger | None = None  # of a training that was started

    @property
    def plan(self) -> Plan | None:
        """Of the last attempt that has one."""
        return next((a.plan for a in reversed(self.attempts) if a.plan is not None), None)

    @property
    def kind(self) -> str:
        """Its name; "" before the first attempt was planned."""
        return self.plan.kind.name if self.plan is not None else ""

    @property
    def training(self) -> TrainPlan | None:
        """Of a stage that trains."""
        return self.part(TrainPlan)

    def part(self, plan: type[AnyWork]) -> AnyWork | None:
        """What the stage does, if that is of the class `plan`."""
        return self.plan.part(plan) if self.plan is not None else None

    @property
    def outcome(self) -> dict[str, Any]:
        """Of the last attempt, as its launcher left it; else as the driver knows it."""
        left = self.attempts[-1].outcome if self.attempts else {}
        return left or self.state.outcome or {}

    @property
    def lead(self) -> Timeline:
        """Rank 0's timeline."""
        return self.timelines.get(0) or Timeline()

    @property
    def start(self) -> Start:
        """The last start record of rank 0, or NOT_STARTED."""
        return self.lead.starts[-1][1] if self.lead.starts else NOT_STARTED

    @property
    def seconds(self) -> float | None:
        """From the stage's start to its end; None while either is unknown."""
        if self.state.started is None or self.state.ended is None:
            return None
        return self.state.ended - self.state.started

    @property
    def fallback_times(self) -> list[float]:
        """When it went back behind damaged checkpoints, in Unix seconds."""
        return [
            event.time for attempt in self.attempts for event in attempt.events if isinstance(event, Fallback)
        ]

    @property
    def evaluation(self) -> Evaluation | None:
        """Of an evaluate stage, from its record and its outcome, which holds where both say something."""
        metrics = self.outcome.get("metrics")
        told = {
            name: self.outcome[name] for name in ("passed", "sample") if self.outcome.get(name) is not None
        }
        if isinstance(metrics, dict):
            named = {item.name for item in fields(Evaluation)}
            own = {name: value for name, value in metrics.items() if name not in named}
            told |= metrics | ({"metrics": own} if own else {})
        if self.lead.evaluation is None and not told:
            return None
        plan = self.part(EvaluatePlan)
        gate = plan.gate if plan is not None else None
        recorded = self.lead.evaluation.values() if self.lead.evaluation is not None else {"time": 0.0}
        known = {name: value for name, value in recorded.items() if value is not None}
        return read_fields(Evaluation, {"gate": gate, **known, **told})


def worst_load(stage: StageView) -> Load | None:
    """Of the node whose CPUs others used most, over all its steps; None where no record says."""
    loads = []
    for timeline in stage.timelines.values():
        others = _known(step.cpu_others_ratio for step in timeline.steps)
        steal = _known(step.cpu_steal_ratio for step in timeline.steps)
        pressure = _known(step.cpu_pressure_ratio for step in timeline.steps)
        if others:
            loads.append(Load(fmean(others), fmean(steal or [0.0]), fmean(pressure) if pressure else None))
    return max(loads, key=lambda load: load.others_ratio + load.steal_ratio, default=None)


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


@dataclass
class RunView:
    """A run, its stages, and in `problems` what could not be read."""

    run: RunState
    stages: list[StageView]  # in the order of the pipeline
    problems: list[str]

    @property
    def seconds(self) -> float | None:
        """From the first stage's start to the last one's end; to the last change while it runs."""
        started = [stage.state.started for stage in self.stages if stage.state.started is not None]
        ended = [stage.state.ended for stage in self.stages if stage.state.ended is not None]
        if not started:
            return None
        last = self.run.updated if self.run.state == "running" or not ended else max(ended)
        return max(last - min(started), 0.0)

    @property
    def ledger(self) -> Ledger | None:
        """Of all trainings of the run; None without one."""
        ledgers = [stage.ledger for stage in self.stages if stage.ledger is not None]
        return add(ledgers) if ledgers else None

    def goodput(self) -> dict[str, Any]:
        """Where the time went and what it cost, for `--output json`: of each training and of the run."""
        stages = {stage.name: stage.ledger.document() for stage in self.stages if stage.ledger is not None}
        return {"stages": stages, "run": self.ledger.document() if self.ledger is not None else None}


def view_run(store: Store, run_id: str) -> RunView:
    """Raises StoreError when the run does not exist or the store cannot be reached."""
    run = read_run(store, run_id)
    problems: list[str] = []
    stages = [view_stage(store, run_id, name, stage, problems) for name, stage in run.stages.items()]
    return RunView(run, stages, problems)


def view_stage(store: Store, run_id: str, name: str, state: StageState, problems: list[str]) -> StageView:
    """Adds to `problems` what cannot be read."""
    stage = StageView(name, state)
    stage_key = f"runs/{run_id}/stages/{name}"
    records: dict[int, dict[int, list[Record]]] = {}  # by rank, by attempt
    ranks: set[int] = set()
    for number in list_attempts(store, stage_key):
        key = f"{stage_key}/attempt-{number}"
        plan = _readable(store, f"{key}/plan.json", Plan.from_json, problems)
        asked = plan is not None and plan.launch.preflight is not None
        stage.attempts.append(
            AttemptView(
                number,
                plan=plan,
                outcome=_readable(store, f"{key}/outcome.json", _json_object, problems) or {},
                events=_events(store, f"{key}/events.jsonl"),
                preflight=read_checked(store, key) if asked else None,
            )
        )
        written = list_ranks(store, key)
        ranks.update(written)
        for rank in _read_of(written, stage.training):
            most = None if rank == 0 else _MOST_STEPS_OF_A_PEER
            records.setdefault(rank, {})[number] = read_records(store, key, rank, max_steps=most)
    stage.num_ranks = len(ranks)
    stage.timelines = {rank: merge(records[rank]) for rank in sorted(records)}
    stage.ledger = _ledger(stage, records)
    try:
        stage.checkpoints = list_checkpoints(store, stage_key)
    except StoreError as error:
        problems.append(f"The checkpoints of stage {name} cannot be listed: {error.message}.")
    if stage.training is not None:
        try:
            stage.profiles = profiles_of_stage(store, stage_key)
        except StoreError as error:
            problems.append(f"The profiles of stage {name} cannot be read: {error}.")
    return stage


def _read_of(written: Sequence[int], training: TrainPlan | None) -> list[int]:
    """The first ranks; in place of the last of them one that counts tokens, where none of them does."""
    read = list(written[:MOST_RANKS])
    if training is None or len(written) == len(read) or max(written) >= training.mesh.world_size:
        return read
    counting = [rank for rank in written if training.mesh.holds_loss(rank)]
    if counting and not set(counting) & set(read):
        read[-1] = counting[0]
    return read


def _ledger(stage: StageView, records: Mapping[int, Mapping[int, list[Record]]]) -> Ledger | None:
    """Where an attempt left no event (it was killed, or is older than events), its records say when it began
    and ended; of one that is under way, the time since its last record is not counted yet."""
    plan = stage.plan
    if plan is None or stage.training is None:
        return None
    attempts = []
    for view in stage.attempts:
        read = {rank: by_attempt.get(view.number, []) for rank, by_attempt in records.items()}
        own = {rank: lines for rank, lines in read.items() if lines}
        times = [record.time for lines in own.values() for record in (lines[0], lines[-1])]
        # a task of a sweep's array begins before its driver comes
        told = [event.time for event in view.events if isinstance(event, Submitted | Launched)]
        launched = next((event.time for event in view.events if isinstance(event, Launched)), None)
        began = min(told or times, default=None)
        is_last = view is stage.attempts[-1]
        if began is None and is_last:
            began = stage.state.started
        if began is None or view.plan is None:
            continue
        over = view.outcome.get("time")  # when its driver heard of that says nothing: it may have been away
        if isinstance(over, float) and 0 < over < math.inf:
            ended = max(began, *times, over)
        else:
            ended = max([began, *times, *(event.time for event in view.events)])
            if is_last and stage.state.ended is not None:
                ended = max(ended, stage.state.ended)
        if launched is None and own:
            launched = began
        mesh, hung = view.plan.work.training.mesh, view.outcome.get("cause") == "hang"
        counting = frozenset(filter(mesh.holds_loss, range(mesh.world_size)))
        attempts.append(Attempt(began, launched, ended, mesh.world_size, own, hung, counting))
    # Of an elastic training the first replica is counted: how long which others were paid, nobody has summed.
    price = plan.price_usd_per_device_hour if plan.launch.replicas is None else None
    return account(attempts, price)


def _readable(store: Store, key: str, parse: Callable[[bytes], T], problems: list[str]) -> T | None:
    if not store.exists(key):
        return None
    try:
        return parse(store.get(key))
    except (StoreError, ValueError) as error:
        problems.append(f"{key} cannot be read: {error}")
        return None


def _json_object(data: bytes) -> dict[str, Any]:
    value = read_json(data)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def _events(store: Store, key: str) -> list[Record]:
    data, _ = store.read_log(key)
    return decode_lines(data.split(b"\n"))
