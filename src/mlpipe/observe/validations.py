"""What a report says of the validations in a training: curves, a table, the best one, why it stopped
early."""

from __future__ import annotations

from collections.abc import Sequence

from mlpipe._core.records import Validation
from mlpipe._core.units import format_seconds
from mlpipe.observe.axes import Point, finite
from mlpipe.observe.blocks import Cell, Chart, Details, Facts, Piece, Preformatted, Table
from mlpipe.observe.plots import Mark, Series, line_plot
from mlpipe.observe.progress import format_loss
from mlpipe.observe.runview import StageView

_MOST_ROWS = 50
_MOST_CHARTS = 4


def names(validations: Sequence[Validation]) -> list[str]:
    """Of all metrics that were measured, as they came."""
    return list(dict.fromkeys(name for one in validations for name in one.metrics or {}))


def points(validations: Sequence[Validation], name: str) -> list[Point]:
    """(step, value) of those that have it."""
    return [(one.step, one.metrics[name]) for one in validations if one.step and name in (one.metrics or {})]  # type: ignore[index]


def charts(validations: Sequence[Validation], marks: Sequence[Mark]) -> list[Chart]:
    """One a metric, but for the loss, which stands beside that of the training."""
    shown = [name for name in names(validations) if name != "loss"][:_MOST_CHARTS]
    curves = {name: points(validations, name) for name in shown}
    return [
        Chart(f"Validation: {name}", "", line_plot([Series("", "green", curve)], marks, unit=""))
        for name, curve in curves.items()
        if any(finite(value) for _, value in curve)
    ]


def best_of(stage: StageView) -> Validation | None:
    """The newest that said it was."""
    return next((one for one in reversed(stage.lead.validations) if one.best), None)


def facts(stage: StageView) -> list[str]:
    """For the summary in a line."""
    told = []
    if stage.lead.validations:
        told.append(
            f"validation of step {stage.lead.validations[-1].step}: {_told(stage.lead.validations[-1])}"
        )
    if (best := best_of(stage)) is not None:
        told.append(f"best at step {best.step}: {_told(best)}")
    if stage.lead.validations and stage.outcome.get("outcome") == "done" and stage.outcome.get("message"):
        told.append(str(stage.outcome["message"]))
    return told


def table(stage: StageView) -> Piece | None:
    """Every validation, the last of them and the best in words, and the last text that was generated."""
    validations = stage.lead.validations
    if not validations:
        return None
    shown = names(validations)
    best = best_of(stage)
    rows: list[list[Cell]] = [
        [
            one.step,
            *(
                format_loss(value) if (value := (one.metrics or {}).get(name)) is not None else None
                for name in shown
            ),
            {True: "best", False: "", None: None}[one.best] if one is best or not one.best else "best so far",
            None if one.seconds is None else format_seconds(one.seconds),
        ]
        for one in validations[-_MOST_ROWS:]
    ]
    done = stage.outcome.get("outcome") == "done"
    known: dict[str, Cell] = {
        "best": None if best is None else f"step {best.step}: {_told(best)}",
        "held-out samples": validations[-1].num_samples,
        "stopped early": (stage.outcome.get("message") or None) if done else None,
    }
    blocks: list[Piece] = [
        Facts(known),
        Table(("Step", *shown, "", "Took"), rows, frozenset({0, *range(1, len(shown) + 1), len(shown) + 2})),
    ]
    if validations[-1].sample:
        blocks.append(Preformatted(validations[-1].sample, f"Generated at step {validations[-1].step}"))
    if len(validations) > _MOST_ROWS:
        return Details(f"Validation (the last {_MOST_ROWS} of {len(validations)})", blocks, is_open=True)
    return Details(f"Validation ({len(validations)})", blocks, is_open=len(validations) <= 12)


def _told(one: Validation) -> str:
    return ", ".join(f"{name} {format_loss(value)}" for name, value in (one.metrics or {}).items())
