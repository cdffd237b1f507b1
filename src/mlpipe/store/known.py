"""What this machine remembers, for its user: the stores that it has used, and how runs were asked for there.

    $XDG_STATE_HOME/mlpipe/stores/<sha256 of the URL>/url             the store's URL
    $XDG_STATE_HOME/mlpipe/stores/<sha256 of the URL>/<run-id>.json   the seal of a run, see `submit/seal.py`

Others write into a store; nobody but the user writes here. A machine that cannot keep this works without.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from mlpipe._core.errors import MlpipeError, StoreError
from mlpipe._core.files import state_folder, write_whole
from mlpipe.store.base import Store
from mlpipe.store.open import open_store
from mlpipe.store.runs import sweep_of_trial


class NoRunError(StoreError):
    """No store that was asked has the run: nobody has ever claimed its id there."""


_MAX_STORES = 20  # that are asked for a run; those that were used last


def remember(url: str) -> None:
    """This machine has used the store now."""
    with contextlib.suppress(OSError):
        write_whole(_of(url) / "url", url)


def keep_seal(url: str, run_id: str, text: str) -> None:
    """Keeps the run's seal on this machine, where it can."""
    remember(url)
    with contextlib.suppress(OSError):
        write_whole(_of(url) / f"{run_id}.json", text)


def read_seal(url: str, run_id: str) -> str | None:
    """None: the run was not asked for on this machine."""
    try:
        return (_of(url) / f"{run_id}.json").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def stores() -> list[str]:
    """URLs, the one that was used last first."""
    kept = []
    for path in (state_folder() / "stores").glob("*/url"):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            kept.append((path.stat().st_mtime, path.read_text(encoding="utf-8")))
    return [url for _, url in sorted(kept, reverse=True)][:_MAX_STORES]


def is_claimed(store: Store, run_id: str) -> bool:
    """Whether the run is in the store, if only half (`runs.create_run`)."""
    return any(store.exists(f"runs/{run_id}/{name}") for name in ("run.json", "pipeline.yaml"))


def is_known(store: Store, run_id: str) -> bool:
    """The same, or a build of Jenkins was asked to make it, or it is a trial that its sweep is to begin."""
    if is_claimed(store, run_id) or store.exists(f"runs/{run_id}/jenkins.json"):
        return True
    return sweep_of_trial(store, run_id) is not None


def find(run_id: str, urls: Sequence[str], *, timeout_seconds: float) -> tuple[list[Store], list[str]]:
    """Which of the stores have the run, and which did not say within `timeout_seconds`."""
    answers: dict[str, Store | None] = {}

    def look(url: str) -> None:
        with contextlib.suppress(MlpipeError, OSError):
            store = open_store(url)
            answers[url] = store if is_known(store, run_id) else None

    threads = [threading.Thread(target=look, args=(url,), daemon=True) for url in urls]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    said = dict(answers)
    return [one for url in urls if (one := said.get(url))], [url for url in urls if url not in said]


def _of(url: str) -> Path:
    return state_folder() / "stores" / hashlib.sha256(url.encode()).hexdigest()[:16]
