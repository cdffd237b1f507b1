"""Records into the live line and into the progress part of `status --output json`. No I/O, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from mlpipe._core.units import format_seconds

_RECENT_STEPS = 20  # enough to smooth, few enough to follow a change of pace


class Progress:
    """Add rank 0's records of one attempt as they come; `summary()` at any time."""

    def __init__(self) -> None:
        self._start: Mapping[str, Any] = {}
        self._notes: list[str] = []
        self._step: Mapping[str, Any] = {}
        self._evaluation: Mapping[str, Any] = {}
        self._end: Mapping[str, Any] = {}
        self._checkpoint_step: int | None = None
        self._recent: deque[Mapping[str, Any]] = deque(maxlen=_RECENT_STEPS)
        self._signal: str | None = None

    def add(self, record: Mapping[str, Any]) -> None:
        kind = record["kind"]
        if kind == "start":  # also after a restart: nothing of before but the checkpoints holds any more
            self._start, self._step, self._end, self._signal = record, {}, {}, None
            self._recent.clear()
            self._notes += record.get("notes") or []
        elif kind == "step":
            self._step = record
            self._recent.append(record)
        elif kind == "checkpoint" and record.get("error") is None:
            self._checkpoint_step = record.get("step")
        elif kind == "signal":
            self._signal = record.get("signal")
        elif kind == "evaluate":
            self._evaluation = record
        elif kind == "end":
            self._end = record

    def summary(self) -> dict[str, Any]:
        """Plain JSON; what is not known is null. Seconds, tokens per second over all ranks, ratio 0 to 1."""
        start, step = self._start, self._step
        at = step.get("step", start.get("start_step"))
        target = start.get("steps")
        seconds = [record["seconds"] for record in self._recent if record.get("seconds") is not None]
        per_step = sum(seconds) / len(seconds) if seconds else None
        known = at is not None and target is not None and per_step is not None
        checkpoint = self._checkpoint_step if self._checkpoint_step is not None else start.get("start_step")
        evaluated = (
            "val_loss",
            "val_perplexity",
            "val_bits_per_byte",
            "num_tokens",
            "gate",
            "passed",
            "sample",
        )
        return {
            "step": at,
            "steps": target,
            "loss": step.get("loss"),
            "learning_rate": step.get("lr"),
            "grad_norm": step.get("grad_norm"),
            "tokens_per_second": _mean(self._recent, "tokens_per_second"),
            "mfu_ratio": _mean(self._recent, "mfu_ratio"),
            "peak_name": start.get("peak_name"),
            "seconds_per_step": per_step,
            "eta_seconds": max(target - at, 0) * per_step if known else None,
            "checkpoint_step": checkpoint or None,  # 0: nothing to go back to
            "memory_bytes": step.get("memory_bytes"),
            "last_step_time": step.get("time"),
            "world_size": start.get("world_size"),
            "strategy": start.get("strategy"),
            "start_step": start.get("start_step"),
            "notes": self._notes,
            "restart": start.get("restart"),
            "metrics_port": start.get("metrics_port"),
            "stopping_on": self._signal,
            "outcome": self._end.get("outcome"),
            "evaluation": {key: self._evaluation.get(key) for key in evaluated} if self._evaluation else None,
        }


def _mean(records: Iterable[Mapping[str, Any]], field: str) -> float | None:
    """Of equally long steps; over few steps a mean of rates is near enough for a person."""
    values = [record[field] for record in records if record.get(field) is not None]
    return sum(values) / len(values) if values else None


def summarize(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    progress = Progress()
    for record in records:
        progress.add(record)
    return progress.summary()


def live_line(summary: Mapping[str, Any], *, width: int = 80) -> str:
    """`step 120/400  loss 3.210  12.3k tok/s  MFU 31.2 %  ETA 1m40s  ckpt 100`, plain ASCII, at most
    `width` columns: what matters least is left out first (what the peak is, then the checkpoint, ...)."""
    step, steps = summary["step"], summary["steps"]
    if step is None:
        return "starting"[:width]
    parts: dict[str, str] = {"step": f"step {step}/{steps}" if steps else f"step {step}"}
    if summary["last_step_time"] is not None:
        loss = summary["loss"]
        parts["loss"] = "loss not finite" if loss is None else f"loss {format_loss(loss)}"
    if summary["tokens_per_second"] is not None:
        parts["rate"] = f"{format_count(summary['tokens_per_second'])} tok/s"
    if summary["mfu_ratio"] is not None:
        parts["mfu"] = f"MFU {format_mfu(summary['mfu_ratio'])}"
        if summary["peak_name"]:
            parts["peak"] = f"(of {summary['peak_name']})"
    if summary["outcome"] is not None:
        parts["end"] = summary["outcome"]
    elif summary["stopping_on"] is not None:
        parts["end"] = f"saving on {summary['stopping_on']}"
    elif summary["eta_seconds"] is not None:
        parts["end"] = f"ETA {format_seconds(summary['eta_seconds'])}"
    if summary["checkpoint_step"] is not None:
        parts["checkpoint"] = f"ckpt {summary['checkpoint_step']}"
    for least in ("", "peak", "checkpoint", "rate", "mfu", "loss", "end"):
        parts.pop(least, None)
        line = "  ".join(parts.values()).replace("  (of ", " (of ")
        if len(line) <= width:
            break
    return "".join(c if c.isascii() and c.isprintable() else "?" for c in line[:width])


def start_line(start: Mapping[str, Any]) -> str:
    """What runs, and what MFU is measured against: the line to print once before the live lines."""
    parts = [f"{start.get('strategy')} on {start.get('world_size')} x {start.get('device')}"]
    if start.get("num_params"):
        parts.append(f"{format_count(start['num_params'])} parameters")
    if start.get("precision"):
        parts.append(str(start["precision"]))
    if start.get("start_step"):
        parts.append(f"resumed from step {start['start_step']}")
    if start.get("num_flops_per_token"):
        needed, peak = format_flops(start["num_flops_per_token"]), "peak"
        if start.get("peak_flops"):
            peak = f"{format_flops(start['peak_flops'])}/s"
        world, name = start.get("world_size"), start.get("peak_name")
        parts.append(f"MFU = {needed}/token x tok/s / ({world} x {peak}, {name})")
    return ", ".join(parts)


def format_loss(loss: float) -> str:
    """Four significant digits without an exponent where that is readable: 3.214, 0.0123, 12345."""
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
