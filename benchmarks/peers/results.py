"""Rows against the best peer."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks import measure

OURS, PEER, CONTROL = "mlpipe", "raw DDP", "raw DDP again"


def against_best(
    work: str, name: str, unit: str, found: list[measure.Round], key: str, *, goal: float | None,
    higher_is_better: bool = True,
) -> list[dict[str, Any]]:  # fmt: skip
    """First the row with the goal, against the best peer by its median; then one against each other peer, and
    the control, both without a goal."""
    peers = [side for side in found[0] if side not in (OURS, CONTROL)]
    medians = {peer: statistics.median(r[peer][key] for r in found) for peer in peers}
    ranked = sorted(peers, key=medians.__getitem__, reverse=higher_is_better)

    def row(label: str, side: str, peer: str, goal: float | None) -> dict[str, Any]:
        return measure.figure(
            work, label, unit, found, key, ours=side, peer=peer, goal=goal, higher_is_better=higher_is_better
        )

    rows = [row(name, OURS, ranked[0], goal)]
    rows += [row(f"{name}, against {peer}", OURS, peer, None) for peer in ranked[1:]]
    controlled = found[0].keys() >= {CONTROL, PEER}
    return [*rows, row(f"control: {name}", CONTROL, PEER, None)] if controlled else rows


def to_loss(
    work: str, found: list[measure.Round], needed: dict[str, float | None], target: float, steps: int
) -> list[dict[str, Any]]:
    """Seconds to a validation loss that was fixed beforehand: the steps that a side `needed` (None: it was
    not there after `steps`) times its seconds for a step in each round. A side that was not there has a row
    with the reason and no figure; without ours, or without any peer's, the goal is not met."""
    name = f"seconds to a loss of {target}"
    there = {side: number for side, number in needed.items() if number is not None}
    timed = [
        {side: {"to_loss": one[side]["seconds"] * number} for side, number in there.items()} for one in found
    ]
    late = [side for side in needed if side not in there and side != CONTROL]
    comparable = OURS in there and there.keys() - {OURS, CONTROL}
    rows = (
        against_best(work, name, "s", timed, "to_loss", goal=1.0, higher_is_better=False)
        if comparable
        else []
    )
    if OURS in there and not comparable:
        mine = measure.alone(work, name, "s", [one[OURS]["to_loss"] for one in timed])
        rows.append({**mine, "goal": 1.0, "met": False, "reason": "no peer reached it"})
    for side in late:
        goal = 1.0 if side == OURS else None
        rows.append(
            {
                "work": work, "figure": name, "unit": "s", "higher_is_better": False, "side": side,
                "ours": None, "ours_spread": None, "peer": None, "best_peer": None, "best_peer_spread": None,
                "ratio": None, "ratio_interval": None, "goal": goal, "met": None if goal is None else False,
                "rounds": len(found), "reason": f"{side} did not reach it in {steps} steps",
            }
        )  # fmt: skip
    return sorted(rows, key=lambda row: row["goal"] is None)
