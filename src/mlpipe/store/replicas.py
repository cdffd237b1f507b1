"""How many replicas of an elastic training are wanted: `attempt-<n>/replicas` in the store, put by whoever
scales it, looked at by its supervisor."""

from __future__ import annotations

from mlpipe.store.base import Store


def want(store: Store, attempt_key: str, number: int) -> None:
    """Until somebody wants another number."""
    store.put(f"{attempt_key}/replicas", str(number).encode())


def wanted(store: Store, attempt_key: str) -> int | None:
    """None: nobody has said."""
    key = f"{attempt_key}/replicas"
    return int(store.get(key)) if store.exists(key) else None
