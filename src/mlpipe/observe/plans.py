"""Plans out of the store."""

from __future__ import annotations

from mlpipe._core.errors import DamagedError
from mlpipe.plan.plan import Plan
from mlpipe.store.base import Store


def read_plan(store: Store, attempt_key: str) -> Plan:
    """As which an attempt was begun. Raises StoreError; DamagedError for what no driver has written."""
    key = f"{attempt_key}/plan.json"
    try:
        return Plan.from_json(store.get(key))
    except ValueError as error:
        raise DamagedError(f"not a plan: {error}", where=f"{store.url}/{key}") from error
