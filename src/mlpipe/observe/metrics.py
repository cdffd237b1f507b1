"""`/metrics` of one rank, fed with the very records that the rank writes.

The names stand in `series.py`. Counters start at 0, so that `rate` sees the first increment; timestamps start
at the start of the process, so that no staleness alert fires on a gauge of 0.

Importable without prometheus_client; `start_metrics` then returns None and says so.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from mlpipe._core.records import Record, Save, Start, Step, Validation
from mlpipe.observe.gpu import find_gpu
from mlpipe.observe.series import EXPERT_METRICS, GPU_METRICS, INFO_LABELS, METRICS, SOME_METRICS
from mlpipe.observe.serve import Serving

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

_log = logging.getLogger(__name__)


class _Histogram:
    """Cumulative counts are made at the scrape; a step only touches one bucket and the sum."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """One more measurement."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, how many were at most that), as Prometheus wants buckets."""
        total = 0
        rows: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            rows.append((bound, float(total)))
        return rows


class RankMetrics:
    """The series of one rank and the server that shows them. Build it with `start_metrics`."""

    def __init__(
        self,
        run: str,
        stage: str,
        rank: int,
        *,
        info: Mapping[str, str] | None = None,
        gpu_uuid: str | None = None,
    ) -> None:
        """`info`: values for labels of mlpipe_run_info that records do not know (git_sha, jenkins_build)."""
        self.port = 0
        self._gpu = gpu = find_gpu(gpu_uuid)
        self._rank = rank
        self._labels = (run, stage, str(rank))
        self._info = dict(info or {})
        self._lock = threading.Lock()  # a scrape sees whole steps
        self._values: dict[str, dict[tuple[str, ...], float]] = {}
        self._histograms: dict[str, _Histogram] = {}
        self._flops_per_token = 0.0
        self._hardware_flops_per_token = 0.0
        self._on_gpu = False
        self._serving: Serving | None = None
        now = time.time()
        own = tuple(m for m in METRICS if m.ranks == "every" or rank == 0)
        own += EXPERT_METRICS + SOME_METRICS if rank == 0 else ()
        self._served = own if gpu is None else own + GPU_METRICS
        for metric in self._served:
            if metric.type == "histogram":
                self._histograms[metric.name] = _Histogram(metric.buckets)
            elif metric.source == "NVML" or metric in SOME_METRICS:
                self._values[metric.name] = {}
            elif metric.type == "counter":
                self._values[metric.name] = {(): 0.0}
            else:
                stamped = metric.name.endswith("_timestamp_seconds")
                self._values[metric.name] = {(): now} if stamped else {}

    def observe(self, record: Record) -> None:
        """Takes a record as it was written; a kind without metrics is ignored."""
        with self._lock:
            match record:
                case Start():
                    self._observe_start(record)
                case Step():
                    self._observe_step(record)
                case Save():
                    self._observe_save(record)
                case Validation():
                    self._set("mlpipe_train_validating", 0.0)
                    last = self._values["mlpipe_train_last_step_timestamp_seconds"]
                    last[()] = max(last[()], record.time)
                    self._add("mlpipe_validation_seconds_total", record.seconds)
                    for name, value in (record.metrics or {}).items():
                        self._set("mlpipe_validation_metric", value, (name,))

    def validating(self) -> None:
        """From now on, until the record of the validation comes."""
        with self._lock:
            self._set("mlpipe_train_validating", 1.0)

    def _observe_start(self, record: Start) -> None:
        self._flops_per_token = record.num_flops_per_token or 0.0
        hardware = record.num_hardware_flops_per_token
        self._hardware_flops_per_token = self._flops_per_token if hardware is None else hardware
        self._on_gpu = record.device_type == "cuda"
        self._set("mlpipe_train_peak_flops", record.peak_flops)
        self._set("mlpipe_train_target_steps", record.steps)
        self._set("mlpipe_train_world_size", record.world_size)
        self._set("mlpipe_train_start_timestamp_seconds", record.time)
        self._set("mlpipe_train_step", record.start_step)
        self._set("mlpipe_train_validating", 0.0)
        known = {
            "strategy": record.strategy,
            "world_size": record.world_size,
            "pipeline_stage": record.pipeline_stage(self._rank),
            "device": record.device,
            "precision": record.precision,
            **self._info,
        }
        labels = tuple("" if known.get(name) is None else str(known[name]) for name in INFO_LABELS)
        self._values["mlpipe_run_info"] = {labels: 1.0}

    def _observe_step(self, record: Step) -> None:
        tokens = record.tokens or 0
        if record.seconds is not None:
            self._histograms["mlpipe_train_step_duration_seconds"].observe(record.seconds)
        self._add("mlpipe_train_data_wait_seconds_total", record.data_seconds)
        self._add("mlpipe_train_compute_seconds_total", record.compute_seconds)
        self._add("mlpipe_train_collective_wait_seconds_total", record.collective_seconds)
        self._add("mlpipe_train_bubble_seconds_total", record.bubble_seconds)
        self._add("mlpipe_train_membership_seconds_total", record.membership_seconds)
        self._set("mlpipe_train_replicas", record.replicas)
        self._add("mlpipe_train_steps_total", 1)
        self._add("mlpipe_train_tokens_total", tokens)
        self._add("mlpipe_train_model_flops_total", tokens * self._flops_per_token)
        self._add("mlpipe_train_hardware_flops_total", tokens * self._hardware_flops_per_token)
        self._set("mlpipe_train_achievable_flops", record.achievable_flops)
        self._set("mlpipe_train_slowness_ratio", record.slowness_ratio)
        self._set("mlpipe_train_step", record.step)
        self._set("mlpipe_train_mfu_ratio", record.mfu_ratio)
        self._set("mlpipe_train_learning_rate", record.lr)
        self._set("mlpipe_train_loss_scale", record.loss_scale)
        self._add("mlpipe_train_skipped_steps_total", record.skipped)
        self._add("mlpipe_train_exchanged_bytes_total", record.exchanged_bytes)
        self._add("mlpipe_train_exchanged_plain_bytes_total", record.exchanged_plain_bytes)
        self._set("mlpipe_train_peak_flops", record.peak_flops)
        self._set("mlpipe_train_loss", record.loss)
        self._set("mlpipe_train_grad_norm", record.grad_norm)
        for layer, ratio in (record.expert_max_load_ratio or {}).items():
            self._set("mlpipe_train_expert_max_load_ratio", ratio, (layer,))
        for layer, ratio in (record.expert_max_average_load_ratio or {}).items():
            self._set("mlpipe_train_expert_max_average_load_ratio", ratio, (layer,))
        for bound, number in (record.experts_by_load_ratio or {}).items():
            self._set("mlpipe_train_experts_by_load_ratio", number, (bound,))
        self._set("mlpipe_train_expert_dropped_ratio", record.expert_dropped_ratio)
        if self._on_gpu:
            self._set("mlpipe_train_gpu_memory_bytes", record.memory_bytes, ("peak",))
        self._set("mlpipe_train_last_step_timestamp_seconds", record.time)

    def _observe_save(self, record: Save) -> None:
        self._add("mlpipe_checkpoint_stall_seconds_total", record.stall_seconds)
        if record.error is not None:
            self._add("mlpipe_checkpoint_failures_total", 1)
            return
        self._set("mlpipe_checkpoint_bytes", record.bytes)
        if record.save_seconds is not None and "mlpipe_checkpoint_duration_seconds" in self._histograms:
            self._histograms["mlpipe_checkpoint_duration_seconds"].observe(record.save_seconds)
            self._set("mlpipe_checkpoint_last_success_timestamp_seconds", record.time)

    def _add(self, name: str, amount: float | None) -> None:
        if amount is not None and name in self._values:
            self._values[name][()] = self._values[name].get((), 0.0) + amount

    def _set(self, name: str, value: float | None, labels: tuple[str, ...] = ()) -> None:
        if value is not None and name in self._values:
            self._values[name][labels] = float(value)

    def collect(self) -> Iterator[Family]:
        """What prometheus_client calls at a scrape."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        sampled = self._gpu.read() if self._gpu is not None else ()
        with self._lock:
            for metric in GPU_METRICS if self._gpu is not None else ():
                if metric.name != "mlpipe_gpu_last_xid":  # told once; all else is told now, or absent
                    self._values[metric.name] = {}
            for name, labels, value in sampled:
                self._set(name, value, labels)
            families: list[Family] = []
            for metric in self._served:
                names = ("run", "stage", "rank", *metric.labels)
                family: Family
                if metric.type == "histogram":
                    histogram = self._histograms[metric.name]
                    family = HistogramMetricFamily(metric.name, metric.help, labels=names)
                    family.add_metric(self._labels, histogram.cumulative(), histogram.sum)
                else:
                    kind = CounterMetricFamily if metric.type == "counter" else GaugeMetricFamily
                    family = kind(metric.name, metric.help, labels=names)
                    for labels, value in self._values[metric.name].items():
                        family.add_metric((*self._labels, *labels), value)
                families.append(family)
        yield from families

    def serve(self, address: str, port: int) -> None:
        """Raises OSError when the port cannot be had, ImportError without prometheus_client."""
        self._serving = Serving(self, address, port)
        self.port = self._serving.port

    def close(self) -> None:
        """Ends the server; the port is free then."""
        if self._serving is not None:
            self._serving.close()
            self._serving = None


def start_metrics(metrics: RankMetrics, port: int, address: str = "127.0.0.1") -> RankMetrics | None:
    """Serve them as `/metrics` on `address:port` (0: any free port; the real one is `.port`) from a daemon
    thread.

    Pods need the address 0.0.0.0. Metrics never stop a training: without prometheus_client, or when the
    port is taken, one line says that they are off and None comes back.
    """
    try:
        metrics.serve(address, port)
    except ImportError:
        _log.warning("/metrics is off: install prometheus-client")
        return None
    except OSError as error:
        _log.warning("/metrics is off: cannot listen on %s:%d (%s)", address, port, error.strerror)
        return None
    return metrics
