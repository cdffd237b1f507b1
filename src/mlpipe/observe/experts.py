"""What a report says of a mixture of experts: how evenly tokens were spread over its experts."""

from __future__ import annotations

from mlpipe._core.records import Step
from mlpipe.observe.blocks import Cell, Details, Paragraph, Piece, Table
from mlpipe.observe.runview import StageView

_LAST_STEPS = 10


def table(stage: StageView) -> Piece | None:
    """The fullest expert of each layer at first and at last, and how full all were in the last step."""
    steps = [step for step in stage.lead.steps if step.expert_max_load_ratio]
    if not steps:
        return None
    last = steps[-_LAST_STEPS:]
    rows: list[list[Cell]] = [
        [layer, _ratio(steps[:1], layer), _ratio(last, layer)]
        for layer in steps[-1].expert_max_load_ratio or {}
    ]
    head = ("Layer", f"Step {steps[0].step}", f"Mean of steps {last[0].step} to {last[-1].step}")
    words = "Tokens of the fullest expert, over the mean of its layer: 1 where all have as many."
    blocks: list[Piece] = [Paragraph(words, is_faint=True), Table(head, rows, frozenset({0, 1, 2}))]
    full = last[-1].experts_by_load_ratio or {}
    counts = ", ".join(f"{full[bound]} up to {bound}" for bound in full if full[bound] and bound != "inf")
    more = f", {full['inf']} above" if full.get("inf") else ""
    blocks.append(
        Paragraph(f"Experts of all layers in step {last[-1].step}, by the same ratio: {counts}{more}.")
    )
    return Details("Experts: how evenly tokens were spread", blocks, is_open=len(rows) <= 12)


def _ratio(steps: list[Step], layer: str) -> str | None:
    found = [step.expert_max_load_ratio or {} for step in steps]
    ratios = [one[layer] for one in found if layer in one]
    return f"{sum(ratios) / len(ratios):.2f}" if ratios else None
