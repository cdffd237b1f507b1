"""`mlpipe plan` in text: the table of candidates, the choice by cause, and how it scales over nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from mlpipe._core.tables import aligned
from mlpipe._core.units import format_bytes, format_seconds, format_step_seconds

if TYPE_CHECKING:
    from mlpipe.plan.choose import Candidate
    from mlpipe.plan.plan import TrainPlan
    from mlpipe.plan.scaling import Scale

_MOST_ROWS = 12
_HEAD = ("", "strategy", "mesh", "micro", "recompute", "precision", "per worker", "step", "tok/s", "MFU")


def chosen_of(candidates: Sequence[Candidate], train: TrainPlan) -> Candidate | None:
    """The candidate that the plan is."""
    for found in candidates:
        if (
            found.strategy,
            found.mesh,
            found.micro_batch,
            found.activation_checkpointing,
            found.precision,
        ) == (
            train.strategy,
            train.mesh,
            train.micro_batch,
            train.activation_checkpointing,
            train.precision,
        ):
            return found
    return None


def table(candidates: Sequence[Candidate], chosen: Candidate) -> list[str]:
    from mlpipe.plan.choose import verdict

    shown = [chosen, *_best_of_each(candidates, chosen)]
    priced = any(found.usd is not None for found in shown)
    head = [*_HEAD, "run", *(["USD"] if priced else []), "why"]
    rows: list[list[str]] = [head]
    for found in shown:
        mark = "->" if found is chosen else "" if found.fits else "x"
        rows.append([mark, *_cells(found, priced), verdict(found, chosen)])
    lines = _table(rows)
    hidden = len(candidates) - len(shown)
    return [*lines, f"  and {hidden} more in --output json"] if hidden > 0 else lines


def _best_of_each(candidates: Sequence[Candidate], chosen: Candidate) -> list[Candidate]:
    """Of each strategy, mesh, checkpointing and precision the best microbatch, or if none fits the one that
    needs least; of each strategy at least one."""
    best: dict[tuple[object, ...], Candidate] = {}
    for found in candidates:
        key = (found.strategy, found.mesh, found.activation_checkpointing, found.precision)
        before = best.setdefault(key, found)
        if not before.fits and before.memory and found.memory and found.memory.total < before.memory.total:
            best[key] = found
    best.pop((chosen.strategy, chosen.mesh, chosen.activation_checkpointing, chosen.precision), None)
    rows = list(best.values())
    kept = rows[: _MOST_ROWS - 1]
    seen = {chosen.strategy, *(found.strategy for found in kept)}
    for found in rows[_MOST_ROWS - 1 :]:
        if found.strategy not in seen:
            seen.add(found.strategy)
            kept.append(found)
    return kept


def _cells(found: Candidate, priced: bool) -> list[str]:
    cells = [found.strategy, mesh_text(found), str(found.micro_batch or "-"), found.activation_checkpointing]
    cells += [found.precision, format_bytes(found.memory.total) if found.memory else "-"]
    if found.seconds is None or found.tokens_per_second is None or found.mfu_ratio is None:
        return [*cells, "-", "-", "-", "-", *(["-"] if priced else [])]
    cells += [format_step_seconds(found.seconds.total), f"{found.tokens_per_second:,.0f}"]
    cells += [f"{100 * found.mfu_ratio:.0f} %", _hours(found.hours) if found.hours is not None else "-"]
    return [*cells, f"{found.usd:,.0f}" if found.usd is not None else "-"] if priced else cells


def mesh_text(found: Candidate) -> str:
    if found.mesh is None:
        return "-"
    return f"{found.mesh.dp_replicate} x {found.mesh.dp_shard}"


def causes(found: Candidate) -> Iterator[str]:
    """Bytes and seconds of the chosen one."""
    memory, seconds = found.memory, found.seconds
    if memory is not None:
        parts = [
            ("parameters", memory.parameters),
            ("gradients", memory.gradients),
            ("optimizer", memory.optimizer),
            ("activations", memory.activations),
            ("logits", memory.logits),
            ("buffers", memory.buffers),
            ("context", memory.context),
            ("slack", memory.slack),
        ]
        text = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts if size)
        less = f", less {format_bytes(memory.reused)} not alive at once" if memory.reused else ""
        yield f"  memory  {format_bytes(memory.total)} per worker: {text}{less}"
    if seconds is not None:
        times = [
            ("compute", seconds.compute),
            ("exposed communication", seconds.communication),
            ("data", seconds.data),
            ("save", seconds.save),
        ]
        text = ", ".join(f"{name} {format_step_seconds(size)}" for name, size in times if size >= 5e-5)
        yield f"  step    {format_step_seconds(seconds.total)}: {text}"
    if found.hours is not None:
        cost = ""
        if found.usd is not None and found.usd_per_million_tokens is not None:
            cost = f", {found.usd:,.2f} USD, {found.usd_per_million_tokens:.4f} USD per million tokens"
        yield f"  run     {_hours(found.hours)}{cost}"


def _hours(hours: float) -> str:
    return f"{hours:,.1f} h" if hours >= 1 else format_seconds(3600 * hours)


def scaling(rows: Sequence[Scale]) -> list[str]:
    """How cost and time scale over nodes."""
    cells = [["nodes", "workers", "strategy", "step", "tok/s", "run", "USD", "efficiency", ""]]
    for row in rows:
        best = row.best
        if best is None or best.hours is None or best.tokens_per_second is None:
            cells.append([str(row.num_nodes), str(row.num_workers), "-", "-", "-", "-", "-", "-", row.note])
            continue
        bar = "#" * round(20 * (row.efficiency or 0))
        cells.append(
            [
                str(row.num_nodes),
                str(row.num_workers),
                f"{best.strategy} {mesh_text(best)}",
                format_step_seconds(best.step_seconds),
                f"{best.tokens_per_second:,.0f}",
                _hours(best.hours),
                f"{best.usd:,.0f}" if best.usd is not None else "-",
                f"{100 * (row.efficiency or 0):.0f} %",
                f"{bar} {row.note}".strip(),
            ]
        )
    return _table(cells)


def _table(rows: list[list[str]]) -> list[str]:
    return [f"  {line}" for line in aligned(rows, left=range(len(rows[0])))]
