"""The lines that workers and launchers write: the only source of metrics and reports.

One JSON object a line. A reader skips a torn last line and kinds it does not know; a field is never
renamed without raising SCHEMA_VERSION. Every line has `v`, `kind`, `time` (Unix seconds, UTC), `rank`
(-1: the launcher) and `restart` (torchrun's restart count).

kind        further fields
start       world_size, strategy, mesh, device, num_params, num_flops_per_token,
            num_hardware_flops_per_token (with what is computed again; null if unknown), flops_convention,
            peak_flops, peak_name, start_step (0, or the step resumed from), resumed_from (key or null),
            steps, seq_len, global_batch, precision, torch, host, pid, metrics_port (or null),
            seconds_since_spawn, restore_seconds (of that, loading the checkpoint), notes (a list: what a
            person should know, such as damaged checkpoints that were passed over)
step        step (1-based, after the update), loss (mean over the global batch's target tokens, nats),
            lr, grad_norm, tokens (of this rank), seconds (of the whole step), data_seconds,
            compute_seconds (this rank's own work), collective_seconds (this rank waiting for others or for
            bytes on the way), checkpoint_seconds (stall only), tokens_per_second and
            mfu_ratio (of all ranks; rank 0 only), memory_bytes (peak so far), achievable_flops (per device,
            measured, or null), peak_flops (per device; of `start` it is null where the worker measures it).
            Of the first rank of a node, every 5 s or more, what was since: cpu_others_ratio (of the CPUs that
            it may use, by others), cpu_steal_ratio (by other guests of the hypervisor), cpu_pressure_ratio
            (of the time, in which something waited for a CPU; or null).
            A step whose loss or gradient is not finite has null there, updated nothing and is the last of
            its attempt
checkpoint  step, key, bytes (of this rank), stall_seconds, save_seconds (until committed; rank 0 only),
            error (why it was not committed, else null)
evaluate    val_loss, val_perplexity, val_bits_per_byte, num_tokens, gate, passed, sample (rank 0 only)
signal      step, signal (the step boundary at which the ranks agreed to stop)
end         outcome ("done" | "saved" | "failed"), step, message
submitted   (this and the next three: in the attempt's events.jsonl) by the driver, before the attempt starts
launched    by the first node's launcher, before it starts the workers; again if a gang is restarted
fallback    by rank 0, when it went back behind damaged checkpoints: step, given_up (keys), why (a list)
ended       by the same launcher, when they are gone: outcome, message
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from typing import Any

SCHEMA_VERSION = 1


def encode(kind: str, *, rank: int, restart: int, **fields: Any) -> bytes:
    """One line with its newline. Non-finite floats become null: JSON has none."""
    line = {"v": SCHEMA_VERSION, "kind": kind, "time": time.time(), "rank": rank, "restart": restart}
    line.update(fields)
    try:
        text = json.dumps(line, allow_nan=False)
    except ValueError:
        text = json.dumps({key: _finite(value) for key, value in line.items()})
    return text.encode() + b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value


def decode(chunks: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Lines out of byte chunks cut anywhere. Torn and foreign lines are skipped."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            record = decode_line(line)
            if record is not None:
                yield record


def decode_line(line: bytes) -> dict[str, Any] | None:
    """None for a torn or foreign line. A whole record behind a torn one (of a writer that was killed,
    whose successor went on in the same file) is found."""
    for start in (0, line.rfind(b'{"v":')):
        try:
            record = json.loads(line[start:])
        except (ValueError, RecursionError):
            continue
        if is_record(record):
            found: dict[str, Any] = record
            return found
    return None


def is_record(value: Any) -> bool:
    """Whether it says what it is and when, of a step also which; a foreign line may not."""
    return (
        isinstance(value, dict)
        and isinstance(value.get("kind"), str)
        and isinstance(value.get("time"), int | float)
        and (value["kind"] != "step" or isinstance(value.get("step"), int))
    )
