"""A case's answer to rows of the results, and the rows to a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks import measure
from benchmarks.gpu.work import PUBLISHED, Case, Model, filled_ratio, flops_of

FORMULA = (
    "model FLOPs a second over the dense bf16 peak of the datasheet; FLOPs a token: 6 x (parameters in "
    "matmuls; a tied head counts) + 12 x layers x width x seq_len, no causal discount, recomputation not "
    "counted (torchtitan)"
)
GOAL_SPEED = 1.0
_PREDICTED_WITHIN = 0.10


def rows_of(case: Case, model: Model, answer: dict[str, Any], predicted: int | None) -> list[dict[str, Any]]:
    """What is known of a case; at least one row, with its reason where there is no figure."""
    found = answer.get("rounds", [])
    if not found:
        return [_row(case, "tokens a second", "tok/s", True, reason=answer.get("error", "no answer"))]
    has_raw = "raw" in found[0]
    flops, peak = flops_of(case, model), answer.get("peak_flops")
    rows = []
    speed = [r["mlpipe"]["tokens_per_second"] for r in found]
    more = {"rounds": len(found), "cut": not answer.get("complete", False)}
    more |= {"reason": answer["error"]} if "error" in answer else {}
    pairs = [("tokens a second", "mlpipe", GOAL_SPEED), ("control: tokens a second", "raw again", None)]
    for name, side, goal in pairs:
        if not {side, "raw"} <= found[0].keys():
            continue
        row = measure.figure(
            case.name,
            name,
            "tok/s",
            found,
            "tokens_per_second",
            ours=side,
            peer="raw",
            goal=goal,
            higher_is_better=True,
        )
        rows.append(row | more)
    if not has_raw:
        known = {"reason": answer.get("raw_error", "the raw loop did not run"), **more}
        rows.append(
            _row(
                case,
                "tokens a second",
                "tok/s",
                True,
                ours=statistics.median(speed),
                spread=speed,
                more=known,
            )
        )
    if peak:
        share = [flops * value / peak for value in speed]
        raw = [flops * r["raw"]["tokens_per_second"] / peak for r in found] if has_raw else None
        mfu = _row(case, "MFU", "ratio", True, ours=statistics.median(share), spread=share, more=more)
        if raw:
            mfu |= {
                "peer": "raw",
                "best_peer": statistics.median(raw),
                "best_peer_spread": [min(raw), max(raw)],
            }
            mfu["ratio"] = mfu["ours"] / mfu["best_peer"]
        if answer.get("achievable_flops"):
            mfu["share_of_achievable"] = mfu["ours"] * peak / answer["achievable_flops"]
        rows.append(mfu)
        if case.goal_mfu is not None:
            goal = measure.alone(
                case.name, "MFU, goal", "ratio", share, goal=case.goal_mfu, higher_is_better=True
            )
            rows.append(goal | more)
    rows += _published(case, speed)
    rows += _memory(case, answer, predicted)
    return rows


def _published(case: Case, speed: list[float]) -> list[dict[str, Any]]:
    if case.variant or case.model not in PUBLISHED:
        return []
    value, mfu, source = PUBLISHED[case.model]
    more = {"peer": "published", "best_peer": value, "source": source, "published_mfu": mfu}
    ours = statistics.median(speed)
    more["ratio"] = ours / value
    return [_row(case, "tokens a second, published", "tok/s", True, ours=ours, spread=speed, more=more)]


def _memory(case: Case, answer: dict[str, Any], predicted: int | None) -> list[dict[str, Any]]:
    ours, raw = answer.get("memory") or {}, answer.get("raw_memory") or {}
    rows = []
    if ours:
        used = ours["process"]
        more: dict[str, Any] = {"peer": "plan", "best_peer": predicted, "detail": ours}
        if predicted:
            more["ratio"] = used / predicted
        else:
            more["reason"] = "a user's own model: the planner predicts the presets only"
        rows.append(_row(case, "peak memory of the process", "bytes", False, ours=used, more=more))
        if predicted:
            name = "peak memory, distance from the plan"
            off = abs(used / predicted - 1)
            rows.append(measure.alone(case.name, name, "ratio", [off], goal=_PREDICTED_WITHIN))
    if ours and raw:
        ratio = ours["allocated"] / raw["allocated"]
        more = {
            "peer": "raw",
            "best_peer": raw["allocated"],
            "ratio": ratio,
            "goal": 1.0,
            "met": ratio <= 1.0,
        }
        rows.append(_row(case, "peak memory of tensors", "bytes", False, ours=ours["allocated"], more=more))
    return rows


def variants(
    figures: list[dict[str, Any]], cases: list[Case], models: Mapping[str, Model]
) -> list[dict[str, Any]]:
    """Of each variant the speed over that of its model without it; of packed samples also over that of a row
    for each, filled up to the longest that there may be. Other processes: no interval."""
    speeds = {
        row["work"]: row["ours"]
        for row in figures
        if row["figure"] == "tokens a second" and row["ours"] is not None
    }
    rows = []
    for case in cases:
        base, own = speeds.get(case.model), speeds.get(case.name)
        if case.variant and base and own:
            more = {"peer": case.model, "best_peer": base, "ratio": own / base}
            rows.append(_row(case, "tokens a second, variant", "tok/s", True, ours=own, more=more))
            if case.documents:
                padded = base * filled_ratio(models[case.model])
                more = {"peer": "padded", "best_peer": padded, "ratio": own / padded}
                rows.append(_row(case, "tokens a second, packed", "tok/s", True, ours=own, more=more))
    return rows


def _row(
    case: Case,
    name: str,
    unit: str,
    higher_is_better: bool,
    *,
    ours: float | None = None,
    spread: list[float] | None = None,
    reason: str | None = None,
    more: dict[str, Any] | None = None,
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "work": case.name,
        "figure": name,
        "unit": unit,
        "higher_is_better": higher_is_better,
        "side": "mlpipe",
        "ours": ours,
        "ours_spread": [min(spread), max(spread)] if spread else None,
        "peer": None,
        "best_peer": None,
        "best_peer_spread": None,
        "ratio": None,
        "ratio_interval": None,
        "goal": None,
        "met": None,
    }
    return row | ({"reason": reason} if reason else {}) | (more or {})


def table(figures: list[dict[str, Any]]) -> str:
    lines = []
    for row in figures:
        line = f"{row['work']:<34} {row['figure']:<28}"
        if row["ours"] is not None:
            line += f" {_show(row['ours'], row['unit']):>10}"
        if row["best_peer"] is not None:
            line += f" | {row['peer']:<12} {_show(row['best_peer'], row['unit']):>10}"
        if row["ratio"] is not None:
            line += f"  ratio {row['ratio']:.3f}"
        if row["ratio_interval"]:
            low, high = row["ratio_interval"]
            line += f" [{low:.3f}, {high:.3f}]"
        if row["goal"] is not None:
            line += f"  goal {row['goal']:.3g} {'met' if row['met'] else 'MISSED'}"
        if row.get("reason"):
            line += f"  ({row['reason']})"
        lines.append(line)
    return "\n".join(lines)


def _show(value: float, unit: str) -> str:
    if unit == "bytes":
        return f"{value / 2**30:.2f} GiB"
    return f"{value:.4f}" if unit == "ratio" else f"{value:,.0f}"
