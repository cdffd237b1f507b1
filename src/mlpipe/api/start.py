"""Starts runs from Python: in this process, or in the background on any backend."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from mlpipe._core.errors import SubmitError
from mlpipe.api.watch import Lines

if TYPE_CHECKING:
    from mlpipe.api.pipeline import LoadedPipeline
    from mlpipe.api.run import Run
    from mlpipe.store.base import Store
    from mlpipe.submit.backend import Backend
    from mlpipe.submit.submission import Submission


def run(
    pipeline: LoadedPipeline, *, run_id: str | None = None, store: str | None = None, quiet: bool = False
) -> Run:
    """Runs all stages here, and returns when they are done; how it goes is told on standard error unless
    `quiet`. `store`: a folder or `s3://bucket/prefix`; default: MLPIPE_STORE, the pipeline's, ./runs.

    Ctrl-C (or a notebook's stop button) saves at the next step and then raises KeyboardInterrupt, a second
    one stops at once; `Run(run_id).resume()` goes on. Raises SpecError, PlanError or SubmitError before
    anything starts, TrainError when a stage failed or was cancelled: its `kind` says whose fault it is.
    """
    from mlpipe.api.driving import drive
    from mlpipe.api.run import Run
    from mlpipe.submit import backends
    from mlpipe.submit.adopt import create
    from mlpipe.submit.driver import DriveOptions

    _check_single(pipeline)
    there, lines = open_store_of(pipeline, store), Lines(quiet=quiet)
    backend = backends.load(backends.DEFAULT)({})
    run_id = create(there, backend, submission_of(pipeline, there, run_id), lines)
    lines.note(f"run {run_id} in {there.url}")
    drive(there, run_id, DriveOptions(), lines)
    return Run.of(there, run_id).check()


def submit(
    pipeline: LoadedPipeline,
    backend: str = "",
    *,
    run_id: str | None = None,
    store: str | None = None,
    **options: Any,
) -> Run:
    """Starts a run that outlives this program, and returns as soon as it has a driver; `Run.wait` waits for
    it. `backend`: `local` (the default: processes of this machine), `kubernetes`, `slurm`, `jenkins`,
    `rented`, or another package's; `options`: those that it adds to `mlpipe submit`, such as
    `context="prod"`. A `run_id` that exists is adopted if it is of the same pipeline. Raises SpecError,
    PlanError or SubmitError."""
    from mlpipe.api.run import Run
    from mlpipe.submit.adopt import DriveRequest, claim
    from mlpipe.submit.delegate import Delegate

    _check_single(pipeline)
    place = chosen_backend(pipeline, backend, options)
    there, lines = open_store_of(pipeline, store), Lines(quiet=True)
    asked_for = submission_of(pipeline, there, run_id)
    if isinstance(place, Delegate):
        handed = place.hand_over(asked_for, there, lines, wait=False)
        return Run.of(there, handed.document["run_id"])
    made = claim(there, place, asked_for, lines)
    DriveRequest(place, there, made, pipeline.spec, None, lines).start_driver()
    return Run.of(there, made)


def chosen_backend(pipeline: LoadedPipeline, backend: str, options: dict[str, Any]) -> Backend:
    """The backend of this name, the default one for none, with what `options` say of it. Raises SubmitError
    (input) for an option that it does not have, and for one that it needs."""
    from mlpipe.submit import backends

    return backends.with_options(backends.load(backend or backends.DEFAULT), pipeline.spec, options)


def _check_single(pipeline: LoadedPipeline) -> None:
    if pipeline.spec.sweep is not None:
        raise SubmitError(
            "the pipeline has a sweep, which is not one run",
            where=pipeline.path,
            hint="mlpipe.sweep(pipeline) runs it; pipeline.override({'sweep': None}) makes it one run",
            kind="input",
        )


def open_store_of(pipeline: LoadedPipeline, store: str | None) -> Store:
    """`store`, else MLPIPE_STORE, else the pipeline's, else ./runs."""
    from mlpipe.store.open import default_url, open_store

    return open_store(default_url(store, pipeline.spec.store))


def submission_of(pipeline: LoadedPipeline, store: Store, run_id: str | None) -> Submission:
    """What is asked for, from the working folder of this process."""
    from mlpipe.submit.submission import Submission

    return Submission(
        pipeline.path,
        pipeline.text,
        pipeline.overrides,
        pipeline.spec,
        store.url,
        os.getcwd(),
        run_id=run_id,
    )
