"""Records into the live line and into the progress part of `status --output json`. No I/O, no clock."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import Any, TypedDict

from mlpipe._core.mfu import throughput
from mlpipe._core.record_lines import NOT_STARTED, own_fields
from mlpipe._core.records import End, Evaluation, Record, Save, Start, Step, StopSignal, Tracked, Validation
from mlpipe._core.units import format_seconds

_RECENT_STEPS = 20  # enough to smooth, few enough to follow a change of pace


class Validated(TypedDict):
    """What the last validation in training found, for JSON. `best_step`: of the best one so far."""

    step: int | None
    metrics: dict[str, float | None]
    best_step: int | None
    sample: str | None


class Summary(TypedDict):
    """Plain JSON; what is not known is null. Seconds, tokens per second over all ranks, ratio 0 to 1."""

    step: int | None
    steps: int | None
    loss: float | None
    learning_rate: float | None
    grad_norm: float | None
    tokens_per_second: float | None
    mfu_ratio: float | None
    peak_name: str | None
    seconds_per_step: float | None
    eta_seconds: float | None
    checkpoint_step: int | None
    memory_bytes: int | None
    last_step_time: float | None
    world_size: int | None
    replicas: int | None
    strategy: str | None
    start_step: int | None
    notes: list[str]
    restart: int | None
    metrics_port: int | None
    stopping_on: str | None
    outcome: str | None
    message: str | None
    validation: Validated | None
    evaluation: dict[str, Any] | None  # the fields of an Evaluation
    trackers: dict[str, str | None]
    stragglers: dict[str, float]  # by rank: its time for the same work over that of the others


class Progress:
    """Add rank 0's records of one attempt as they come; `summary()` at any time."""

    def __init__(self) -> None:
        self._start = NOT_STARTED
        self._notes: list[str] = []
        self._step: Step | None = None
        self._evaluation: Evaluation | None = None
        self._validation: Validation | None = None
        self._best_step: int | None = None
        self._outcome: str | None = None
        self._message: str | None = None
        self._checkpoint_step: int | None = None
        self._recent: deque[Step] = deque(maxlen=_RECENT_STEPS)
        self._signal: str | None = None
        self._trackers: dict[str, str | None] = {}

    def add(self, record: Record) -> None:
        """The next record; kinds that say nothing of progress are passed over."""
        match record:
            case Start():  # also after a restart: nothing of before but the checkpoints holds any more
                self._start, self._step, self._outcome, self._signal = record, None, None, None
                self._recent.clear()
                self._notes += record.notes
            case Step():
                self._step = record
                self._recent.append(record)
            case Save(error=None):
                self._checkpoint_step = record.step
            case StopSignal():
                self._signal = record.signal
            case Validation():
                self._validation = record
                self._best_step = record.step if record.best else self._best_step
            case Evaluation():
                self._evaluation = record
            case End():
                self._outcome, self._message = record.outcome, record.message
            case Tracked():
                self._trackers[record.tracker or ""] = record.url

    def summary(self) -> Summary:
        """As of the last record that was added."""
        start, step, evaluated, validated = self._start, self._step, self._evaluation, self._validation
        at = step.step if step is not None else start.start_step
        seconds = [record.seconds for record in self._recent if record.seconds is not None]
        per_step = sum(seconds) / len(seconds) if seconds else None
        left = max(start.steps - at, 0) if start.steps is not None and at is not None else None
        saved = self._checkpoint_step if self._checkpoint_step is not None else start.start_step
        tokens_per_second, ratio = throughput(self._recent)
        return {
            "step": at,
            "steps": start.steps,
            "loss": _finite(step.loss) if step is not None else None,
            "learning_rate": step.lr if step is not None else None,
            "grad_norm": _finite(step.grad_norm) if step is not None else None,
            "tokens_per_second": tokens_per_second,
            "mfu_ratio": ratio,
            "peak_name": start.peak_name,
            "seconds_per_step": per_step,
            "eta_seconds": left * per_step if left is not None and per_step is not None else None,
            "checkpoint_step": saved or None,  # 0: nothing to go back to
            "memory_bytes": step.memory_bytes if step is not None else None,
            "last_step_time": step.time if step is not None else None,
            "world_size": start.world_size,
            "replicas": step.replicas if step is not None else None,
            "strategy": start.strategy,
            "start_step": start.start_step,
            "notes": self._notes,
            "restart": start.restart if start is not NOT_STARTED else None,
            "metrics_port": start.metrics_port,
            "stopping_on": self._signal,
            "outcome": self._outcome,
            "message": self._message or None,
            "validation": None
            if validated is None
            else {
                "step": validated.step,
                "metrics": _all_finite(validated.metrics),
                "best_step": self._best_step,
                "sample": validated.sample,
            },
            "evaluation": None if evaluated is None else _told(evaluated),
            "trackers": self._trackers,
            "stragglers": (step.stragglers or {}) if step is not None else {},
        }


def _finite(value: float | None) -> float | None:
    """JSON has no NaN."""
    return value if value is not None and math.isfinite(value) else None


def _told(evaluated: Evaluation) -> dict[str, Any]:
    told = own_fields(evaluated)
    return told | {"metrics": None if evaluated.metrics is None else _all_finite(evaluated.metrics)}


def _all_finite(values: dict[str, float] | None) -> dict[str, float | None]:
    return {name: _finite(value) for name, value in (values or {}).items()}


def summarize(records: Iterable[Record]) -> Summary:
    """Of rank 0's records of one attempt."""
    progress = Progress()
    for record in records:
        progress.add(record)
    return progress.summary()


def live_line(summary: Summary, *, width: int = 80) -> str:
    """`step 120/400  loss 3.210  12.3k tok/s  MFU 31.2 %  ETA 1m40s  ckpt 100`, plain ASCII, at most
    `width` columns: what matters least is left out first (what the peak is, then the checkpoint, ...)."""
    step, steps = summary["step"], summary["steps"]
    if step is None:
        return "starting"[:width]
    parts: dict[str, str] = {"step": f"step {step}/{steps}" if steps else f"step {step}"}
    if summary["replicas"] is not None:
        parts["nodes"] = f"{summary['replicas']} node{'s' if summary['replicas'] > 1 else ''}"
    if summary["last_step_time"] is not None:
        parts["loss"] = f"loss {format_loss(summary['loss'])}"
    if summary["validation"] is not None and summary["validation"]["metrics"]:
        name, value = next(iter(summary["validation"]["metrics"].items()))
        parts["validation"] = f"val {name} {format_loss(value)}"
    if summary["tokens_per_second"] is not None:
        parts["rate"] = f"{format_count(summary['tokens_per_second'])} tok/s"
    if summary["mfu_ratio"] is not None:
        parts["mfu"] = f"MFU {format_mfu(summary['mfu_ratio'])}"
        if summary["peak_name"]:
            parts["peak"] = f"(of {summary['peak_name']})"
    if summary["stragglers"]:
        slow = sorted(summary["stragglers"].items(), key=lambda one: -one[1])
        parts["slow"] = "slow: " + ", ".join(f"rank {rank} ({ratio:.1f}x)" for rank, ratio in slow[:3])
    if summary["outcome"] is not None:
        parts["end"] = summary["outcome"]
    elif summary["stopping_on"] is not None:
        parts["end"] = f"saving on {summary['stopping_on']}"
    elif summary["eta_seconds"] is not None:
        parts["end"] = f"ETA {format_seconds(summary['eta_seconds'])}"
    if summary["checkpoint_step"] is not None:
        parts["checkpoint"] = f"ckpt {summary['checkpoint_step']}"
    for least in ("", "peak", "checkpoint", "rate", "mfu", "validation", "nodes", "slow", "loss", "end"):
        parts.pop(least, None)
        line = "  ".join(parts.values()).replace("  (of ", " (of ")
        if len(line) <= width:
            break
    return "".join(c if c.isascii() and c.isprintable() else "?" for c in line[:width])


def split_words(start: Start) -> str:
    """The strategy, which names the data axes, and the mesh's other axes: `fsdp (tp 2)`."""
    others = {axis: size for axis, size in (start.mesh or {}).items() if not axis.startswith("dp_")}
    words = ", ".join(f"{axis} {size}" for axis, size in others.items() if size > 1)
    return f"{start.strategy} ({words})" if words else str(start.strategy)


def start_line(start: Start) -> str:
    """What runs, and what MFU is measured against: the line to print once before the live lines."""
    parts = [f"{split_words(start)} on {start.world_size} x {start.device}"]
    if start.num_params:
        parts.append(f"{format_count(start.num_params)} parameters")
    if start.precision:
        parts.append(start.precision)
    if start.start_step:
        parts.append(f"resumed from step {start.start_step}")
    if start.num_flops_per_token:
        peak = f"{format_flops(start.peak_flops)}/s" if start.peak_flops else "peak"
        needed = format_flops(start.num_flops_per_token)
        parts.append(f"MFU = {needed}/token x tok/s / ({start.world_size} x {peak}, {start.peak_name})")
    return ", ".join(parts)


def format_loss(loss: float | None) -> str:
    """Four significant digits without an exponent where that is readable: 3.214, 0.0123, 12345."""
    if loss is None or not math.isfinite(loss):
        return "not finite"
    return f"{loss:.3f}" if 0.1 <= abs(loss) < 1000 else f"{loss:.4g}"


def format_mfu(ratio: float) -> str:
    """Over 100 % it is marked: then the peak is wrong, of another device or measured on a busy machine."""
    return f"{100 * ratio:.1f} %" + (" (!)" if ratio > 1 else "")


def format_count(number: float) -> str:
    """1234 -> '1.23k', 8.1e9 -> '8.10G'. Three significant digits."""
    for factor, suffix in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= factor * 0.9995:
            return f"{_three_digits(number / factor)}{suffix}"
    return _three_digits(number)


def format_flops(number: float) -> str:
    """8.3e10 -> '83 GFLOP'."""
    text = format_count(number)
    return f"{text[:-1]} {text[-1]}FLOP" if text[-1].isalpha() else f"{text} FLOP"


def _three_digits(number: float) -> str:
    if abs(number) >= 99.95 or number == int(number):
        return f"{number:.0f}"
    return f"{number:.1f}" if abs(number) >= 9.995 else f"{number:.2f}"
