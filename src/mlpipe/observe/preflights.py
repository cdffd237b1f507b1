"""What a report says of the machines that were checked before ranks started."""

from __future__ import annotations

from mlpipe._core.units import format_seconds
from mlpipe.observe.blocks import Cell, Details, Paragraph, Piece, Strong, Table
from mlpipe.observe.runview import StageView
from mlpipe.store.preflight import Checked

_FIGURES = {  # the column, and what one of its unit is
    "flops": ("Matmul, GFLOP/s", 1e9),
    "memory_bytes_per_second": ("Memory, GB/s", 1e9),
    "peer_bytes_per_second": ("Between GPUs, GB/s", 1e9),
    "speed_age_seconds": ("These, s ago", 1.0),
    "store_bytes_per_second": ("Store, MB/s", 1e6),
    "link_bytes_per_second": ("Best link, MB/s", 1e6),
    "all_reduce_bytes_per_second": ("All-reduce, MB/s", 1e6),
    "disk_free_bytes": ("Disk free, GB", 1e9),
    "clock_seconds": ("Clock ahead, s", 1.0),
}
_MOST_ROWS = 64


def pieces(stage: StageView) -> list[Piece]:
    """A box for each attempt whose machines were checked."""
    return [
        _piece(attempt.number, attempt.preflight)
        for attempt in stage.attempts
        if attempt.preflight is not None
    ]


def _piece(attempt: int, checked: Checked) -> Piece:
    """Of each figure that several have, the least is marked: that machine is the slowest."""
    named = sorted(figure for figures in checked.nodes.values() for figure in figures if figure in _FIGURES)
    shown = [figure for figure in _FIGURES if figure in named]
    rates = {figure: [one[figure] for one in checked.nodes.values() if figure in one] for figure in shown}

    def cell(figure: str, rate: float | None) -> Cell:
        if rate is None:
            return None
        text = f"{rate / _FIGURES[figure][1]:.3g}"
        is_least = not figure.endswith("_seconds") and len(rates[figure]) > 1 and rate == min(rates[figure])
        return Strong(text) if is_least else text

    rows: list[list[Cell]] = [
        [node, *(cell(figure, figures.get(figure)) for figure in shown)]
        for node, figures in list(checked.nodes.items())[:_MOST_ROWS]
    ]
    head = ("Machine", *(_FIGURES[figure][0] for figure in shown))
    blocks: list[Piece] = [Paragraph(f"It took {format_seconds(checked.seconds)}.")]
    blocks += [Table(head, rows, frozenset(range(1, len(head))))]
    blocks += [Paragraph(f"Did not pass: {words}") for words in checked.words]
    blocks += [
        Paragraph(f"Slow while it trained: {node} took {ratio:.1f} times as long as the others.")
        for node, ratio in checked.slow.items()
    ]
    blocks += [
        Paragraph(f"Not blamed, since others took its CPUs: {node}: {words}", is_faint=True)
        for node, told in checked.busy.items()
        for words in told
    ]
    blocks += [
        Paragraph(f"Not read: {node}: {'; '.join(words)}", is_faint=True)
        for node, words in checked.unread.items()
    ]
    if len(rows) > 1:
        blocks.append(Paragraph("In bold: the least of the machines.", is_faint=True))
    size = f"{len(checked.nodes)} machines" if len(checked.nodes) > 1 else "one machine"
    summary = f"Preflight of attempt {attempt}: {size}, {'not all passed' if checked.words else 'passed'}"
    return Details(summary, blocks, is_open=bool(checked.words or checked.slow))
