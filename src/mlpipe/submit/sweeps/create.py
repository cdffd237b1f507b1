"""Makes a sweep in the store, and of each trial a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlpipe._core.errors import MlpipeError, SubmitError
from mlpipe._core.files import check_name
from mlpipe._core.ids import new_run_id
from mlpipe.spec.load import load_pipeline_text
from mlpipe.spec.sweep import ID_CHARACTERS, Sweep
from mlpipe.spec.trials import num_trials, overrides_of, planned
from mlpipe.store.base import Store
from mlpipe.store.sweeps import trial_name, trial_run_id
from mlpipe.submit.adopt import probe, record
from mlpipe.submit.backend import Backend
from mlpipe.submit.submission import Console, Submission
from mlpipe.submit.sweeps.slots import part_of_machine
from mlpipe.submit.sweeps.tpe import suggest

_NAME_CHARACTERS = 34  # of the pipeline, in an id that leaves room for the trial's number


def create(store: Store, backend: Backend, submission: Submission, console: Console) -> str:
    """The id of a new sweep, of which nothing runs yet. Raises what `Backend.check` raises of its first
    trial, before anything is written, and StoreError (input) when the id is taken."""
    pipeline = submission.pipeline
    sweep = sweep_of(submission)
    sweep_id = submission.run_id or new_run_id(pipeline.name[:_NAME_CHARACTERS])
    if len(sweep_id) > ID_CHARACTERS:
        raise SubmitError(
            f"{sweep_id!r} is too long for a sweep",
            hint=f"write at most {ID_CHARACTERS} characters",
            kind="input",
        )
    for name in (submission.folder, submission.spec):
        check_name(name)
    names = [trial_name(number) for number in range(num_trials(sweep))]
    values = dict(zip(names, planned(sweep), strict=False))
    first = trial_submission(submission, sweep_id, names[0], values.get(names[0]) or suggest(sweep, 0, ()))
    _check(backend, first, console, slots_of(sweep))
    probe(store, backend)
    return record(
        store,
        backend,
        replace(submission, run_id=sweep_id),
        names,
        over=list(sweep.over),
        trials=values,
        metric={"name": sweep.metric.name, "mode": sweep.metric.direction},
        method=sweep.method,
    )


def slots_of(sweep: Sweep) -> int:
    """Parts of this machine: no more than there are trials."""
    return min(sweep.max_parallel, num_trials(sweep))


def _check(backend: Backend, first: Submission, console: Console, num_slots: int) -> None:
    """Raises what `Backend.check` raises. On this machine the first part is the smallest, and with fewer GPUs
    than parts the last has none."""
    if backend.has_own_driver or num_slots == 1:
        backend.check(first, console, is_new=True)
        return
    parts = [_Part(console), _Part(console)]
    for slot, part in zip((0, num_slots - 1), parts, strict=True):
        try:
            with part_of_machine(backend, slot, num_slots):
                backend.check(first, part, is_new=True)
        except MlpipeError as error:
            told = f"each trial has 1/{num_slots} of this machine: lower sweep.max_parallel"
            error.hint = f"{error.hint}; {told}" if error.hint else told
            raise
    for text in max((part.notes for part in parts), key=len):  # the part that lacks more
        console.note(text)


class _Part:
    """Keeps what is noted of a part of this machine, which the other one's check says again."""

    def __init__(self, console: Console) -> None:
        self.quiet, self.complain = console.quiet, console.complain
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def sweep_of(submission: Submission) -> Sweep:
    """Raises SubmitError (input) for a pipeline without one."""
    if submission.pipeline.sweep is None:
        raise SubmitError(
            "the pipeline has no sweep",
            where=submission.spec,
            hint="add 'sweep: {over: {seed: 0..3}}', or run it once with `mlpipe run`",
            kind="input",
        )
    return submission.pipeline.sweep


def trial_submission(
    submission: Submission, sweep_id: str, trial: str, values: Mapping[str, Any]
) -> Submission:
    """Of the run that a trial is: the same file with overrides. Raises SpecErrors."""
    overrides = (*submission.overrides, *overrides_of(values))
    pipeline = load_pipeline_text(submission.text, submission.spec, overrides=overrides)
    return replace(
        submission, overrides=overrides, pipeline=pipeline, run_id=trial_run_id(sweep_id, trial), stage=None
    )
