"""The planner against the world: predicted beside measured.

    python -m benchmarks.planner                     # cpu and published; about twenty minutes on two cores
    python -m benchmarks.planner --only cpu --cases 0:4   # a part of the table; the rest of it stays
    python -m benchmarks.planner --only published    # seconds, and no torch
    python -m benchmarks.planner --only gpu          # where there is one: peak memory, and what fits

cpu: `cpu.py`; published: `published.py`; gpu: `gpu.py`. All go to results/planner.json, in which what was not
measured again stays.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

from benchmarks.measure import RESULTS, alone, document, write
from benchmarks.planner import gpu
from benchmarks.planner.cpu import CASES, cpu, in_turns, is_ranked, predict, ranking, text_of
from benchmarks.planner.published import bias, published, published_text
from benchmarks.planner.published import ranking as published_ranking


def summary(rows: list[dict[str, Any]], key: str) -> dict[str, Any]:
    errors = sorted(abs(row[key]) for row in rows if row.get(key) is not None)
    return {"rows": len(errors), "median": statistics.median(errors), "worst": errors[-1]} if errors else {}


def cpu_part(before: dict[str, Any], part: slice, steps: int, quick: bool) -> dict[str, Any]:
    """The rows of `before`, with those of `part` measured anew, all predicted anew."""
    calibrations = dict(before.get("calibrations", {}))
    rows = {json.dumps(row["case"], sort_keys=True): row for row in before.get("cpu", ())}
    load = os.getloadavg()[0]
    found, more = cpu(CASES[part], steps)
    calibrations |= more
    for row in found:
        rows[json.dumps(row["case"], sort_keys=True)] = {
            **row, "load_before": load, "steps": steps, "quick": quick,
        }  # fmt: skip
    used = {run["calibration"] for row in rows.values() for run in row["runs"]}
    calibrations = {key: value for key, value in calibrations.items() if key in used}
    predicted = predict(list(rows.values()), calibrations)
    ranked = before.get("cpu_in_turns", {})
    if sum(map(is_ranked, CASES[part])) == sum(map(is_ranked, CASES)):
        ranked = in_turns(steps)
    for row in predicted:
        print(text_of(row))
    return {
        "cpu": predicted,
        "cpu_in_turns": ranked,
        "calibrations": calibrations,
        "cpu_summary": {
            "seconds": summary(predicted, "seconds_error"),
            "memory": summary(predicted, "memory_error"),
            "ranking": ranking(predicted, ranked),
        },
    }


def published_part() -> dict[str, Any]:
    found = published()
    for row in found:
        print(published_text(row))
    sets = {name: [row for row in found if row["set"] == name] for name in ("learn", "test")}
    sets |= {
        f"{name}, model parallelism": [row for row in rows if row["model_parallel"]]
        for name, rows in sets.items()
    }
    return {
        "published": found,
        "published_summary": {
            name: {
                **{key: summary(rows, f"{key}_error") for key in ("seconds", "memory")},
                "bias": bias(rows),
                "ranking": published_ranking(rows),
            }
            for name, rows in sets.items()
        },
    }


def gpu_part(device: str, quick: bool) -> dict[str, Any]:
    rows, edges = gpu.memory(device, quick), gpu.edges(device, quick)
    return {
        "gpu": rows,
        "gpu_edges": edges,
        "gpu_summary": {
            "memory": summary(rows, "memory_error"),
            "out_of_memory": sum(edge["out_of_memory"] for edge in edges),
            "most_unused": max(edge["unused_ratio"] for edge in edges),
        },
    }


_GOALS = {  # largest errors wanted: median, worst
    ("cpu", "seconds"): (0.10, 0.25),
    ("cpu", "memory"): (0.05, 0.12),
    ("published: test", "seconds"): (0.10, None),
    ("published: test", "memory"): (0.15, None),
    ("published: test, model parallelism", "seconds"): (0.10, None),
    ("gpu", "memory"): (0.05, None),
}
_RANKING, _BIAS = 0.95, 0.03
_MODEL_PARALLEL_ROWS = 40


def rows_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The summaries as rows of every benchmark's table."""
    found = {"cpu": body.get("cpu_summary", {}), "gpu": body.get("gpu_summary", {})}
    found |= {f"published: {name}": one for name, one in body.get("published_summary", {}).items()}
    rows = []
    for work, one in found.items():
        for figure in ("seconds", "memory"):
            goals = dict(zip(("median", "worst"), _GOALS.get((work, figure), (None, None)), strict=True))
            for kind, goal in goals.items():
                if one.get(figure):
                    error = [one[figure][kind]]
                    rows.append(
                        alone(f"planner, {work}", f"{kind} error, {figure}", "ratio", error, goal=goal)
                    )
        is_test = work.startswith("published: test")
        if "bias" in one:
            goal = _BIAS if is_test else None
            rows.append(alone(f"planner, {work}", "bias, seconds", "ratio", [abs(one["bias"])], goal=goal))
        ranked = one.get("ranking")
        if ranked:  # of published runs, the work that is ranked worst
            name = "speed of the chosen configuration over that of the fastest"
            least = min(ranked.values()) if isinstance(ranked, dict) else ranked
            goal = _RANKING if is_test or work == "cpu" else None
            rows.append(alone(f"planner, {work}", name, "ratio", [least], goal=goal, higher_is_better=True))
    split = [one["seconds"]["rows"] for work, one in found.items() if work.endswith("model parallelism")]
    if split:
        name, goal = "rows with model parallelism", _MODEL_PARALLEL_ROWS
        count = [sum(split)]
        rows.append(alone("planner, published", name, "count", count, goal=goal, higher_is_better=True))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=["cpu", "published", "gpu"])
    parser.add_argument("--cases", default=":", help="of cpu, like 0:4; none (0:0) predicts anew")
    parser.add_argument("--quick", action="store_true", help="two cases, few steps: figures mean nothing")
    parser.add_argument("--steps", type=int, default=12, help="of each cpu configuration")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="of gpu; cpu: a rehearsal")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    path = arguments.results / "planner.json"
    before: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if arguments.quick:
        before = {}
    first, _, last = arguments.cases.partition(":")
    part = slice(int(first or 0), int(last or len(CASES)))
    body = {key: value for key, value in before.items() if key.startswith(("cpu", "cal", "publ", "gpu"))}
    if arguments.only in (None, "cpu"):
        steps = 4 if arguments.quick else arguments.steps
        body |= cpu_part(before, slice(0, 2) if arguments.quick else part, steps, arguments.quick)
    if arguments.only in (None, "published"):
        body |= published_part()
    if arguments.only == "gpu":
        body |= gpu_part(arguments.device, arguments.quick)
    for key in ("cpu_summary", "published_summary", "gpu_summary"):
        if key in body:
            print(f"{key}: {json.dumps(body[key])}")
    written = write("planner", {**document(rows_of(body), load_before=load), **body}, arguments.results)
    print(f"written to {written}")


if __name__ == "__main__":
    main()
