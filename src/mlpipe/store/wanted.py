"""Which stages of a run somebody asked for and no driver has taken up yet.

    runs/<run-id>/wanted/<stage>    put by `submit --stage`, deleted by the driver

A run has one driver, which walks all stages that are asked for at once; whoever else asks only follows.
Put means asked. Deleted means taken up: by then run.json says that the stage runs or has ended, or that the
run was cancelled. So one who waits can tell a stage that failed before from one that failed on this asking,
and knows when nobody has heard it: the key is there and the run has no driver. Then it starts one.
"""

from __future__ import annotations

from collections.abc import Iterable

from mlpipe.store.base import Store


def ask(store: Store, run_id: str, stage: str) -> None:
    """Has the run's driver walk `stage`, too. Asking twice is asking once."""
    store.put(_key(run_id, stage), b"wanted")


def is_asked(store: Store, run_id: str, stage: str) -> bool:
    """Whether somebody has asked for `stage`."""
    return store.exists(_key(run_id, stage))


def asked(store: Store, run_id: str) -> list[str]:
    """The stages, by name."""
    listed = store.list(f"runs/{run_id}/wanted", recursive=False)
    return [info.key.rpartition("/")[2] for info in listed if not info.key.endswith("/")]


def take(store: Store, run_id: str, stages: Iterable[str]) -> None:
    """No error for one that is not asked for."""
    store.delete([_key(run_id, stage) for stage in stages])


def _key(run_id: str, stage: str) -> str:
    return f"runs/{run_id}/wanted/{stage}"
