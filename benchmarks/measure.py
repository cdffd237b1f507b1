"""Fair comparison on noisy cores: blocks in the order A B C C B A, a fixed number of rounds, ratios of
medians with a 95 % interval, and an A/A control in the same rounds.

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
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import mlpipe

RESULTS = Path(__file__).parent / "results"
_RESAMPLES = 4000
_NOISE = 0.03  # by which an interval's worse end may miss a goal
Figures = dict[str, float]
Round = dict[str, Figures]  # by side


def rounds(sides: Mapping[str, Callable[[], Figures]], number: int) -> list[Round]:
    """`number` rounds of A B C C B A. Each round starts with another side, so that none is always the first
    or behind the same neighbour. A side returns its figures by name; its two of a round are averaged."""
    return [_round(sides, i) for i in range(number)]


def rounds_within(sides: Mapping[str, Callable[[], Figures]], seconds: float, least: int) -> list[Round]:
    """As many rounds as fit into `seconds` if the next one takes as long as the longest so far; at least
    `least`."""
    began, longest, found = time.monotonic(), 0.0, list[Round]()
    while len(found) < least or time.monotonic() - began + longest <= seconds:
        before = time.monotonic()
        found.append(_round(sides, len(found)))
        longest = max(longest, time.monotonic() - before)
    return found


def _round(sides: Mapping[str, Callable[[], Figures]], i: int) -> Round:
    names = list(sides)
    order = names[i % len(names) :] + names[: i % len(names)]
    forth = {name: sides[name]() for name in order}
    back = {name: sides[name]() for name in reversed(order)}
    return {name: {key: (forth[name][key] + back[name][key]) / 2 for key in forth[name]} for name in names}


def ratio(found: Sequence[Round], key: str, ours: str, peer: str) -> tuple[float, float, float]:
    """Median of ours over median of the peer's, with its 95 % interval (low, high): a bootstrap over rounds,
    in which both sides of a round stay together."""
    draw = random.Random(0)

    def of(sample: Sequence[Round]) -> float:
        return statistics.median(r[ours][key] for r in sample) / statistics.median(
            r[peer][key] for r in sample
        )

    drawn = sorted(of(draw.choices(found, k=len(found))) for _ in range(_RESAMPLES))
    return of(found), drawn[int(0.025 * _RESAMPLES)], drawn[int(0.975 * _RESAMPLES)]


def reaches(goal: float, middle: float, interval: Sequence[float] | None, *, higher_is_better: bool) -> bool:
    """Whether a goal is met: the median reaches it, and the worse end of the interval is within 3 % of it, so
    that noise alone neither meets a goal nor misses one."""
    if higher_is_better:
        return middle >= goal and (interval is None or interval[0] >= goal * (1 - _NOISE))
    return middle <= goal and (interval is None or interval[1] <= goal * (1 + _NOISE))


def figure(
    work: str,
    name: str,
    unit: str,
    found: Sequence[Round],
    key: str,
    *,
    ours: str,
    peer: str,
    goal: float | None,
    higher_is_better: bool,
) -> dict[str, Any]:
    """One row of the results; its goal is that of the ratio (see `reaches`). A spread is the first and third
    quartile over rounds."""
    middle, low, high = ratio(found, key, ours, peer)
    met = None if goal is None else reaches(goal, middle, (low, high), higher_is_better=higher_is_better)
    return {
        "work": work,
        "figure": name,
        "unit": unit,
        "higher_is_better": higher_is_better,
        "side": ours,
        "ours": statistics.median(r[ours][key] for r in found),
        "ours_spread": _quartiles([r[ours][key] for r in found]),
        "peer": peer,
        "best_peer": statistics.median(r[peer][key] for r in found),
        "best_peer_spread": _quartiles([r[peer][key] for r in found]),
        "ratio": middle,
        "ratio_interval": [low, high],
        "goal": goal,
        "met": met,
        "rounds": len(found),
    }


def alone(
    work: str,
    name: str,
    unit: str,
    values: Sequence[float],
    *,
    side: str = "mlpipe",
    goal: float | None = None,
    higher_is_better: bool = False,
) -> dict[str, Any]:
    """One row of a figure that has no peer: its `goal`, in the figure's own unit, stands in the peer's place,
    so that the ratio's goal is 1. Without a goal there is no ratio. Spread: as of `figure`."""
    middle = statistics.median(values)
    met = None if goal is None else reaches(goal, middle, None, higher_is_better=higher_is_better)
    ratio = None if goal is None else middle / goal
    return {
        "work": work,
        "figure": name,
        "unit": unit,
        "higher_is_better": higher_is_better,
        "side": side,
        "ours": middle,
        "ours_spread": _quartiles(list(values)),
        "peer": None if goal is None else "the goal",
        "best_peer": goal,
        "best_peer_spread": None if goal is None else [goal, goal],
        "ratio": ratio,
        "ratio_interval": None,
        "goal": None if goal is None else 1.0,
        "met": met,
        "rounds": len(values),
    }


def _quartiles(values: list[float]) -> list[float]:
    if len(values) < 2:
        return [values[0], values[0]]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return [first, third]


def with_bytecode() -> dict[str, str]:
    """The environment, in which Python keeps what it compiled, as it does unless told not to: else a command
    would mostly measure how fast its own modules are compiled."""
    return {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}


def document(
    figures: list[dict[str, Any]], *, versions: Mapping[str, str] | None = None, **settings: Any
) -> dict[str, Any]:
    """What a results file holds. `versions`: of the peers."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _commit(),
        "versions": {name: _version(name) for name in ("mlpipe", "torch", "numpy")}
        | {"python": platform.python_version()}
        | dict(versions or {}),
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


def merge(
    name: str,
    rows: list[dict[str, Any]],
    folder: Path = RESULTS,
    by: Sequence[str] = ("work",),
    **settings: Any,
) -> Path:
    """Replaces what the file had of the same work, or of what else `by` names."""
    return add(name, document(rows, **settings), folder, by)


def add(name: str, body: dict[str, Any], folder: Path = RESULTS, by: Sequence[str] = ("work",)) -> Path:
    """The rows of a document into the file, as `merge`; each keeps settings, commit, time and machine of its
    run."""
    run = {"time": body["time"], "commit": body["commit"], **body["machine"], **body["settings"]}
    rows = [{**row, "run": row.get("run", run)} for row in body["figures"]]
    path = folder / f"{name}.json"
    kept = json.loads(path.read_text())["figures"] if path.exists() else []
    replaced = {tuple(row[key] for key in by) for row in rows}
    kept = [row for row in kept if tuple(row[key] for key in by) not in replaced]
    return write(name, {**body, "figures": kept + rows}, folder)


def tell(name: str, rows: list[dict[str, Any]], folder: Path = RESULTS, **settings: Any) -> None:
    """Merges the rows (see `merge`), and prints them."""
    path = merge(name, rows, folder, **settings)
    print(table({"figures": rows}))
    print(f"merged into {path}")


def publish(name: str, body: dict[str, Any], folder: Path) -> None:
    """Prints the rows of a whole document, and writes it."""
    print(table(body))
    print(f"written to {write(name, body, folder)}")


def table(body: dict[str, Any]) -> str:
    lines = []
    for row in body["figures"]:
        ours = "-" if row["ours"] is None else f"{row['ours']:.4g}"
        line = f"{row['work']:<20} {row['figure']:<22} {row['side']:>22} {ours:>8} {row['unit']}"
        if row["ratio"] is not None:
            line += f" | {row['peer']:<24} {row['best_peer']:>8.4g} ratio {row['ratio']:.3f}"
        if row["ratio_interval"]:
            line += " [{:.3f}, {:.3f}]".format(*row["ratio_interval"])
        if row["goal"] is not None:
            line += f"  goal {row['goal']:.3g} {'met' if row['met'] else 'MISSED'}"
        if row.get("reason"):
            line += f"  {row['reason']}"
        lines.append(line)
    return "\n".join(lines)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:  # mlpipe itself, in a checkout that nobody installed
        if name != "mlpipe":
            raise
        return mlpipe.__version__


def _commit() -> str | None:
    """A copy of a checkout, in which git knows nothing, is told it as Jenkins tells its builds."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except OSError:
        return os.environ.get("GIT_COMMIT")
    return done.stdout.strip() or os.environ.get("GIT_COMMIT")


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
