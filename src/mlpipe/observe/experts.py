"""What a report says of a mixture of experts: how evenly tokens were spread over its experts."""

from __future__ import annotations

from mlpipe._core.records import Step
from mlpipe.observe.blocks import Cell, Details, Paragraph, Piece, Table
from mlpipe.observe.runview import StageView

_LAST_STEPS = 10


def table(stage: StageView) -> Piece | None:
    """The fullest expert of each layer at first and at last, in single steps and averaged over some, and how
    full all were in the last step."""
    steps = [step for step in stage.lead.steps if step.expert_max_load_ratio]
    if not steps:
        return None
    last = steps[-_LAST_STEPS:]
    averages = last[-1].expert_max_average_load_ratio or {}
    rows: list[list[Cell]] = [
        [layer, _ratio(steps[:1], layer), _ratio(last, layer), _number(averages.get(layer))]
        for layer in steps[-1].expert_max_load_ratio or {}
    ]
    mean = f"Mean of steps {last[0].step} to {last[-1].step}"
    head = ("Layer", f"Step {steps[0].step}", mean, "Of tokens of about 20")
    words = "Tokens of the fullest expert, over the mean of its layer: 1 where all have as many. Of one step"
    words += " some of it is chance, of tokens added up over about 20 steps less."
    blocks: list[Piece] = [Paragraph(words, is_faint=True), Table(head, rows, frozenset({0, 1, 2, 3}))]
    full = last[-1].experts_by_load_ratio or {}
    counts = ", ".join(f"{full[bound]} up to {bound}" for bound in full if full[bound] and bound != "inf")
    more = f", {full['inf']} above" if full.get("inf") else ""
    blocks.append(
        Paragraph(f"Experts of all layers in step {last[-1].step}, by the same ratio: {counts}{more}.")
    )
    if (dropped := last[-1].expert_dropped_ratio) is not None:
        blocks.append(Paragraph(f"Of the tokens' ways to experts {dropped:.1%} had no room in that step."))
    return Details("Experts: how evenly tokens were spread", blocks, is_open=len(rows) <= 12)


def _ratio(steps: list[Step], layer: str) -> str | None:
    loads = [step.expert_max_load_ratio or {} for step in steps]
    ratios = [one[layer] for one in loads if layer in one]
    return _number(sum(ratios) / len(ratios) if ratios else None)


def _number(ratio: float | None) -> str | None:
    return None if ratio is None else f"{ratio:.2f}"
