"""A profile on the page of a run."""

from __future__ import annotations

from mlpipe.observe.blocks import Cell, Details, Paragraph, Piece, Preformatted, Table
from mlpipe.observe.profiles.findings import findings
from mlpipe.observe.profiles.stored import StoredProfile
from mlpipe.observe.profiles.text import profile_text


def profile_piece(stored: StoredProfile) -> Piece:
    """What to change, and all figures below."""
    first, last = stored.profile.first_step, stored.profile.first_step + stored.profile.steps - 1
    rows: list[list[Cell]] = [
        [one.what, None if one.gain is None else f"{100 * one.gain:.0f} %", one.remedy]
        for one in findings(stored.ranks)
    ]
    blocks: list[Piece] = [Table(("Found", "Of a step, at most", "What to do"), rows, frozenset({1}))]
    if not rows:
        blocks = [Paragraph("Nothing stands out.")]
    blocks.append(Preformatted(profile_text(stored.ranks)))
    traces = ", ".join(stored.trace_keys())
    blocks.append(Paragraph(f"Traces, for ui.perfetto.dev: {traces}", is_faint=True))
    return Details(f"Profile of steps {first} to {last}", blocks, is_open=bool(rows))
