"""What the page of a run shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlpipe.observe.runview import RunView, view_run

if TYPE_CHECKING:
    from mlpipe.store.base import Store


def view_of_page(store: Store, run_id: str) -> RunView:
    """With what the planner expects of each profile's remedies; without any the planner is not imported."""
    view = view_run(store, run_id)
    if any(stage.profiles for stage in view.stages):
        from mlpipe.api.profiling import with_gains

        view = with_gains(store, view)
    return view
