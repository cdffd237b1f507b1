"""`/metrics` of one rank, fed with the very records that the rank writes.

The names stand in METRICS, from which `docs/reference/metrics.md` is generated too. Every series has the
labels run, stage and rank (never `job`, which Prometheus owns). Counters start at 0, so that `rate` sees the
first increment; timestamps start at the start of the process, so that no staleness alert fires on a gauge
of 0. Series of the whole run are served by rank 0 only. A ratio must not be averaged over ranks: for MFU of
several runs or ranks divide `rate(mlpipe_train_model_flops_total)` by `mlpipe_train_peak_flops`, both summed.

Importable without prometheus_client; `start_metrics` then returns None and says so.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mlpipe._core.records import Record, Save, Start, Step
from mlpipe.observe.gpu import Gpu, find_gpu
from mlpipe.observe.serve import Serving

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

_log = logging.getLogger(__name__)

_STEP_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0)
_SAVE_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)
INFO_LABELS = ("strategy", "world_size", "device", "precision", "git_sha", "jenkins_build")


@dataclass(frozen=True)
class Metric:
    """One row of the table. `name` is as Prometheus shows it; `source` names the record and its field.
    `ranks`: which serve it; none of them: the exporter."""

    name: str
    type: Literal["counter", "gauge", "histogram"]
    unit: str
    ranks: Literal["every", "0", "none"]
    help: str
    source: str
    labels: tuple[str, ...] = ()  # besides run, stage, rank
    buckets: tuple[float, ...] = ()

    @property
    def num_series(self) -> int:
        """Of one rank: a label beyond run, stage and rank has one value at a time."""
        return len(self.buckets) + 3 if self.type == "histogram" else 1  # +Inf, sum and count


METRICS: tuple[Metric, ...] = (
    Metric(
        "mlpipe_run_info", "gauge", "1", "every",
        "What runs here, as labels; always 1.", "start", INFO_LABELS,
    ),
    Metric(
        "mlpipe_train_world_size", "gauge", "ranks", "every",
        "Ranks of this training. Fewer series of mlpipe_run_info than this: some rank is not scraped.",
        "start: world_size",
    ),
    Metric(
        "mlpipe_train_start_timestamp_seconds", "gauge", "seconds since 1970", "every",
        "When this process began to train; a restart moves it.", "start: time",
    ),
    Metric(
        "mlpipe_train_step_duration_seconds", "histogram", "seconds", "every",
        "Wall time of an optimizer step. Equal on every rank of a synchronous strategy.",
        "step: seconds", buckets=_STEP_BUCKETS,
    ),
    Metric(
        "mlpipe_train_data_wait_seconds_total", "counter", "seconds", "every",
        "Time spent waiting for the next batch.", "step: data_seconds",
    ),
    Metric(
        "mlpipe_train_compute_seconds_total", "counter", "seconds", "every",
        "Time of this rank's own work in forward, backward and update: the largest names the slowest rank.",
        "step: compute_seconds",
    ),
    Metric(
        "mlpipe_train_collective_wait_seconds_total", "counter", "seconds", "every",
        "Time in which this rank's work stood still for other ranks, or for bytes on the way to or from them:"
        " exposed communication. A slow rank waits least.", "step: collective_seconds",
    ),
    Metric(
        "mlpipe_train_steps_total", "counter", "steps", "0",
        "Optimizer steps done by this process. Steps done again after a restart count again.", "step",
    ),
    Metric(
        "mlpipe_train_step", "gauge", "steps", "0",
        "Number of the last optimizer step, counted from the start of the training.", "step: step",
    ),
    Metric(
        "mlpipe_train_target_steps", "gauge", "steps", "0",
        "Number of the step at which the training ends.", "start: steps",
    ),
    Metric(
        "mlpipe_train_tokens_total", "counter", "tokens", "every",
        "Tokens this rank has trained on.", "step: tokens",
    ),
    Metric(
        "mlpipe_train_model_flops_total", "counter", "flops", "every",
        "Floating point operations that the model needs for this rank's tokens; recomputation not counted.",
        "step: tokens x start: num_flops_per_token",
    ),
    Metric(
        "mlpipe_train_peak_flops", "gauge", "flops per second", "every",
        "What MFU is measured against: the peak of this rank's device.", "start or step: peak_flops",
    ),
    Metric(
        "mlpipe_train_mfu_ratio", "gauge", "ratio", "0",
        "Model FLOPs utilization of the last step over all ranks. Do not average it: divide the sums.",
        "step: mfu_ratio",
    ),
    Metric(
        "mlpipe_train_loss", "gauge", "nats per token", "0",
        "Training loss of the last step over the global batch; NaN when it was not finite.", "step: loss",
    ),
    Metric(
        "mlpipe_train_grad_norm", "gauge", "1", "0",
        "Global L2 norm of the gradients before clipping; NaN when it was not finite.", "step: grad_norm",
    ),
    Metric(
        "mlpipe_train_learning_rate", "gauge", "1", "0",
        "Learning rate of the last step.", "step: lr",
    ),
    Metric(
        "mlpipe_train_gpu_memory_bytes", "gauge", "bytes", "every",
        "GPU memory of this rank; kind=\"peak\": the most that was allocated so far. Absent on CPU.",
        "step: memory_bytes", ("kind",),
    ),
    Metric(
        "mlpipe_train_hardware_flops_total", "counter", "flops", "every",
        "Floating point operations done for this rank's tokens, with those that activation checkpointing does"
        " again. Over the peak: HFU. Equal to the model's without recomputation.",
        "step: tokens x start: num_hardware_flops_per_token",
    ),
    Metric(
        "mlpipe_train_achievable_flops", "gauge", "flops per second", "every",
        "The best large matrix product that was measured on this rank's device, which stays below the peak on"
        " paper. On CPU the peak itself is measured so.", "step: achievable_flops",
    ),
    Metric(
        "mlpipe_train_last_step_timestamp_seconds", "gauge", "seconds since 1970", "every",
        "When the last step ended; before the first step: when the process started.", "step: time",
    ),
    Metric(
        "mlpipe_checkpoint_duration_seconds", "histogram", "seconds", "0",
        "From the start of a save to its commit.", "checkpoint: save_seconds", buckets=_SAVE_BUCKETS,
    ),
    Metric(
        "mlpipe_checkpoint_stall_seconds_total", "counter", "seconds", "every",
        "Time that this rank's training stood still for checkpoints.", "checkpoint: stall_seconds",
    ),
    Metric(
        "mlpipe_checkpoint_bytes", "gauge", "bytes", "every",
        "What this rank wrote of the last checkpoint; the sum over ranks is the checkpoint's size.",
        "checkpoint: bytes",
    ),
    Metric(
        "mlpipe_checkpoint_last_success_timestamp_seconds", "gauge", "seconds since 1970", "0",
        "When the last checkpoint was committed; before the first: when the process started.",
        "checkpoint: time",
    ),
    Metric(
        "mlpipe_checkpoint_failures_total", "counter", "checkpoints", "0",
        "Saves that were not committed.", "checkpoint: error",
    ),
)  # fmt: skip

# Of the rank's GPU, where there is one and nvidia-ml-py is installed (observe/gpu.py); else absent.
GPU_METRICS: tuple[Metric, ...] = (
    Metric(
        "mlpipe_gpu_utilization_ratio", "gauge", "ratio", "every",
        "Part of the last moments with any kernel on this rank's GPU: occupancy, not work.", "NVML",
    ),
    Metric("mlpipe_gpu_memory_used_bytes", "gauge", "bytes", "every", "By all processes.", "NVML"),
    Metric("mlpipe_gpu_power_watts", "gauge", "watts", "every", "Power draw.", "NVML"),
    Metric(
        "mlpipe_gpu_temperature_celsius", "gauge", "degrees Celsius", "every", "Of the chip.", "NVML",
    ),
    Metric(
        "mlpipe_gpu_throttled", "gauge", "1", "every",
        "1 while the clocks are held down for that reason.", "NVML", ("reason",),
    ),
    Metric(
        "mlpipe_gpu_ecc_errors", "gauge", "errors", "every",
        "Uncorrected memory errors since the driver was loaded.", "NVML",
    ),
    Metric(
        "mlpipe_gpu_xid_errors_total", "counter", "errors", "every",
        "Critical errors (XID) that the driver reported since this process began.", "NVML",
    ),
    Metric(
        "mlpipe_gpu_last_xid", "gauge", "1", "every", "Code of the last of these; absent before.",
        "NVML",
    ),
)  # fmt: skip


class _Histogram:
    """Cumulative counts are made at the scrape; a step only touches one bucket and the sum."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[tuple[str, float]]:
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
        gpu: Gpu | None = None,
    ) -> None:
        """`info`: values for labels of mlpipe_run_info that records do not know (git_sha, jenkins_build)."""
        self.port = 0
        self._gpu = gpu
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
        self._served = own if gpu is None else own + GPU_METRICS
        for metric in self._served:
            if metric.type == "histogram":
                self._histograms[metric.name] = _Histogram(metric.buckets)
            elif metric.source == "NVML":
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
        known = {
            "strategy": record.strategy,
            "world_size": record.world_size,
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
        self._add("mlpipe_train_steps_total", 1)
        self._add("mlpipe_train_tokens_total", tokens)
        self._add("mlpipe_train_model_flops_total", tokens * self._flops_per_token)
        self._add("mlpipe_train_hardware_flops_total", tokens * self._hardware_flops_per_token)
        self._set("mlpipe_train_achievable_flops", record.achievable_flops)
        self._set("mlpipe_train_step", record.step)
        self._set("mlpipe_train_mfu_ratio", record.mfu_ratio)
        self._set("mlpipe_train_learning_rate", record.lr)
        self._set("mlpipe_train_peak_flops", record.peak_flops)
        self._set("mlpipe_train_loss", record.loss)
        self._set("mlpipe_train_grad_norm", record.grad_norm)
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
            self._values[name][()] += amount

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
        if self._serving is not None:
            self._serving.close()
            self._serving = None


def start_metrics(
    *,
    run: str,
    stage: str,
    rank: int,
    port: int,
    address: str = "127.0.0.1",
    info: Mapping[str, str] | None = None,
    gpu_uuid: str | None = None,
) -> RankMetrics | None:
    """Serve `/metrics` on `address:port` (0: any free port; the real one is `.port`) from a daemon thread.

    Pods need the address 0.0.0.0. Metrics never stop a training: without prometheus_client, or when the
    port is taken, one line says that they are off and None comes back.
    """
    metrics = RankMetrics(run, stage, rank, info=info, gpu=find_gpu(gpu_uuid))
    try:
        metrics.serve(address, port)
    except ImportError:
        _log.warning("/metrics is off: install prometheus-client")
        return None
    except OSError as error:
        _log.warning("/metrics is off: cannot listen on %s:%d (%s)", address, port, error.strerror)
        return None
    return metrics
