"""One tuning of a training: its trials, remembered in a file as they are made, and what they say."""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from mlpipe._core.cpus import num_cpus, processor
from mlpipe._core.errors import PlanError
from mlpipe._core.files import locked, write_whole
from mlpipe._core.serial import from_json, to_json
from mlpipe.api.pipeline import LoadedPipeline
from mlpipe.api.tuning.changes import possible_changes
from mlpipe.api.tuning.decide import Change, Config, TimeOverError, TuningResult, search, sets_of
from mlpipe.api.tuning.trials import RUN_ID, Trials, shortened
from mlpipe.plan.machine import torch
from mlpipe.plan.training import compare
from mlpipe.store import outputs
from mlpipe.store.base import Store
from mlpipe.store.open import open_store
from mlpipe.store.runs import RunState, update_run
from mlpipe.submit import planning
from mlpipe.submit.backend import Backend
from mlpipe.submit.held_lease import HeldLease
from mlpipe.submit.standby import Standbys
from mlpipe.submit.submission import Console

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Trial:
    """`sets`: what it changed. `seconds`: of a step; None: it did not run."""

    sets: tuple[str, ...]
    seconds: float | None


@dataclass(frozen=True)
class Tuned:
    """The file. `key`: of what was tuned, and where. `sets`: what to change, as `--set` takes it; empty:
    nothing is to be gained, or known yet. `ratio`: seconds of a step with it over those without."""

    schema_version: int
    key: str
    stage: str
    sets: tuple[str, ...] = ()
    ratio: float = 1.0
    noise_ratio: float = 0.0
    is_complete: bool = False
    trials: tuple[Trial, ...] = ()


@dataclass
class Tuning:
    """`steps`: of a trial. `seconds`: for all of it. `out`: the file, with which a tuning goes on. `store`:
    of trials on a cluster; those here have one of their own. `knobs`: what is tried, else
    all."""

    pipeline: LoadedPipeline
    stage: str
    steps: int
    seconds: float
    out: Path
    console: Console
    backend: Backend
    store: Store | None = None
    knobs: Sequence[str] = ()
    _made: list[Trial] = field(default_factory=list)
    _before: list[Trial] = field(default_factory=list)  # trials of an earlier call, in their order

    def run(self) -> tuple[TuningResult, Tuned]:
        """What was found, and the file as it was left. Raises PlanError and SubmitError."""
        key = self._key()
        folder = outputs.cache_folder() / "tune" / key
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / "lock", 1.0, "been tuning the same training"):
            self._before = self._remembered(key)
            short = shortened(self.pipeline, self.stage, self.steps)
            deadline = time.monotonic() + self.seconds
            store, run_id = self.store, f"{self.pipeline.spec.name[:40]}-tune-{key[:8]}"
            if store is None:
                store, run_id = open_store(str(folder)), RUN_ID
            held = HeldLease(store, run_id) if self.store is not None else nullcontext()
            with closing(Standbys(starts=True)) as standbys:
                trials = Trials(
                    short, self.stage, store, os.getcwd(), deadline, self.console.note, self.backend, run_id,
                    standbys,
                )  # fmt: skip
                trials.prepare(self.console)
                with held:
                    result = self._search(trials, key)
            if self.store is not None and result.is_complete:
                update_run(store, run_id, _ended)  # nobody is to drive it
            tuned = self._file(key, result)
            write_whole(self.out, to_json(tuned))
            return result, tuned

    def _search(self, trials: Trials, key: str) -> TuningResult:
        changes = self._asked(changes_of(trials))
        if not changes:
            raise PlanError("there is nothing to change", where=f"stage {self.stage!r}")
        names = ", ".join(dict.fromkeys(change.knob for change in changes))
        self.console.note(f"{len(changes)} changes of {names}; trials of {self.steps} steps")
        return search(changes, lambda config: self._measure(trials, config, key))

    def _asked(self, changes: list[Change]) -> list[Change]:
        kinds = dict.fromkeys(change.knob for change in changes)
        if odd := [knob for knob in self.knobs if knob not in kinds]:
            hint = f"there are {', '.join(kinds)}"
            raise PlanError(f"no change of {odd[0]!r} is possible", where="--only", hint=hint)
        return [change for change in changes if not self.knobs or change.knob in self.knobs]

    def _measure(self, trials: Trials, config: Config, key: str) -> float | None:
        sets = sets_of(config)
        words = ", ".join(_short(item, self.stage) for item in sets) or "as it is"
        if self._before and self._before[0].sets == sets:
            trial = self._before.pop(0)
        else:
            self._before = []  # another way from here on
            if time.monotonic() > trials.deadline:
                raise TimeOverError("time is over")
            trial = Trial(sets, trials.seconds(config))
        self._made.append(trial)
        write_whole(self.out, to_json(Tuned(SCHEMA_VERSION, key, self.stage, trials=tuple(self._made))))
        if trial.seconds is not None:
            self.console.note(f"  {1000 * trial.seconds:8.1f} ms  {words}")
        return trial.seconds

    def _remembered(self, key: str) -> list[Trial]:
        """Of the file, if it is of the same training on the same machine. Raises PlanError for another."""
        if not self.out.exists():
            return []
        try:
            before = from_json(Tuned, self.out.read_bytes())
        except (OSError, ValueError) as error:
            raise PlanError(
                f"not what mlpipe tune writes: {error}", where=str(self.out), hint="name another with --out"
            ) from None
        wrong = [t.seconds for t in before.trials if t.seconds is not None and not 0 < t.seconds < math.inf]
        if wrong or before.schema_version != SCHEMA_VERSION:
            what = f"a step of {wrong[0]} s" if wrong else f"version {before.schema_version}"
            raise PlanError(
                f"not what this mlpipe tune writes: {what}",
                where=str(self.out),
                hint="name another with --out, or remove it",
            )
        if before.key != key:
            raise PlanError(
                "it is of another training, folder, machine, or number of steps",
                where=str(self.out),
                hint="name another with --out, or remove it",
            )
        trials = list(before.trials)
        while trials and trials[-1].seconds is None:
            trials.pop()  # what failed last is tried again: it may have been what stopped the search
        if trials:
            self.console.note(f"going on after {len(trials)} trials of {self.out}")
        return trials

    def _key(self) -> str:
        text = [
            self.pipeline.text,
            *self.pipeline.overrides,
            self.stage,
            str(self.steps),
            os.getcwd(),
        ]
        if self.store is None:
            text += [processor(), str(num_cpus()), torch()]
        else:
            text += [self.store.url, self.backend.name]
        return hashlib.sha256("\0".join(text).encode()).hexdigest()[:16]

    def _file(self, key: str, result: TuningResult) -> Tuned:
        return Tuned(
            SCHEMA_VERSION,
            key,
            self.stage,
            sets_of(result.best),
            result.ratio,
            result.noise_ratio,
            result.is_complete,
            tuple(self._made),
        )


def changes_of(trials: Trials) -> list[Change]:
    """Which may help. What the stage needs has run."""
    spec, stage = trials.pipeline.spec, trials.stage
    plan, hardware = trials.plan(()), trials.backend.hardware(spec, stage)
    trials.backend.check_plan(plan)
    made = [name for name in trials.pipeline.stages if name in planning.needs(spec)[stage]]
    inputs = planning.peek_inputs(trials.store, trials.run_id, spec, stage, made)
    return possible_changes(trials.pipeline, plan, compare(spec, stage, hardware, inputs), hardware)


def _ended(run: RunState) -> RunState:
    stages = {
        name: stage if stage.state == "done" else replace(stage, state="skipped")
        for name, stage in run.stages.items()
    }
    return replace(run, state="done", message="trials of mlpipe tune", stages=stages)


def _short(item: str, stage: str) -> str:
    return item.removeprefix(f"stages.{stage}.")
