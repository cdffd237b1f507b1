"""The runs of a store as series: those that wait, run and are over, also when no process of theirs answers.

What is known lies in the store. A round lists the index (a LIST), reads what changed since the last one, and
follows the records of runs under way from where it stopped. A run that is over is read once; the newest
first, and only for so long a round, so that ten thousand old ones delay nothing. A scrape reads memory.

Series of single runs are served for runs under way and for the `recent` newest that are over; the sums
hold all runs that were read.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from mlpipe._core.errors import MlpipeError
from mlpipe._core.records import Start, Step
from mlpipe.observe.buckets import NAMES
from mlpipe.observe.goodput import Ledger, add
from mlpipe.observe.predicted import measured, predicted_usd
from mlpipe.observe.records import Follower
from mlpipe.observe.runview import RunView, view_run
from mlpipe.observe.series import FLEET_METRICS
from mlpipe.store import leases, runs
from mlpipe.store.base import Store
from mlpipe.store.runs import RUN_ENDED, RunState, RunSummary

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

RECENT_RUNS = 100
# Between two looks at where the time of a run under way goes; and of the exporter's time, a look that takes
# long (all records of many steps) may take a part.
_LEDGER_SECONDS = 60.0
_LEDGER_SHARE = 0.02


@dataclass(frozen=True)
class _Size:
    """Of a training: bytes at the peak, seconds of a step, USD so far."""

    memory_bytes: float
    step_seconds: float
    usd: float | None


@dataclass
class _Known:
    """A run as it was read last. `next_ledger`: monotonic time, before which its records are left alone."""

    summary: RunSummary
    run: RunState
    device: str = ""
    ledger: Ledger | None = None
    next_ledger: float = float("-inf")
    sizes: dict[tuple[str, str], _Size] = field(default_factory=dict)
    """By stage and "measured" or "predicted"."""
    fallbacks: dict[str, float] = field(default_factory=dict)
    """By stage: when it last went back behind a damaged checkpoint."""

    @property
    def over(self) -> bool:
        """Whether nothing of it will change."""
        return self.run.state in RUN_ENDED

    @property
    def failure(self) -> tuple[str, str, float] | None:
        """Stage, cause and time of the first stage that failed."""
        failed = [
            (stage.ended or self.run.updated, name, stage)
            for name, stage in self.run.stages.items()
            if stage.state == "failed"
        ]
        if self.run.state != "failed" or not failed:
            return None
        when, name, stage = min(failed, key=lambda one: one[0])
        return name, str(stage.outcome.get("cause") or stage.outcome.get("kind") or "unknown"), when


class Fleet:
    """What a scrape is answered from. `round` reads the store; a scrape meanwhile sees the round before."""

    def __init__(self, store: Store, *, recent: int = RECENT_RUNS) -> None:
        self._store = store
        self._recent = recent
        self._known: dict[str, _Known] = {}
        self._tails: dict[tuple[str, str, int], tuple[Follower, float]] = {}
        self._values: dict[str, dict[tuple[str, ...], float]] = {}
        self._lock = threading.Lock()

    def round(self, seconds: float = 5.0) -> None:
        """One look at the store; `seconds`: for reading runs that are over, about. Raises StoreError when the
        index cannot be listed."""
        began, now = time.time(), time.monotonic()
        listed = runs.list_runs(self._store)
        known = {run.run_id: self._known[run.run_id] for run in listed if run.run_id in self._known}
        changed = [run for run in reversed(listed) if self._is_news(known.get(run.run_id), run)]
        # those under way first, then the newest
        changed.sort(key=lambda run: run.state in RUN_ENDED)
        unread = 0
        for run in changed:
            if run.state in RUN_ENDED and time.monotonic() - now > seconds:
                unread += 1
                continue
            if (now_known := self._read(run, known.get(run.run_id))) is not None:
                known[run.run_id] = now_known
        self._known = known
        live = {run_id for run_id, one in known.items() if not one.over}
        self._tails = {place: tail for place, tail in self._tails.items() if place[0] in live}
        values = self._sums(listed, unread) | self._single(listed)
        values["mlpipe_fleet_last_round_timestamp_seconds"] = {(): time.time()}
        values["mlpipe_fleet_round_duration_seconds"] = {(): time.time() - began}
        with self._lock:
            self._values = values

    @property
    def under_way(self) -> list[RunState]:
        """Runs that were not over at the last look."""
        return [one.run for one in self._known.values() if not one.over]

    def _is_news(self, known: _Known | None, run: RunSummary) -> bool:
        return known is None or run.state not in RUN_ENDED or run.seq != known.summary.seq

    def _read(self, summary: RunSummary, before: _Known | None) -> _Known | None:
        """None where it cannot be read: it may be half written, or gone."""
        try:
            run = runs.read_run(self._store, summary.run_id)
            if before is not None and run.state not in RUN_ENDED and time.monotonic() <= before.next_ledger:
                return replace(before, summary=summary, run=run)
            return self._read_ledger(summary, run)
        except MlpipeError:
            return before

    def _read_ledger(self, summary: RunSummary, run: RunState) -> _Known:
        """With all records of its trainings."""
        began = time.monotonic()
        view = view_run(self._store, summary.run_id)
        devices = [s.plan.launch.device for s in view.stages if s.plan is not None and s.training]
        ledger, now = view.ledger, time.monotonic()
        return _Known(
            summary,
            run,
            device=devices[-1] if devices else "",
            ledger=ledger,
            next_ledger=now + max(_LEDGER_SECONDS, (now - began) / _LEDGER_SHARE),
            sizes=_sizes(view),
            fallbacks={
                stage.name: max(stage.fallback_times) for stage in view.stages if stage.fallback_times
            },
        )

    def _sums(self, listed: list[RunSummary], unread: int) -> dict[str, dict[tuple[str, ...], float]]:
        states = Counter(run.state for run in listed)
        causes = Counter(one.failure[1] for one in self._known.values() if one.failure)
        spent: dict[tuple[str, ...], float] = {}
        priced = []
        for one in self._known.values():
            if one.ledger is None:
                continue
            for bucket in NAMES:
                labels = (bucket, one.device)
                spent[labels] = spent.get(labels, 0.0) + one.ledger.seconds[bucket]
            if one.ledger.cost_usd is not None:
                priced.append(one.ledger)
        whole = add(priced)
        return {
            "mlpipe_fleet_runs": {
                (state,): float(states[state]) for state in ("pending", "running", *RUN_ENDED)
            },
            "mlpipe_fleet_failed_runs": {(cause,): float(count) for cause, count in causes.items()},
            "mlpipe_fleet_unread_runs": {(): float(unread)},
            "mlpipe_fleet_rank_seconds": spent,
            "mlpipe_fleet_cost_usd": {(): whole.cost_usd or 0.0},
            "mlpipe_fleet_badput_usd": {(): whole.badput_usd or 0.0},
        }

    def _single(self, listed: list[RunSummary]) -> dict[str, dict[tuple[str, ...], float]]:
        """Of runs under way, and of the newest that are over."""
        values: dict[str, dict[tuple[str, ...], float]] = {
            metric.name: {} for metric in FLEET_METRICS if metric.labels[:1] == ("run",)
        }
        there = [self._known[run.run_id] for run in listed if run.run_id in self._known]
        over = sorted((one for one in there if one.over), key=lambda one: one.run.updated)
        for one in [one for one in there if not one.over] + over[-self._recent :]:
            run, ledger = one.run, one.ledger
            name = (run.run_id, run.pipeline)
            values["mlpipe_run_state_info"][*name, run.state, run.backend] = 1.0
            if one.failure is not None:
                stage, cause, when = one.failure
                values["mlpipe_run_failed_timestamp_seconds"][*name, stage, cause] = when
            if not one.over:
                if (since := leases.undriven_since(run)) is not None:
                    values["mlpipe_run_undriven_timestamp_seconds"][name] = since
                for stage, when in self._last_steps(run):
                    values["mlpipe_run_last_step_timestamp_seconds"][*name, stage] = when
            if url := run.meta.get("jenkins_url"):
                build = str(run.meta.get("jenkins_build") or "")
                values["mlpipe_run_build_info"][*name, build, str(url)] = 1.0
            for stage, when in one.fallbacks.items():
                values["mlpipe_run_fallback_timestamp_seconds"][*name, stage] = when
            for (stage, kind), size in one.sizes.items():
                if size.usd is not None:
                    values["mlpipe_run_training_cost_usd"][*name, stage, kind] = size.usd
                values["mlpipe_run_memory_bytes"][*name, stage, kind] = size.memory_bytes
                values["mlpipe_run_step_seconds"][*name, stage, kind] = size.step_seconds
            if ledger is None or ledger.goodput_ratio is None:
                continue
            values["mlpipe_run_goodput_ratio"][name] = ledger.goodput_ratio
            for bucket in NAMES:
                values["mlpipe_run_rank_seconds"][*name, bucket] = ledger.seconds[bucket]
            money = ledger.document()
            for what in ("cost_usd", "badput_usd", "usd_per_million_tokens"):
                if money[what] is not None:
                    values[f"mlpipe_run_{what}"][name] = money[what]
        return values

    def _last_steps(self, run: RunState) -> Iterator[tuple[str, float]]:
        """(stage, time) of the stages under way that have records."""
        for name, stage in run.stages.items():
            if stage.state != "running" or stage.started is None:
                continue
            place = (run.run_id, name, stage.attempt)
            follower = Follower(self._store, run.attempt_key(name))
            tail, last = self._tails.pop(place, (follower, 0.0))
            try:
                records = tail.poll()
            except MlpipeError:
                records = []
            for record in records:
                if isinstance(record, Start | Step):
                    last = max(last, record.time)
            self._tails[place] = (tail, last)
            if last:
                yield name, last

    def collect(self) -> Iterator[Family]:
        """What prometheus_client calls at a scrape."""
        from prometheus_client.core import GaugeMetricFamily

        with self._lock:
            values = self._values
        for metric in FLEET_METRICS:
            family = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
            for labels, value in values.get(metric.name, {}).items():
                family.add_metric(labels, value)
            yield family


def _sizes(view: RunView) -> dict[tuple[str, str], _Size]:
    sizes = {}
    for stage in view.stages:
        if stage.training is None or (real := measured(stage)) is None:
            continue
        paid = stage.ledger.cost_usd if stage.ledger is not None else None
        sizes[stage.name, "measured"] = _Size(*real, paid)
        if (told := stage.training.predicted) is not None:
            expected = _Size(float(told.memory_bytes), told.step_seconds, predicted_usd(stage))
            sizes[stage.name, "predicted"] = expected
    return sizes
