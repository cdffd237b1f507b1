"""One rank's records: a line a step into the store, and the same lines to `/metrics`."""

from __future__ import annotations

import time
from dataclasses import replace

from mlpipe._core.load import Clock
from mlpipe._core.records import Record, Step, decode_line, encode
from mlpipe.observe.metrics import RankMetrics
from mlpipe.observe.records import records_key
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
        self._log = store.open_log(records_key(attempt_key, rank))
        self._rank = rank
        self._restart = restart
        self._metrics = metrics
        self._siblings = siblings
        self._clock, self._own = Clock.read() if siblings else None, time.process_time()

    def write(self, record: Record) -> None:
        """Says in it whose it is, and of a step now and then how busy the machine is."""
        if isinstance(record, Step):
            record = self._with_load(record)
        line = encode(replace(record, rank=self._rank, restart=self._restart))
        self._log.write(line)
        if self._metrics is not None and (read := decode_line(line)) is not None:
            self._metrics.observe(read)

    def _with_load(self, step: Step) -> Step:
        """Since the last one. All ranks of a node work alike, so what this one used they used, too."""
        before, own = self._clock, self._own
        if before is None or time.monotonic() - before.time < LOAD_SECONDS:
            return step
        self._clock, self._own = Clock.read(), time.process_time()
        load = before.until(self._clock, self._siblings * (self._own - own)) if self._clock else None
        if load is None:
            return step
        return replace(
            step,
            cpu_others_ratio=load.others_ratio,
            cpu_steal_ratio=load.steal_ratio,
            cpu_pressure_ratio=load.pressure_ratio,
        )

    def close(self) -> None:
        """Raises StoreError when the last lines cannot be written."""
        self._log.close()
        if self._metrics is not None:
            self._metrics.close()
