"""The benchmark of training beside its peers: its scripts are there, its rows name the best peer, and what
is committed can be read by whoever makes a page of it."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from benchmarks import measure
from benchmarks.peers import results

pytestmark = pytest.mark.unit
ROOT = Path(__file__).parents[2]
PEERS = ROOT / "benchmarks" / "peers"
REQUIREMENTS = ROOT / "requirements" / "bench"


def literals(path: Path) -> dict[str, object]:
    """The constants of a module that is not imported, for it needs torch."""
    found = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                found[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:
                continue
    return found


def test_every_peer_has_a_script_a_name_and_an_environment():
    known = literals(PEERS / "sides.py")
    scripts = known["SCRIPTS"]
    assert isinstance(scripts, dict)
    assert isinstance(known["NAMES"], dict)
    assert scripts.keys() == known["NAMES"].keys()
    on_meshes, on_replicas = known["ON_MESHES"], known["ON_REPLICAS"]
    assert isinstance(on_meshes, dict)
    assert isinstance(on_replicas, dict)
    for script, environment in {**scripts, **on_meshes, **on_replicas}.items():
        tree = ast.parse((PEERS / f"{script}.py").read_text())
        assert ast.get_docstring(tree)
        assert environment is None or (REQUIREMENTS / f"{environment}.txt").exists()


@pytest.mark.parametrize("environment", ["training", "deepspeed", "titan", "validated", "torchft"])
def test_peers_run_on_the_same_torch_and_numpy(environment: str):
    def pins(path: Path) -> set[str]:
        return set(re.findall(r"^(?:torch|numpy)==[^\\]+", path.read_text(), flags=re.MULTILINE))

    peers = (REQUIREMENTS / f"{environment}.txt").read_text()
    assert pins(REQUIREMENTS / f"{environment}.txt") == pins(ROOT / "requirements" / "train.txt")
    assert peers.count("==") <= peers.count("--hash=sha256:")


def test_the_goal_holds_against_the_best_peer():
    rates = {"mlpipe": 11.0, "raw DDP": 9.0, "Fabric": 10.0, "raw DDP again": 9.0}
    found = [{side: {"rate": rate} for side, rate in rates.items()} for _ in range(4)]
    rows = results.against_best("work", "speed", "tok/s", found, "rate", goal=1.0)
    assert [(row["side"], row["peer"], row["goal"]) for row in rows] == [
        ("mlpipe", "Fabric", 1.0), ("mlpipe", "raw DDP", None), ("raw DDP again", "raw DDP", None),
    ]  # fmt: skip
    slow = results.against_best("work", "speed", "s", found, "rate", goal=1.0, higher_is_better=False)
    assert (slow[0]["peer"], slow[0]["met"]) == ("raw DDP", False)


def test_a_part_replaces_its_own_rows(tmp_path: Path):
    row = {"figure": "speed", "ours": 1}
    measure.merge("peers", [row | {"work": "a"}, row | {"work": "b"}], tmp_path, rounds=1)
    path = measure.merge("peers", [row | {"work": "a", "ours": 2}], tmp_path, rounds=3)
    kept = {found["work"]: found for found in json.loads(path.read_text())["figures"]}
    assert (kept["a"]["ours"], kept["b"]["ours"]) == (2, 1)
    assert (kept["a"]["run"]["rounds"], kept["b"]["run"]["rounds"]) == (3, 1)


def test_a_side_replaces_its_own_rows_and_a_document_of_an_earlier_run_keeps_what_it_was(tmp_path: Path):
    by, row = ("work", "side"), {"work": "a", "figure": "speed"}
    old = measure.document([row | {"side": "gang", "ours": 1}], rounds=1) | {"commit": "5a7a56d5"}
    measure.add("goodput", old, tmp_path, by)
    measure.merge("goodput", [row | {"side": "elastic", "ours": 2}], tmp_path, by, rounds=2)
    path = measure.merge("goodput", [row | {"side": "elastic", "ours": 3}], tmp_path, by, rounds=3)
    rows = json.loads(path.read_text())["figures"]
    assert [(one["side"], one["ours"], one["run"]["rounds"]) for one in rows] == [
        ("gang", 1, 1), ("elastic", 3, 3),
    ]  # fmt: skip
    assert rows[0]["run"]["commit"] == "5a7a56d5"


def test_seconds_to_a_loss_that_was_fixed_beforehand():
    found = [{side: {"seconds": 2.0} for side in ("mlpipe", "raw DDP", "Fabric", "raw DDP again")}] * 3
    needed = {"mlpipe": 10.0, "raw DDP": 12.0, "Fabric": None, "raw DDP again": 12.0}
    rows = results.to_loss("work", found, needed, 7.5, 38)
    assert [(row["side"], row["ours"], row["best_peer"], row["ratio"], row["met"]) for row in rows] == [
        ("mlpipe", 20, 24, pytest.approx(20 / 24), True), ("raw DDP again", 24, 24, 1, None),
        ("Fabric", None, None, None, None),
    ]  # fmt: skip
    assert rows[-1]["reason"] == "Fabric did not reach it in 38 steps"
    for missing in ({"mlpipe": None}, {"raw DDP": None, "raw DDP again": None}):
        rows = results.to_loss("work", found, needed | missing, 7.5, 38)
        (goal,) = [row for row in rows if row["goal"] is not None]
        assert (goal["side"], goal["ratio"], goal["met"], rows[0]) == ("mlpipe", None, False, goal)
        assert "reach" in goal["reason"]
