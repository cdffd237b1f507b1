"""What the page says of an evaluation."""

from __future__ import annotations

from mlpipe.kinds.evaluate.plan import EvaluatePlan
from mlpipe.observe.blocks import Card, Facts, Paragraph, Piece, Preformatted, Section
from mlpipe.observe.progress import format_loss
from mlpipe.observe.runview import StageView


def section(stage: StageView) -> Section:
    """The figures, the gate's verdict and the text that was generated."""
    result = stage.evaluation
    if result is None:
        waiting = stage.state.state in ("pending", "running")
        return Section([Card([Paragraph("No result yet." if waiting else "No result was left.")])])
    plan = stage.part(EvaluatePlan)
    verdict = {True: "passed", False: "not passed", None: "not decided"}[result.passed]
    in_nats = result.val_perplexity is not None  # else a loss of the model's own
    targets = "tokens" if in_nats else "targets"
    loss = _number(result.val_loss)
    blocks: list[Piece] = [
        Facts(
            {
                "checkpoint of": _whose(plan) if plan is not None else None,
                "validation loss": f"{loss} nats per token" if loss is not None and in_nats else loss,
                "perplexity": _number(result.val_perplexity),
                "bits per byte": _number(result.val_bits_per_byte),
                **{name: _number(value) for name, value in (result.metrics or {}).items()},
                "over": f"{result.num_tokens:,.0f} {targets}" if result.num_tokens else None,
                "gate": f"{result.gate}: {verdict}" if result.gate else None,
                "prompt": plan.prompt if plan is not None else None,
            }
        )
    ]
    if result.sample:
        blocks.append(Preformatted(result.sample, "Generated text"))
    named = {
        "validation loss": result.val_loss,
        "perplexity": result.val_perplexity,
        "bits per byte": result.val_bits_per_byte,
        **(result.metrics or {}),
    }
    facts = [f"{name} {format_loss(value)}" for name, value in named.items() if value is not None]
    if result.gate:
        facts.append(f"gate {result.gate} {'passed' if result.passed else 'not passed'}")
    return Section([Card(blocks)], facts)


def _whose(plan: EvaluatePlan) -> str:
    return f"{plan.train_stage}, the best" if plan.checkpoint == "best" else plan.train_stage


def _number(value: float | None) -> str | None:
    return None if value is None else format_loss(value)
