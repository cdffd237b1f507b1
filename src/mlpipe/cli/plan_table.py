"""`mlpipe plan` in text: the table of candidates, the choice by cause, and how it scales over nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from mlpipe._core.tables import aligned
from mlpipe._core.units import format_bytes, format_seconds, format_step_seconds

if TYPE_CHECKING:
    from mlpipe.plan.choose import Candidate
    from mlpipe.plan.groups import MixedPlan
    from mlpipe.plan.scaling import ScaledPlan
    from mlpipe.plan.work import GroupPlan, TrainPlan

_MOST_ROWS = 12
_HEAD = ("", "strategy", "mesh", "micro", "recompute", "precision", "per worker", "step", "tok/s", "MFU")


def chosen_of(candidates: Sequence[Candidate], train: TrainPlan) -> Candidate | None:
    """The candidate that the plan is."""
    for candidate in candidates:
        if (
            candidate.strategy,
            candidate.mesh,
            candidate.micro_batch,
            candidate.activation_checkpointing,
            candidate.precision,
        ) == (
            train.strategy,
            train.mesh,
            train.micro_batch,
            train.activation_checkpointing,
            train.precision,
        ):
            return candidate
    return None


def table(candidates: Sequence[Candidate], chosen: Candidate) -> list[str]:
    """The choice, the best of each other strategy, and why: a line each, below a head."""
    from mlpipe.plan.choose import verdict

    shown = [chosen, *_best_of_each(candidates, chosen)]
    priced = any(candidate.usd is not None for candidate in shown)
    head = [*_HEAD, "run", *(["USD"] if priced else []), "why"]
    rows: list[list[str]] = [head]
    for candidate in shown:
        mark = "->" if candidate is chosen else "" if candidate.fits else "x"
        rows.append([mark, *_cells(candidate, priced), verdict(candidate, chosen)])
    lines = _table(rows)
    hidden = len(candidates) - len(shown)
    return [*lines, f"  and {hidden} more in --output json"] if hidden > 0 else lines


def _best_of_each(candidates: Sequence[Candidate], chosen: Candidate) -> list[Candidate]:
    """Of each strategy, mesh, checkpointing and precision the best microbatch, or if none fits the one that
    needs least; of each strategy at least one."""
    best: dict[tuple[object, ...], Candidate] = {}
    for candidate in candidates:
        key = (candidate.strategy, candidate.mesh, candidate.activation_checkpointing, candidate.precision)
        before = best.setdefault(key, candidate)
        if (
            not before.fits
            and before.memory
            and candidate.memory
            and candidate.memory.total < before.memory.total
        ):
            best[key] = candidate
    best.pop((chosen.strategy, chosen.mesh, chosen.activation_checkpointing, chosen.precision), None)
    rows = list(best.values())
    kept = rows[: _MOST_ROWS - 1]
    seen = {chosen.strategy, *(candidate.strategy for candidate in kept)}
    for candidate in rows[_MOST_ROWS - 1 :]:
        if candidate.strategy not in seen:
            seen.add(candidate.strategy)
            kept.append(candidate)
    return kept


def _cells(candidate: Candidate, priced: bool) -> list[str]:
    cells = [
        candidate.strategy,
        mesh_text(candidate),
        str(candidate.micro_batch or "-"),
        candidate.activation_checkpointing,
    ]
    cells += [candidate.precision, format_bytes(candidate.memory.total) if candidate.memory else "-"]
    if candidate.seconds is None or candidate.tokens_per_second is None or candidate.mfu_ratio is None:
        return [*cells, "-", "-", "-", "-", *(["-"] if priced else [])]
    cells += [format_step_seconds(candidate.seconds.total), f"{candidate.tokens_per_second:,.0f}"]
    cells += [
        f"{100 * candidate.mfu_ratio:.0f} %",
        _hours(candidate.hours) if candidate.hours is not None else "-",
    ]
    return [*cells, f"{candidate.usd:,.0f}" if candidate.usd is not None else "-"] if priced else cells


def mesh_text(candidate: Candidate) -> str:
    """Copies x shards, and the other axes that are larger than 1."""
    mesh = candidate.mesh
    if mesh is None:
        return "-"
    others = {"pp": mesh.pp, "cp": mesh.cp, "tp": mesh.tp, "ep": mesh.ep}
    words = [f"{axis} {size}" for axis, size in others.items() if size > 1]
    if candidate.context_exchange == "ring":
        words = [f"{word} in a ring" if word.startswith("cp") else word for word in words]
    return ", ".join([f"{mesh.dp_replicate} x {mesh.dp_shard}", *words])


def causes(candidate: Candidate) -> Iterator[str]:
    """Bytes and seconds of the chosen one."""
    memory, seconds = candidate.memory, candidate.seconds
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
    if candidate.hours is not None:
        cost = ""
        if candidate.usd is not None and candidate.usd_per_million_tokens is not None:
            cost = (
                f", {candidate.usd:,.2f} USD, {candidate.usd_per_million_tokens:.4f} USD per million tokens"
            )
        yield f"  run     {_hours(candidate.hours)}{cost}"


def _hours(hours: float) -> str:
    return f"{hours:,.1f} h" if hours >= 1 else format_seconds(3600 * hours)


def scaling(rows: Sequence[ScaledPlan]) -> list[str]:
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


def groups(plans: Sequence[GroupPlan]) -> list[str]:
    """What each class of nodes has of a batch, and gives for its price."""
    cells = [
        [
            "group",
            "workers",
            "of a batch",
            "each",
            "micro",
            "recompute",
            "memory",
            "step",
            "USD/h",
            "USD/M tok",
        ]
    ]
    for one in plans:
        hourly, tokens = one.usd_per_hour, one.usd_per_million_tokens
        cells.append(
            [
                f"{one.num_nodes} x {one.name}",
                str(one.num_workers),
                f"{100 * one.share_ratio:.0f} %",
                str(one.sequences),
                str(one.micro_batch),
                one.activation_checkpointing,
                "-" if one.memory_bytes is None else format_bytes(one.memory_bytes),
                "-" if one.step_seconds is None else format_step_seconds(one.step_seconds),
                "-" if hourly is None else f"{hourly:,.2f}",
                "-" if tokens is None else f"{tokens:.3f}",
            ]
        )
    return _table(cells)


def mixed_words(mixed: MixedPlan) -> list[str]:
    """How fast they are together, and how to ask for it."""
    step, even = (format_step_seconds(one or 0.0) for one in (mixed.step_seconds, mixed.even_seconds))
    mesh = mixed.mesh
    keys = f"strategy: {mixed.strategy}, communication: {mixed.communication}"
    if mesh.num_data_ranks < mesh.world_size or mesh.ep > 1 or mesh.dp_replicate > 1 < mesh.dp_shard:
        axes = ", ".join(f"{axis}: {size}" for axis, size in mesh.larger_axes.items())
        keys = f"mesh: {{{axes}}}, {keys}"
    if mesh.pp == mesh.ep == 1:
        keys += ", stragglers: move_load"
    return [
        f"  a step of {step}, with equal shares {even}; {mixed.tokens_per_second or 0.0:,.0f} tok/s",
        f"  train: {{{keys}}}",
    ]


def _table(rows: list[list[str]]) -> list[str]:
    return [f"  {line}" for line in aligned(rows, left=range(len(rows[0])))]
