"""Which store has a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlpipe.store.base import Store

_SEARCH_SECONDS = 15.0  # for all stores together that may have a run
_NUM_NAMED = 3  # stores without it, of those that were used last


def store_of(
    run_id: str, store: Store, *, elsewhere: bool, note: Callable[[str], None] = lambda text: None
) -> Store:
    """The one that has the run: `store` or, with `elsewhere`, another that this machine has used. Raises
    NoRunError where none has it, saying where it looked, and StoreError (input) where several have."""
    from mlpipe._core.errors import StoreError
    from mlpipe._core.ids import is_name
    from mlpipe._core.printable import in_one_line
    from mlpipe.store import known
    from mlpipe.store.open import one_spelling

    if not is_name(run_id):
        raise StoreError(f"{run_id!r} is not a run id", hint="mlpipe list shows them", kind="input")
    if known.is_known(store, run_id):
        known.remember(store.url)
        return store
    others = [url for url in known.stores() if url != store.url] if elsewhere else []
    found, silent = known.find(run_id, others, timeout_seconds=_SEARCH_SECONDS)
    stores = list({one_spelling(one.url): one for one in found}.values())
    if not stores:
        from difflib import get_close_matches

        from mlpipe.store.runs import list_runs

        asked = [in_one_line(url) for url in others if url not in silent]
        more = f", nor in {len(asked) - _NUM_NAMED} more" if len(asked) > _NUM_NAMED else ""
        looked = "".join(f"; not in {url} either" for url in asked[:_NUM_NAMED]) + more
        if silent:
            more = f" and {len(silent) - 1} more" if len(silent) > 1 else ""
            looked += f"; {in_one_line(silent[0])}{more} could not be asked"
        near = get_close_matches(run_id, [run.run_id for run in list_runs(store)], n=1)
        raise known.NoRunError(
            f"there is no run {run_id}{looked}",
            where=store.url,
            hint=f"{f'did you mean {near[0]}? ' if near else ''}mlpipe list shows the runs of a store; "
            "name another with --store",
            kind="input",
        )
    if len(stores) > 1:
        raise StoreError(
            f"several stores have a run {run_id}: {', '.join(in_one_line(one.url) for one in stores)}",
            hint="say which with --store",
            kind="input",
        )
    note(f"run {run_id} is in {in_one_line(stores[0].url)}")
    return stores[0]
