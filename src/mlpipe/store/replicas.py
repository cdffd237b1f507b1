"""What an elastic training's store knows of its replicas: how many are wanted, `attempt-<n>/replicas`, put by
whoever scales it; where they meet, `attempt-<n>/coordinator`, if they are not told; how each ended; and
`attempt-<n>/left-out`, nodes that were too slow for them, put by what drives them."""

from __future__ import annotations

import json
import re
from typing import Any

from mlpipe._core.serial import read_json
from mlpipe.store.base import Store
from mlpipe.store.outcome import AttemptOutcome, read_outcome
from mlpipe.store.preflight import NODE

SEAT_SECONDS = 30.0
_OF_REPLICA = re.compile(r"outcome-replica-([0-9]+)\.json")


def want(store: Store, attempt_key: str, number: int) -> None:
    """Until somebody wants another number."""
    store.put(f"{attempt_key}/replicas", str(number).encode())


def wanted(store: Store, attempt_key: str) -> int | None:
    """None: nobody has said, or no number."""
    key = f"{attempt_key}/replicas"
    try:
        return int(store.get(key)) if store.exists(key) else None
    except ValueError:  # workers may write what they like
        return None


def leave_out(store: Store, attempt_key: str, node: str) -> None:
    """Of all replicas to come. One driver at a time calls it. Raises StoreError."""
    nodes = [*left_out(store, attempt_key), node]
    store.put(f"{attempt_key}/left-out", json.dumps(nodes).encode())


def left_out(store: Store, attempt_key: str) -> list[str]:
    """Names of nodes; what is none is passed over: it would stand in what is submitted. Raises StoreError."""
    key = f"{attempt_key}/left-out"
    nodes = _read(store.get(key)) if store.exists(key) else []
    nodes = nodes if isinstance(nodes, list) else []
    return [node for node in nodes if isinstance(node, str) and NODE.fullmatch(node)]


def coordinator(store: Store, attempt_key: str) -> str:
    """Of the one that has the seat: token@host:port. "" while there is none."""
    key = f"{attempt_key}/coordinator"
    return _where(store.get(key)) if store.exists(key) else ""


def outcomes(store: Store, attempt_key: str) -> dict[int, AttemptOutcome]:
    """By the number of the replica: how its launcher ended last, if it left word. Raises StoreError."""
    found = {}
    for info in store.list(attempt_key, recursive=False):
        name = _OF_REPLICA.fullmatch(info.key.rpartition("/")[2])
        if name is not None and (outcome := read_outcome(store, info.key)) is not None:
            found[int(name[1])] = outcome
    return found


def _read(document: bytes) -> Any:
    """None: it is no JSON, as what a worker writes need not be."""
    try:
        return read_json(document)
    except ValueError:
        return None


def _where(document: bytes) -> str:
    found = _read(document)
    return str(found.get("where", "")) if isinstance(found, dict) else ""


class Seat:
    """Of the one coordinator of an attempt. It is taken when whoever had it has not renewed it for
    `SEAT_SECONDS`, by the clock of who waits: clocks of machines differ."""

    def __init__(self, store: Store, attempt_key: str, where: str) -> None:
        self._store, self._key, self._where = store, f"{attempt_key}/coordinator", where
        self._count = 0
        self._etag = ""

    def try_to_take(self, seen: str) -> tuple[bool, str]:
        """Whether it is ours now, and the etag of what is there. `seen`: the one that has not changed for
        `SEAT_SECONDS`, or ""."""
        if not self._store.exists(self._key):
            if self._store.put_if_absent(self._key, self._body()):
                self._etag = self._store.get_with_etag(self._key)[1]
                return True, self._etag
            return False, ""
        _, etag = self._store.get_with_etag(self._key)
        if etag != seen:
            return False, etag
        self._etag = etag
        return self.renew(), etag

    def renew(self) -> bool:
        """False: it is another's. Raises StoreError."""
        self._count += 1
        self._store.put_if_match(self._key, self._body(), self._etag)  # also if only its answer was lost
        data, self._etag = self._store.get_with_etag(self._key)
        return _where(data) == self._where

    def give_up(self) -> None:
        """For whoever waits for it; only while it is ours for sure. Raises StoreError."""
        self._store.delete([self._key])

    def _body(self) -> bytes:
        return json.dumps({"where": self._where, "renewed": self._count}).encode()
