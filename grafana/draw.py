"""Draws the committed boards from the answers of a real Prometheus, as one HTML page each:

    python grafana/draw.py --prometheus http://127.0.0.1:9090 --run RUN --minutes 15 --out DIR

For pictures where no Grafana is at hand. It is a drawing: the grid, titles, units, thresholds and queries are
the board's, the look is not Grafana's.
"""

from __future__ import annotations

import argparse
import html
import json
import math
import re
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

BOARDS = Path(__file__).parent / "dashboards"
COLUMN, ROW, GAP = 58, 34, 8  # pixels of a cell of the grid
COLOURS = (
    "#3274d9", "#e0752d", "#299c46", "#8f3bb8", "#c4162a", "#806000",
    "#e377c2", "#6e7077", "#17a2b8", "#1f3d7a", "#9acd32", "#5c2e00",
)  # fmt: skip
NAMED = {"green": "#299c46", "yellow": "#d9a300", "red": "#c4162a", "text": "#22252b", "blue": "#3274d9"}
STYLE = """
body { margin: 0; background: #f4f5f5; font: 12px "DejaVu Sans", sans-serif; color: #22252b; }
h1 { font-size: 18px; margin: 12px; }
.note { margin: 12px; color: #6e7077; }
.board { position: relative; margin: 12px; }
.panel { position: absolute; background: #fff; overflow: hidden; box-sizing: border-box; padding: 6px 8px;
  border: 1px solid #e0e0e0; border-radius: 3px; }
.panel h3 { font-size: 12px; margin: 0 0 4px; white-space: nowrap; }
.row { position: absolute; font-weight: bold; font-size: 14px; padding-top: 12px; }
.stat { display: flex; flex-wrap: wrap; gap: 4px 22px; align-content: center; height: 84px; color: #6e7077; }
.stat b { font-size: 24px; }
.empty { color: #8e8e8e; padding-top: 14px; }
.legend { font-size: 10px; height: 26px; overflow: hidden; }
.legend span { margin-right: 12px; white-space: nowrap; }
i { display: inline-block; width: 9px; height: 9px; margin-right: 4px; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; padding: 4px 8px; border-bottom: 1px solid #eee; }
"""


class Source:
    """A Prometheus and what the board's variables stand for."""

    def __init__(self, url: str, run: str, minutes: float) -> None:
        self.url, self.end = url, time.time()
        self.start = self.end - 60 * minutes
        self.step = max(60 * minutes / 240, 1.0)
        self.values = {
            "__rate_interval": "1m", "__interval": f"{self.step:.0f}s", "__range": f"{minutes:.0f}m",
            "namespace": ".*", "node": ".*", "run": run,
        }  # fmt: skip

    def ask(self, expr: str, *, now: bool) -> list[tuple[dict[str, str], list[tuple[float, float]]]]:
        """(labels, points) of each series."""
        filled = re.sub(r"\$([a-z_]+)", lambda name: self.values[name[1]], expr)
        asked: dict[str, Any] = {"query": filled}
        asked |= {"time": self.end} if now else {"start": self.start, "end": self.end, "step": self.step}
        url = f"{self.url}/api/v1/query{'' if now else '_range'}?{urllib.parse.urlencode(asked)}"
        with urllib.request.urlopen(url, timeout=60) as answer:
            series = json.load(answer)["data"]["result"]
        return [
            (one["metric"], [(float(at), float(value)) for at, value in one.get("values") or [one["value"]]])
            for one in series
        ]


def shown(value: float, unit: str) -> str:
    if value != value:
        return "NaN"
    if unit == "percentunit":
        return f"{100 * value:.1f} %"
    if unit == "s":
        for size, name in ((3600, "h"), (60, "min"), (1, "s")):
            if abs(value) >= size:
                return f"{value / size:.1f} {name}"
        return f"{1000 * value:.0f} ms"
    if unit == "currencyUSD":
        return f"${value:.4g}"
    if unit == "bytes":
        for size, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
            if abs(value) >= size:
                return f"{value / size:.1f} {name}"
    for size, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size and unit in ("short", "none", "bytes"):
            return f"{value / size:.3g} {name}"
    return f"{value:.4g}" + {"watt": " W", "celsius": " °C"}.get(unit, "")


def colour_of(value: float, defaults: dict[str, Any]) -> str:
    colour = "text"
    for step in defaults["thresholds"]["steps"]:
        if step.get("value") is None or value >= step["value"]:
            colour = step["color"]
    return NAMED.get(colour, colour)


def name_of(labels: dict[str, str], legend: str) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), legend).strip() or "value"


def stat(panel: dict[str, Any], source: Source) -> str:
    defaults, parts = panel["fieldConfig"]["defaults"], []
    for target in panel["targets"]:
        for labels, points in source.ask(target["expr"], now=True):
            value = points[-1][1]
            name = html.escape(name_of(labels, target["legendFormat"]))
            text = html.escape(shown(value, defaults["unit"]))
            if panel["options"].get("textMode") == "name":
                parts.append(f'<span><br><b style="font-size:15px">{name}</b></span>')
                continue
            parts.append(f'<span>{name}<br><b style="color:{colour_of(value, defaults)}">{text}</b></span>')
    return f'<div class="stat">{"".join(parts)}</div>' if parts else ""


def series_of(panel: dict[str, Any], source: Source) -> list[tuple[str, list[tuple[float, float]]]]:
    series = []
    for target in panel["targets"]:
        for labels, points in source.ask(target["expr"], now=False):
            sound = [(at, value) for at, value in points if abs(value) < float("inf")]
            if sound:
                series.append((name_of(labels, target["legendFormat"]), sound))
    return series


def round_values(low: float, high: float, unit: str) -> list[float]:
    """Up to six, from below the low to above the high one."""
    base = 1024.0 if unit == "bytes" else 60.0 if unit == "s" and high - low > 60 else 10.0
    whole = base ** math.floor(math.log((high - low) / 4, base))
    steps = (1, 2, 5, 10, 15, 30, 60) if base == 60 else (1, 2, 4, 5, 10, 20, 50, 100, 200, 256, 512, 1000)
    sizes = [whole * times for times in steps]
    size = next((one for one in sizes if (high - low) / one <= 4), sizes[-1])
    first = math.floor(low / size + 1e-9)
    return [size * number for number in range(first, math.ceil(high / size - 1e-9) + 1)]


def lines(panel: dict[str, Any], source: Source, width: int, height: int) -> str:
    series, unit = series_of(panel, source), panel["fieldConfig"]["defaults"]["unit"]
    if not series:
        return ""
    height -= 62
    stacked = "stacking" in panel["fieldConfig"]["defaults"].get("custom", {})
    values = [value for _, points in series for _, value in points]
    low, high = min(values), max(values)
    if low < 0.7 * high:
        low = min(low, 0.0)
    if stacked:
        low, high = 0.0, 1.0
    high = high if high > low else low + (abs(low) or 1.0)
    ticks = [0.0, 0.5, 1.0] if stacked else round_values(low, high, unit)
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    left, right = 62, width - 26

    def x(at: float) -> float:
        return left + (at - source.start) / (source.end - source.start) * (right - left)

    def y(value: float) -> float:
        return 6 + (1 - (value - low) / (high - low)) * (height - 24)

    parts = []
    for value in ticks:
        parts.append(
            f'<line x1="{left}" x2="{right}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#e8e8e8"/>'
            f'<text x="{left - 5}" y="{y(value) + 4:.1f}" text-anchor="end">{shown(value, unit)}</text>'
        )
    for share in (0.0, 0.5, 1.0):
        at = source.start + share * (source.end - source.start)
        clock = time.strftime("%H:%M", time.gmtime(at))
        anchor = "end" if share == 1.0 else "middle"
        parts.append(f'<text x="{x(at):.0f}" y="{height - 2}" text-anchor="{anchor}">{clock}</text>')
    for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"][1:]:
        if low < step["value"] < high and not stacked:
            parts.append(
                f'<line x1="{left}" x2="{right}" y1="{y(step["value"]):.1f}" y2="{y(step["value"]):.1f}"'
                f' stroke="{NAMED[step["color"]]}" stroke-dasharray="5 4"/>'
            )
    floor: dict[float, float] = {}
    for i, (_, points) in enumerate(series):
        colour = COLOURS[i % len(COLOURS)]
        if stacked:
            top = [(at, floor.get(at, 0.0) + value) for at, value in points]
            bottom = [(at, floor.get(at, 0.0)) for at, _ in reversed(points)]
            floor |= dict(top)
            line = " ".join(f"{x(at):.1f},{y(min(value, 1.0)):.1f}" for at, value in [*top, *bottom])
            parts.append(f'<polygon points="{line}" fill="{colour}" fill-opacity="0.65"/>')
        else:
            line = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in points)
            parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    legend = "".join(
        f'<span><i style="background:{COLOURS[i % len(COLOURS)]}"></i>{html.escape(name)}</span>'
        for i, (name, _) in enumerate(series)
    )
    svg = f'<svg width="{width - 18}" height="{height}" font-size="10" fill="#6e7077">{"".join(parts)}</svg>'
    return f'{svg}<div class="legend">{legend}</div>'


def heat(panel: dict[str, Any], source: Source, width: int, height: int) -> str:
    series, unit = series_of(panel, source), panel["fieldConfig"]["defaults"]["unit"]
    if not series:
        return ""
    height, left = height - 52, 70
    most = max(value for _, points in series for _, value in points) or 1.0
    tall = height / len(series)
    wide = (width - left - 26) / ((source.end - source.start) / source.step)
    parts = []
    for i, (name, points) in enumerate(series):
        parts.append(
            f'<text x="{left - 5}" y="{(i + 0.6) * tall:.0f}" text-anchor="end">{html.escape(name)}</text>'
        )
        for at, value in points:
            x = left + (at - source.start) / source.step * wide
            parts.append(
                f'<rect x="{x:.1f}" y="{i * tall:.1f}" width="{wide + 0.6:.1f}" height="{tall - 2:.1f}"'
                f' fill="#d9480f" fill-opacity="{max(value, 0.0) / most:.3f}"/>'
            )
    svg = f'<svg width="{width - 18}" height="{height}" font-size="10" fill="#6e7077">{"".join(parts)}</svg>'
    return f'{svg}<div class="legend">pale: 0, dark: {shown(most, unit)}</div>'


def table(panel: dict[str, Any], source: Source) -> str:
    units = {
        one["matcher"]["options"]: next((p["value"] for p in one["properties"] if p["id"] == "unit"), "short")
        for one in panel["fieldConfig"]["overrides"]
    }
    cells: dict[str, dict[str, str]] = {}
    for target in panel["targets"]:
        for labels, points in source.ask(target["expr"], now=True):
            key = " ".join(filter(None, (labels.get("run"), labels.get("stage"))))
            heading = target["legendFormat"]
            cells.setdefault(key, {})[heading] = shown(points[-1][1], units.get(heading, "short"))
    heads = [target["legendFormat"] for target in panel["targets"]]
    rows = ["<th>Run</th>" + "".join(f"<th>{head}</th>" for head in heads)]
    for key, row in cells.items():
        rows.append(
            f"<td>{html.escape(key)}</td>" + "".join(f"<td>{row.get(head, '')}</td>" for head in heads)
        )
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>" if cells else ""


def page(board: dict[str, Any], source: Source) -> tuple[str, int]:
    """The page and its height in pixels."""
    parts, bottom = [], 0
    for panel in board["panels"]:
        at = panel["gridPos"]
        left, top, width, height = (
            at["x"] * COLUMN,
            at["y"] * ROW,
            at["w"] * COLUMN - GAP,
            at["h"] * ROW - GAP,
        )
        bottom = max(bottom, top + height)
        place = f'style="left:{left}px;top:{top}px;width:{width}px;height:{height}px"'
        title = html.escape(panel["title"])
        if panel["type"] == "row":
            parts.append(f'<div class="row" {place}>{title}</div>')
            continue
        draw = {"stat": stat, "table": table}.get(panel["type"])
        body = (
            draw(panel, source)
            if draw is not None
            else (heat if panel["type"] == "heatmap" else lines)(panel, source, width, height)
        )
        needs_gpu = any(re.search("DCGM_|_gpu_", target["expr"]) for target in panel["targets"])
        body = body or f'<div class="empty">no series{": this needs a GPU" if needs_gpu else ""}</div>'
        parts.append(f'<div class="panel" {place}><h3>{title}</h3>{body}</div>')
    note = (
        "Drawn by grafana/draw.py from the committed board and the answers of a real Prometheus; not a"
        " screenshot of Grafana."
    )
    head = f"<h1>{html.escape(board['title'])}</h1><div class=note>{note}</div>"
    grid = f'<div class="board" style="height:{bottom}px">{"".join(parts)}</div>'
    start = f"<!doctype html><meta charset=utf-8><title>{board['uid']}</title><style>{STYLE}</style>"
    return start + head + grid, bottom + 110


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prometheus", required=True, metavar="URL")
    parser.add_argument("--run", required=True, help="a run id, or an expression that matches some")
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    source = Source(arguments.prometheus, arguments.run, arguments.minutes)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for path in sorted(BOARDS.glob("*.json")):
        text, height = page(json.loads(path.read_text()), source)
        file = arguments.out / f"board-{path.stem}.html"
        file.write_text(text)
        print(f"{file} {24 * COLUMN + 24}x{height}")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
