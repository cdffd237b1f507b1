"""One rank's records: a line a step into the store, and the same lines to `/metrics`."""

from __future__ import annotations

import json
from typing import Any

from mlpipe._core import records
from mlpipe.observe.metrics import RankMetrics
from mlpipe.store.base import Store


class Recorder:
    def __init__(
        self, store: Store, attempt_key: str, *, rank: int, restart: int, metrics: RankMetrics | None
    ) -> None:
        self._log = store.open_log(f"{attempt_key}/records/rank-{rank}.jsonl")
        self._rank = rank
        self._restart = restart
        self._metrics = metrics

    def write(self, kind: str, **fields: Any) -> None:
        line = records.encode(kind, rank=self._rank, restart=self._restart, **fields)
        self._log.write(line)
        if self._metrics is not None:
            self._metrics.observe(json.loads(line))

    def close(self) -> None:
        self._log.close()
        if self._metrics is not None:
            self._metrics.close()
