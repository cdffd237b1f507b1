"""A run that a build of Jenkins was asked to make: what is known of it before the build has made it.

runs/<run-id>/jenkins.json      BuildRequest: where, and the pipeline itself (created once, never changed)
index/<run-id>/000000-queued    so that `mlpipe list` shows it; the run's own keys come after it
"""

from __future__ import annotations

from dataclasses import dataclass

from mlpipe._core.errors import StoreError, SubmitError
from mlpipe._core.ids import is_name
from mlpipe._core.serial import from_json, to_json
from mlpipe.store import runs
from mlpipe.store.base import Store

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class BuildRequest:
    """`pipeline`: its resolved YAML, whose sha256 is `spec_digest`. `jenkins`: the controller's URL."""

    schema_version: int
    run_id: str
    jenkins: str
    job: str
    spec_digest: str
    pipeline: str


def ask(store: Store, asked: BuildRequest) -> bool:
    """Writes it down; False if it was there already. Raises SubmitError (input) where the id belongs to
    another pipeline."""
    new = store.put_if_absent(key_of(asked.run_id), to_json(asked).encode())
    kept = asked if new else read(store, asked.run_id)
    if kept is not None and kept.spec_digest != asked.spec_digest:
        raise SubmitError(
            f"run {asked.run_id} was asked for with another pipeline",
            where=store.url,
            hint="choose another --run-id",
            kind="input",
        )
    store.put_if_absent(f"index/{asked.run_id}/000000-queued", b"")
    return new


def read(store: Store, run_id: str) -> BuildRequest | None:
    """None where no build was asked for."""
    if not is_name(run_id) or not store.exists(key_of(run_id)):
        return None
    try:
        kept = from_json(BuildRequest, store.get(key_of(run_id)))
    except (ValueError, RecursionError) as error:
        raise StoreError(f"not what a build was asked for: {error}", where=key_of(run_id)) from error
    if kept.schema_version != SCHEMA_VERSION:
        raise StoreError(
            f"run {run_id} was asked for by another version of mlpipe (schema {kept.schema_version})",
            where=key_of(run_id),
            kind="input",
        )
    return kept


def forget(store: Store, run_id: str) -> None:
    """Nothing came of it: the id is free again."""
    store.delete([key_of(run_id), f"index/{run_id}/000000-queued"])


def give_up(store: Store, run_id: str) -> None:
    """It was cancelled before there was a run."""
    runs.clear_claim(store, run_id)
    store.delete([f"index/{run_id}/000000-queued"])
    store.put_if_absent(f"index/{run_id}/000000-cancelled", b"")


def key_of(run_id: str) -> str:
    """Where the store has the request."""
    return f"runs/{run_id}/jenkins.json"
