"""Fair comparison on noisy cores: blocks in the order A B B A, a fixed number of rounds, ratios of medians
with a 95 % interval, and an A/A control in the same run.

Two noisy cores cannot show 2 % by timing one after the other. Within a round the order cancels a drift of the
machine's speed; the interval is a bootstrap over rounds.
"""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
_RESAMPLES = 4000


def rounds(first: Callable[[], dict[str, float]], second: Callable[[], dict[str, float]], number: int) -> Any:
    """`number` rounds of A B B A. Each call returns its figures by name; the two of a round are averaged.
    Returns [{"a": figures, "b": figures}, ...]."""
    found = []
    for _ in range(number):
        a1, b1, b2, a2 = first(), second(), second(), first()
        found.append({"a": _mean(a1, a2), "b": _mean(b1, b2)})
    return found


def _mean(one: dict[str, float], two: dict[str, float]) -> dict[str, float]:
    return {name: (one[name] + two[name]) / 2 for name in one}


def ratio(found: Sequence[dict[str, Any]], figure: str) -> tuple[float, float, float]:
    """Median of A over median of B, with its 95 % bootstrap interval (low, high)."""
    draw = random.Random(0)

    def of(sample: Sequence[dict[str, Any]]) -> float:
        return statistics.median(r["a"][figure] for r in sample) / statistics.median(
            r["b"][figure] for r in sample
        )

    drawn = sorted(of(draw.choices(found, k=len(found))) for _ in range(_RESAMPLES))
    return of(found), drawn[int(0.025 * _RESAMPLES)], drawn[int(0.975 * _RESAMPLES)]


def figure(
    work: str,
    name: str,
    unit: str,
    found: Sequence[dict[str, Any]],
    key: str,
    *,
    peer: str,
    goal: float | None,
    higher_is_better: bool,
) -> dict[str, Any]:
    """One row of the results. A goal is met when the better end of the interval reaches it."""
    middle, low, high = ratio(found, key)
    met = None if goal is None else (high >= goal if higher_is_better else low <= goal)
    ours = sorted(r["a"][key] for r in found)
    theirs = sorted(r["b"][key] for r in found)
    return {
        "work": work,
        "figure": name,
        "unit": unit,
        "higher_is_better": higher_is_better,
        "ours": statistics.median(ours),
        "ours_spread": [ours[0], ours[-1]],
        "peer": peer,
        "best_peer": statistics.median(theirs),
        "best_peer_spread": [theirs[0], theirs[-1]],
        "ratio": middle,
        "ratio_interval": [low, high],
        "goal": goal,
        "met": met,
        "rounds": len(found),
    }


def document(figures: list[dict[str, Any]], **settings: Any) -> dict[str, Any]:
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _commit(),
        "versions": {name: version(name) for name in ("mlpipe", "torch", "numpy")}
        | {"python": platform.python_version()},
        "machine": {
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)),
            "load_before": settings.pop("load_before", None),
        },
        "settings": settings,
        "figures": figures,
    }


def write(name: str, body: dict[str, Any], folder: Path = RESULTS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(body, indent=2) + "\n")
    return path


def table(body: dict[str, Any]) -> str:
    lines = []
    for row in body["figures"]:
        low, high = row["ratio_interval"]
        goal = "" if row["goal"] is None else f"  goal {row['goal']:g}: {'met' if row['met'] else 'missed'}"
        lines.append(
            f"{row['work']:<34} {row['figure']:<30} ours {row['ours']:.4g} {row['unit']}, "
            f"{row['peer']} {row['best_peer']:.4g}; ratio {row['ratio']:.3f} [{low:.3f}, {high:.3f}]{goal}"
        )
    return "\n".join(lines)


def _commit() -> str | None:
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except OSError:
        return None
    return done.stdout.strip() or None


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
