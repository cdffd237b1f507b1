"""What the planner expects of the changes that a profile of a run suggests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mlpipe._core.errors import MlpipeError
from mlpipe._core.pipelines import SCHEDULES, stages_per_rank
from mlpipe.api.pipeline import LoadedPipeline
from mlpipe.api.tuning.changes import is_allowed, possible_changes
from mlpipe.api.tuning.decide import LEAST_GAIN_RATIO, Change
from mlpipe.observe.plans import read_plan
from mlpipe.observe.profiles.findings import own_seconds
from mlpipe.observe.profiles.stored import StoredProfile
from mlpipe.observe.runview import RunView
from mlpipe.plan.candidates import priced
from mlpipe.plan.hardware import Hardware
from mlpipe.plan.plan import Plan
from mlpipe.plan.training import compare
from mlpipe.plan.work import TrainPlan
from mlpipe.store import runs
from mlpipe.store.base import Store
from mlpipe.store.runs import RunState
from mlpipe.submit import backends, planning

# By cause of a finding, the kinds of changes that are its remedy, of those whose seconds the planner knows.
_REMEDIES: Mapping[str, Sequence[str]] = {
    "collectives": ("strategy", "micro_batch"),
    "stages": ("schedule",),
}


@dataclass(frozen=True)
class Expected:
    """Of one cause: what to `set`, and the share of a step that it saves by the planner; nothing to set: no
    change of these kinds is so much faster that `mlpipe tune` could tell."""

    kinds: tuple[str, ...]
    sets: tuple[str, ...] = ()
    gain: float = 0.0


def with_gains(store: Store, view: RunView) -> RunView:
    """With what the planner expects, on each of its profiles: what the page says."""
    for stage in view.stages:
        stage.profiles = [
            replace(one, expected=words_of(expected_gains(store, view.run, one.attempt_key), one))
            for one in stage.profiles
        ]
    return view


def words_of(expected: Mapping[str, Expected], stored: StoredProfile) -> dict[str, str]:
    """By cause."""
    seconds = max(map(own_seconds, stored.ranks))
    return {cause: _words(one, seconds) for cause, one in expected.items()}


def _words(expected: Expected, seconds: float) -> str:
    """`seconds`: of a step."""
    if not expected.sets:
        kinds = " or ".join(kind.replace("_", "-") for kind in expected.kinds)
        return f"the planner expects no other {kinds} to be worth a try"
    saved = f"{1000 * seconds * expected.gain:.1f} ms, {100 * expected.gain:.1f} % of a step"
    return f"the planner expects to save {saved}, by --set {' --set '.join(expected.sets)}"


def expected_gains(store: Store, run: RunState, attempt_key: str) -> dict[str, Expected]:
    """By cause, as in `observe/profiles/findings.py`; a cause that is not there is not priced. Of its own
    model, hardware that is not known here, or an attempt before the run's last, nothing is."""
    stage = attempt_key.rsplit("/", 2)[1]
    if attempt_key != run.attempt_key(stage):
        return {}
    try:
        return dict(_gains(*_planned(store, run, stage)))
    except MlpipeError:
        return {}


def _planned(
    store: Store, run: RunState, stage: str
) -> tuple[LoadedPipeline, Plan, Hardware, dict[str, str]]:
    sets = tuple(map(str, run.meta.get("set", [])))
    spec = planning.load_stored(store, run.run_id, sets)
    pipeline = LoadedPipeline(run.run_id, runs.read_pipeline(store, run.run_id), sets, spec)
    plan = read_plan(store, run.attempt_key(stage))
    made = [name for name, state in run.stages.items() if state.state == "done"]
    inputs = dict(planning.peek_inputs(store, run.run_id, spec, stage, made))
    return pipeline, plan, backends.of_run(run).hardware(spec, stage), inputs


def _gains(
    pipeline: LoadedPipeline, plan: Plan, hardware: Hardware, inputs: Mapping[str, str]
) -> Iterator[tuple[str, Expected]]:
    candidates = compare(pipeline.spec, plan.stage, hardware, inputs)
    changes = possible_changes(pipeline, plan, candidates, hardware)
    ratios = {change.sets: (change.knob, change.expected_ratio) for change in changes}
    ratios |= {sets: ("schedule", ratio) for sets, ratio in _schedules(pipeline, plan, hardware)}
    for cause, kinds in _REMEDIES.items():
        # a ratio of exactly 1 is one that the planner does not know
        known = {sets: ratio for sets, (kind, ratio) in ratios.items() if kind in kinds and ratio != 1.0}
        if not known:
            continue
        best = min(known, key=lambda sets: known[sets])
        told = Expected(tuple(kinds), best, 1 - known[best])
        yield cause, told if told.gain >= LEAST_GAIN_RATIO else Expected(tuple(kinds))


def _schedules(
    pipeline: LoadedPipeline, plan: Plan, hardware: Hardware
) -> Iterator[tuple[tuple[str, ...], float]]:
    """Those with as many stages on a rank that the file may name and the memory holds."""
    train = plan.part(TrainPlan)
    if train is None or train.pipeline is None or train.predicted is None:
        return
    now = priced(train, hardware).step_seconds
    for schedule in SCHEDULES:
        if stages_per_rank(schedule) == stages_per_rank(train.pipeline.schedule):
            other = train._replace(pipeline=train.pipeline._replace(schedule=schedule))
            sets = (f"stages.{plan.stage}.train.pipeline.schedule={schedule}",)
            candidate = priced(other, hardware)
            if candidate.fits and is_allowed(pipeline, Change("schedule", sets)):
                yield sets, candidate.step_seconds / now
