"""Writes grafana/dashboards/ from the modules beside it: `python grafana/generate.py`; `--check` instead
compares, prints what differs and exits 1 if anything does. Exits 2 without grafana-foundation-sdk.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent / "dashboards"


def texts() -> dict[str, str]:
    """File name -> JSON of each board. Raises ImportError without the SDK."""
    from board_fleet import fleet_board  # these need the SDK
    from board_nodes import nodes_board
    from board_run import run_board
    from grafana_foundation_sdk.cog.encoder import JSONEncoder

    boards = {}
    for name, board in {"run": run_board, "fleet": fleet_board, "nodes": nodes_board}.items():
        document = json.loads(json.dumps(board().build(), cls=JSONEncoder))
        boards[f"{name}.json"] = json.dumps(_pruned(document), indent=2, sort_keys=True) + "\n"
    return boards


def _pruned(board: dict[str, Any]) -> dict[str, Any]:
    """Without what the SDK writes unasked: fields that Grafana's schema does not have there, and a place for
    links and annotations (a closed menu) that is not Grafana's default."""
    links = [link for panel in board["panels"] for link in _defaults(panel).get("links", ())]
    for one in (*board["links"], *links, *board["annotations"]["list"]):
        one.pop("placement", None)
    for variable in board["templating"]["list"]:
        for key in ("auto", "auto_count", "auto_min"):
            variable.pop(key, None)
    for panel in board["panels"]:
        if panel["type"] == "table":
            panel["options"].pop("footer", None)
    return board


def _defaults(panel: dict[str, Any]) -> dict[str, Any]:
    defaults: dict[str, Any] = panel.get("fieldConfig", {}).get("defaults", {})
    return defaults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    check = parser.parse_args().check
    try:
        boards = texts()
    except ModuleNotFoundError as error:
        print(f"{error.name} is missing: pip install grafana-foundation-sdk==0.0.21", file=sys.stderr)  # noqa: T201
        return 2
    problems = [
        f"{path}: no board of this name\n" for path in FOLDER.glob("*.json") if path.name not in boards
    ]
    for name, text in boards.items():
        path = FOLDER / name
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        old = path.read_text() if path.exists() else ""
        lines = difflib.unified_diff(
            old.splitlines(True), text.splitlines(True), name, f"{name} (from its Python)"
        )
        problems.append("".join(lines))
    problems = [problem for problem in problems if problem]
    sys.stdout.write("".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
