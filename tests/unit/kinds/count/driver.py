"""Does it, in the driver's own process."""

from typing import Any

from mlpipe._core.errors import SubmitError
from mlpipe.plan.plan import Plan
from mlpipe.store import outputs
from mlpipe.store.base import Store


def run(store: Store, plan: Plan) -> dict[str, Any]:
    work: Any = plan.work
    folder = outputs.fetch_output(
        store, f"runs/{plan.run_id}/stages/{work.stage}", outputs.cache_folder() / "outputs"
    )
    words = len((folder / work.file).read_text().split())
    if words < work.at_least:
        raise SubmitError(f"{work.file} has {words} words, not {work.at_least}", kind="failed")
    return {"words": words}
