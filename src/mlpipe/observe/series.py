"""The series that ranks and the exporter serve: their names, what each is and where it comes from.

The reference page `docs/reference/metrics.md` is generated from these tables. Every series of a rank has the
labels run, stage and rank (never `job`, which Prometheus owns). Series of the whole run are served by rank 0
only. A ratio must not be averaged over ranks: `_core/mfu.py` has the query that divides the sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

_RUN = ("run", "pipeline")
_STEP_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0)
_SAVE_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)
INFO_LABELS = (
    "strategy", "world_size", "pipeline_stage", "device", "precision", "git_sha", "jenkins_build",
)  # fmt: skip


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
        """Of one rank: a label beyond run, stage and rank has one value at a time, and each validation one
        metric or a few."""
        return len(self.buckets) + 3 if self.type == "histogram" else 1  # +Inf, sum and count


METRICS: tuple[Metric, ...] = (
    Metric(
        "mlpipe_run_info", "gauge", "1", "every",
        "What runs here, as labels; always 1. pipeline_stage: the rank's place along `pp`; 0 without.",
        "start", INFO_LABELS,
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
        "mlpipe_train_bubble_seconds_total", "counter", "seconds", "every",
        "Time in which this rank waited for other stages of its pipeline; 0 without one.",
        "step: bubble_seconds",
    ),
    Metric(
        "mlpipe_train_slowness_ratio", "gauge", "ratio", "every",
        "Time that this rank takes for the same work, over the median of the others, where load is moved off"
        " slow ranks (`stragglers: move_load`), nodes come and go, or several had a preflight; else absent.",
        "step: slowness_ratio",
    ),
    Metric(
        "mlpipe_train_membership_seconds_total", "counter", "seconds", "every",
        "Time that it cost this rank that nodes left or joined an elastic training; 0 of any other.",
        "step: membership_seconds",
    ),
    Metric(
        "mlpipe_train_replicas", "gauge", "nodes", "every",
        "Nodes that computed the last step of an elastic training; absent of any other.", "step: replicas",
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
        "mlpipe_validation_metric", "gauge", "that of the metric", "0",
        "A metric of the last validation in training, over all its samples; NaN when it was not finite.",
        "validation: metrics", ("metric",),
    ),
    Metric(
        "mlpipe_validation_seconds_total", "counter", "seconds", "every",
        "Time that this rank's training stood still for validation.", "validation: seconds",
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
        "When the last step or validation ended; before the first: when the process started.",
        "step: time",
    ),
    Metric(
        "mlpipe_train_validating", "gauge", "0 or 1", "every",
        "Whether the training stands still for a validation.", "none: while it lasts",
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

# Of a training with a mixture of experts; else absent. Twice as many as the model has layers, and eight: a
# series for each expert, of which there are thousands, would say little more. With a capacity one more.
EXPERT_METRICS: tuple[Metric, ...] = (
    Metric(
        "mlpipe_train_expert_max_load_ratio", "gauge", "ratio", "0",
        "Tokens of the fullest expert of a layer in the last step, over the mean of its layer; 1: all have as"
        " many. Under `ep` the worker that has this expert is waited for.",
        "step: expert_max_load_ratio", ("layer",),
    ),
    Metric(
        "mlpipe_train_expert_max_average_load_ratio", "gauge", "ratio", "0",
        "The same of tokens averaged over about the last 20 steps: what is left when chance is out. Whether"
        " experts are balanced, this one says.",
        "step: expert_max_average_load_ratio", ("layer",),
    ),
    Metric(
        "mlpipe_train_experts_by_load_ratio", "gauge", "experts", "0",
        "How many experts, over all layers, had at most so many times the mean of their layer in the last"
        " step, and more than the bound before.",
        "step: experts_by_load_ratio", ("at_most",),
    ),
    Metric(
        "mlpipe_train_expert_dropped_ratio", "gauge", "ratio", "0",
        "Of the tokens' ways to experts in the last step, over all layers, those for which a"
        " `capacity_factor` left no room.",
        "step: expert_dropped_ratio",
    ),
)  # fmt: skip

# Of a training in fp16, and of one that sends less than its gradients as they are; else absent.
SOME_METRICS: tuple[Metric, ...] = (
    Metric(
        "mlpipe_train_exchanged_bytes_total", "counter", "bytes", "0",
        "Of gradients that are compressed, or of what islands have learnt: bytes that this rank gave to"
        " others.",
        "step: exchanged_bytes",
    ),
    Metric(
        "mlpipe_train_exchanged_plain_bytes_total", "counter", "bytes", "0",
        "What averaging all gradients in fp32 would have sent instead: the one over the other is the ratio.",
        "step: exchanged_plain_bytes",
    ),
    Metric(
        "mlpipe_train_loss_scale", "gauge", "1", "0",
        "In fp16: by how much gradients are too large on purpose, so that they are not too small for it.",
        "step: loss_scale",
    ),
    Metric(
        "mlpipe_train_skipped_steps_total", "counter", "steps", "0",
        "In fp16: steps that updated nothing, since a gradient was too large; the scale was halved.",
        "step: skipped",
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

# Of the store, by `mlpipe exporter`.
FLEET_METRICS: tuple[Metric, ...] = (
    Metric("mlpipe_fleet_runs", "gauge", "runs", "none", "Runs of the store.", "index", ("state",)),
    Metric(
        "mlpipe_fleet_failed_runs", "gauge", "runs", "none",
        "Failed runs: not_finite (loss or gradient), hang, out_of_memory, node_fault (preflight), or the kind"
        " of the error.",
        "run.json", ("cause",),
    ),
    Metric(
        "mlpipe_fleet_unread_runs", "gauge", "runs", "none",
        "Runs that are over and not read yet: they are missing in the sums below.", "index",
    ),
    Metric(
        "mlpipe_fleet_rank_seconds", "gauge", "seconds", "none",
        "Where the rank-seconds of all trainings went.", "records, by observe/goodput.py",
        ("bucket", "device"),
    ),
    Metric(
        "mlpipe_fleet_cost_usd", "gauge", "USD", "none",
        "What all trainings with a price cost.", "rank-seconds x plan: price_usd_per_device_hour",
    ),
    Metric(
        "mlpipe_fleet_badput_usd", "gauge", "USD", "none",
        "Of that, what was paid for anything but steps that are kept.", "the same",
    ),
    Metric(
        "mlpipe_fleet_last_round_timestamp_seconds", "gauge", "seconds since 1970", "none",
        "When the exporter last ended a look at the store.", "clock",
    ),
    Metric(
        "mlpipe_fleet_round_duration_seconds", "gauge", "seconds", "none",
        "How long that look took.", "clock",
    ),
    Metric(
        "mlpipe_run_state_info", "gauge", "1", "none", "Where a run stands; always 1.", "index, run.json",
        (*_RUN, "state", "backend"),
    ),
    Metric(
        "mlpipe_run_last_step_timestamp_seconds", "gauge", "seconds since 1970", "none",
        "When rank 0 of a training under way last ended a step; before the first: when it began to train.",
        "step: time", (*_RUN, "stage"),
    ),
    Metric(
        "mlpipe_run_undriven_timestamp_seconds", "gauge", "seconds since 1970", "none",
        "Since when nobody drives a run that is under way. Absent for others.",
        "run.json: driver", _RUN,
    ),
    Metric(
        "mlpipe_run_fallback_timestamp_seconds", "gauge", "seconds since 1970", "none",
        "When a training last went back to an earlier checkpoint because a newer one was damaged. Absent for"
        " others.",
        "events.jsonl: fallback", (*_RUN, "stage"),
    ),
    Metric(
        "mlpipe_run_failed_timestamp_seconds", "gauge", "seconds since 1970", "none",
        "When a run failed.", "run.json", (*_RUN, "stage", "cause"),
    ),
    Metric(
        "mlpipe_run_step_seconds", "gauge", "seconds", "none",
        "Of a training's step: measured (the median after the warm-up) beside predicted, where the plan did.",
        "step: seconds; plan: predicted", (*_RUN, "stage", "kind"),
    ),
    Metric(
        "mlpipe_run_memory_bytes", "gauge", "bytes", "none",
        "Of a training's fullest rank at its peak: measured beside predicted, where the plan did.",
        "step: memory_bytes; plan: predicted", (*_RUN, "stage", "kind"),
    ),
    Metric(
        "mlpipe_run_training_cost_usd", "gauge", "USD", "none",
        "Of a training so far: measured (all that was paid) beside predicted (the steps that are done), where"
        " the plan has a price.",
        "rank-seconds; plan: predicted", (*_RUN, "stage", "kind"),
    ),
    Metric(
        "mlpipe_run_build_info", "gauge", "1", "none",
        "The build of Jenkins that made the run; always 1. Absent for other runs.",
        "run.json: meta", (*_RUN, "jenkins_build", "jenkins_url"),
    ),
    Metric(
        "mlpipe_run_rank_seconds", "gauge", "seconds", "none",
        "Where the rank-seconds of a run's trainings went.", "records, by observe/goodput.py",
        (*_RUN, "bucket"),
    ),
    Metric(
        "mlpipe_run_goodput_ratio", "gauge", "ratio", "none",
        "Share of rank-seconds in compute, communication and bubble of steps that are kept.",
        "the same", _RUN,
    ),
    Metric("mlpipe_run_cost_usd", "gauge", "USD", "none", "What its trainings cost.", "the same", _RUN),
    Metric("mlpipe_run_badput_usd", "gauge", "USD", "none", "Of that, what badput cost.", "the same", _RUN),
    Metric(
        "mlpipe_run_usd_per_million_tokens", "gauge", "USD", "none",
        "Cost over tokens of steps that are kept.", "the same", _RUN,
    ),
)  # fmt: skip
