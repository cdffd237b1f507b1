"""Goes on with a run whose backend has drivers of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlpipe.submit import seal
from mlpipe.submit.adopt import DriveRequest
from mlpipe.submit.changes import prepare
from mlpipe.submit.submission import Submission

if TYPE_CHECKING:
    from mlpipe.store.base import Store
    from mlpipe.store.runs import RunState
    from mlpipe.submit.backend import Backend
    from mlpipe.submit.driver import DriveOptions
    from mlpipe.submit.submission import Console


def go_on_there(
    console: Console, store: Store, run: RunState, backend: Backend, options: DriveOptions
) -> DriveRequest:
    """Gives the run, changed as `options` say, a driver of its backend's. Raises what cannot be changed, or
    run, before anything is."""
    only, run_id = options.only, run.run_id
    before = seal.verified(store, run, digests=None, trust_store=options.trust_store)
    pipeline = prepare(store, run, before, options.changes, only).pipeline
    changed = seal.changed(before, options.changes.overrides)
    spec = f"runs/{run_id}/pipeline.yaml"
    submission = Submission(
        spec, changed.pipeline, changed.overrides, pipeline, store.url, changed.folder, only, run_id
    )
    # raises for what cannot run, or is refused, before anything is changed
    backend.preview(submission, console, on_server=backend.has_server_dry_run)
    request = DriveRequest(backend, store, run_id, pipeline, only, console)
    request.go_on(run, options.changes, before)
    return request
