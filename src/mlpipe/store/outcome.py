"""`outcome.json`: how an attempt ended. What ran it (a launcher, the pod of a command) leaves it in the
store; its driver reads it, keeps it in run.json, and reports show it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from mlpipe._core.errors import DamagedError, ErrorKind
from mlpipe._core.serial import from_plain, read_json
from mlpipe.store.base import Store

NODE_FAULT = "node_fault"


@dataclass(frozen=True)
class AttemptOutcome:
    """`outcome`: "done", "saved" (on a signal, before the last step) or "failed". `kind`: whose fault a
    failure is; `cause`: "not_finite", "hang", "out_of_memory" or NODE_FAULT, which are told apart from other
    failures. `step`: the last that is done, `checkpoint`: the last committed one. `restarts`: how many there
    were. `time`: Unix seconds. `details`: what a kind of stages adds, beside these in the file."""

    outcome: str
    kind: ErrorKind | None = None
    cause: str | None = None
    message: str = ""
    where: str | None = None
    hint: str | None = None
    step: int | None = None
    checkpoint: str | None = None
    restarts: int = 0
    exit_code: int = 0
    time: float = 0.0
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_plain(self) -> dict[str, Any]:
        """The document."""
        return {**{name: getattr(self, name) for name in _NAMES}, **self.details}

    @staticmethod
    def from_plain(document: Mapping[str, Any]) -> AttemptOutcome:
        """Of this version or another, which may lack what is new."""
        known = {name: document[name] for name in _NAMES if name in document}
        details = {name: value for name, value in document.items() if name not in known}
        return replace(from_plain(AttemptOutcome, known), details=details)


_NAMES = tuple(item.name for item in fields(AttemptOutcome) if item.name != "details")


def write_outcome(store: Store, key: str, outcome: AttemptOutcome) -> None:
    """`key`: of the file; each node of a gang has its own. Raises StoreError."""
    store.put(key, json.dumps(outcome.to_plain(), indent=2).encode())


def read_outcome(store: Store, key: str) -> AttemptOutcome | None:
    """None if there is none: what ran the attempt was killed, or still runs. Raises StoreError; DamagedError
    for what no launcher has written."""
    if not store.exists(key):
        return None
    try:
        document = read_json(store.get(key))
        if not isinstance(document, dict):
            raise ValueError("not an object")
        return AttemptOutcome.from_plain(document)
    except ValueError as error:
        raise DamagedError(f"not an attempt's outcome: {error}", where=f"{store.url}/{key}") from error
