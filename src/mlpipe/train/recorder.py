"""One rank's records: a line a step into the store, and the same lines to `/metrics`."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, TypeVar

from mlpipe._core.cpu_load import Clock
from mlpipe._core.record_lines import decode_line, encode
from mlpipe._core.records import Record, Step
from mlpipe.observe.metrics import RankMetrics
from mlpipe.observe.records import records_key
from mlpipe.store.base import Store

AnyRecord = TypeVar("AnyRecord", bound=Record)
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
        self._log = store.open_log(records_key(attempt_key, rank))
        self._rank = rank
        self._restart = restart
        self._metrics = metrics
        self._siblings = siblings
        self._clock, self._own = Clock.read() if siblings else None, time.process_time()

    def write(self, record: AnyRecord) -> AnyRecord:
        """Says in it whose it is, and of a step now and then how busy the machine is. Returns what was
        written."""
        load = self._load() if isinstance(record, Step) else {}
        record = replace(record, rank=self._rank, restart=self._restart, **load)
        line = encode(record)
        self._log.write(line)
        if self._metrics is not None and (read := decode_line(line)) is not None:
            self._metrics.observe(read)
        return record

    def validating(self) -> None:
        """To the metrics: no step will end for a while."""
        if self._metrics is not None:
            self._metrics.validating()

    def _load(self) -> dict[str, Any]:
        """Fields of a step: since the last one that has them. All ranks of a node work alike, so what this
        one used they used, too."""
        before, own = self._clock, self._own
        if before is None or time.monotonic() - before.time < LOAD_SECONDS:
            return {}
        self._clock, self._own = Clock.read(), time.process_time()
        load = before.until(self._clock, self._siblings * (self._own - own)) if self._clock else None
        if load is None:
            return {}
        return {
            "cpu_others_ratio": load.others_ratio,
            "cpu_steal_ratio": load.steal_ratio,
            "cpu_pressure_ratio": load.pressure_ratio,
        }

    def close(self) -> None:
        """Raises StoreError when the last lines cannot be written."""
        self._log.close()
        if self._metrics is not None:
            self._metrics.close()
