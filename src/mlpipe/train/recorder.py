"""One rank's records: a line a step into the store, and the same lines to `/metrics`."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import Any

from mlpipe._core import records
from mlpipe._core.load import Clock
from mlpipe.observe.metrics import RankMetrics
from mlpipe.store.base import Store

LOAD_SECONDS = 5.0  # /proc/stat counts hundredths of a second


class Recorder:
    """`siblings`: ranks of this node, if this is the first of them, which looks at the machine; else 0."""

    def __init__(
        self,
        store: Store,
        attempt_key: str,
        *,
        rank: int,
        restart: int,
        metrics: RankMetrics | None,
        siblings: int = 0,
    ) -> None:
        self._log = store.open_log(f"{attempt_key}/records/rank-{rank}.jsonl")
        self._rank = rank
        self._restart = restart
        self._metrics = metrics
        self._siblings = siblings
        self._clock, self._own = Clock.read() if siblings else None, time.process_time()

    def write(self, kind: str, **fields: Any) -> None:
        if kind == "step" and self._clock is not None and time.monotonic() - self._clock.time >= LOAD_SECONDS:
            fields |= self._load()
        line = records.encode(kind, rank=self._rank, restart=self._restart, **fields)
        self._log.write(line)
        if self._metrics is not None:
            self._metrics.observe(json.loads(line))

    def _load(self) -> dict[str, float | None]:
        """Since the last one. All ranks of a node work alike, so what this one used they used, too."""
        before, own = self._clock, self._own
        self._clock, self._own = Clock.read(), time.process_time()
        if before is None or self._clock is None:
            return {}
        load = before.until(self._clock, self._siblings * (self._own - own))
        return {f"cpu_{name}": value for name, value in asdict(load).items()} if load is not None else {}

    def close(self) -> None:
        self._log.close()
        if self._metrics is not None:
            self._metrics.close()
