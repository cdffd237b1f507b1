"""A profile on the page of a run."""

from __future__ import annotations

from mlpipe.observe.blocks import Cell, Details, Paragraph, Piece, Preformatted, Table
from mlpipe.observe.profiles.findings import findings
from mlpipe.observe.profiles.stored import StoredProfile
from mlpipe.observe.profiles.text import NOT_PRICED, profile_text


def profile_piece(stored: StoredProfile) -> Piece:
    """What to change, and all figures below."""
    first, last = stored.profile.first_step, stored.profile.first_step + stored.profile.steps - 1
    heads: tuple[str, ...] = ("Found", "Of a step, at most", "What to do")
    rows: list[list[Cell]] = []
    for one in findings(stored.ranks):
        rows.append([one.what, None if one.gain is None else f"{100 * one.gain:.0f} %", one.remedy])
        if stored.expected is not None:
            rows[-1].append(stored.expected.get(one.cause, NOT_PRICED))
    if stored.expected is not None:
        heads += ("By the planner",)
    blocks: list[Piece] = [Table(heads, rows, frozenset({1}))]
    if not rows:
        blocks = [Paragraph("Nothing stands out.")]
    blocks.append(Preformatted(profile_text(stored.ranks, stored.expected)))
    traces = ", ".join(stored.trace_keys())
    blocks.append(Paragraph(f"Traces, for ui.perfetto.dev: {traces}", is_faint=True))
    return Details(f"Profile of steps {first} to {last}", blocks, is_open=bool(rows))
