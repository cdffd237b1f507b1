"""What a report says of samples of different lengths: how long they are, how much is padding, who waits."""

from __future__ import annotations

from mlpipe._core.records import Step
from mlpipe.observe.blocks import Cell, Details, Facts, Paragraph, Piece, Table
from mlpipe.observe.progress import format_count
from mlpipe.observe.runview import StageView


def table(stage: StageView) -> Piece | None:
    """Of a training whose data tell of lengths."""
    ranks = {
        rank: [step for step in timeline.steps if step.padding_tokens is not None]
        for rank, timeline in stage.timelines.items()
    }
    steps = [step for of_rank in ranks.values() for step in of_rank]
    if not steps:
        return None
    num_tokens = sum(step.tokens or 0 for step in steps)
    padding = sum(step.padding_tokens or 0 for step in steps)
    facts = {
        "samples by tokens": _histogram(stage.start.sample_lengths or {}),
        "padding": f"{100 * padding / max(1, num_tokens):.1f} % of the tokens computed",
        "targets": _targets(stage, steps),
    }
    blocks: list[Piece] = [Facts({name: fact for name, fact in facts.items() if fact is not None})]
    rows: list[list[Cell]] = [
        [rank, f"{expected:.1f} %", f"{measured:.1f} %"]
        for rank, of_rank in ranks.items()
        if (expected := _expected(of_rank)) is not None and (measured := _measured(of_rank)) is not None
    ]
    if rows:
        words = (
            "Share of a step for which a rank waits: expected of the lengths of its samples, and measured, "
        )
        blocks.append(Paragraph(words + "with the time that bytes are on the way.", is_faint=True))
        blocks.append(Table(("Rank", "expected", "measured"), rows, frozenset({0, 1, 2})))
    return Details("Samples of different lengths", blocks, is_open=len(rows) <= 8)


def _histogram(lengths: dict[str, int]) -> str | None:
    """By the upper bound of their tokens."""
    return ", ".join(f"{count} up to {bound}" for bound, count in lengths.items()) or None


def _targets(stage: StageView, steps: list[Step]) -> str | None:
    """A second, over all ranks; None where not all are at hand."""
    seconds = sum(step.seconds or 0.0 for step in stage.lead.steps if step.padding_tokens is not None)
    if not seconds or stage.num_ranks > len(stage.timelines):
        return None
    return (
        f"{format_count(sum(step.target_tokens or 0 for step in steps) / seconds)} a second, over all ranks"
    )


def _expected(steps: list[Step]) -> float | None:
    known = [step.idle_predicted_ratio for step in steps if step.idle_predicted_ratio is not None]
    return 100 * sum(known) / len(known) if known else None


def _measured(steps: list[Step]) -> float | None:
    seconds = sum(step.seconds or 0.0 for step in steps)
    return 100 * sum(step.collective_seconds or 0.0 for step in steps) / seconds if seconds else None
