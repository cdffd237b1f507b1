"""What the launcher ships is what `mlpipe logs` shows, in the order in which it came."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from mlpipe.observe.logs import Reader
from mlpipe.store import runs
from mlpipe.store.folder import FolderStore
from mlpipe.train.logs import LogShipper

pytestmark = pytest.mark.unit
KEY = "runs/r/stages/train/attempt-1"


def printed(folder: Path, local_rank: int, text: str) -> None:
    path = folder / "logs" / "run" / "attempt_0" / str(local_rank) / "stdout.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(text)


def test_lines_come_back_with_their_rank_and_time(tmp_path, capsys):
    store = FolderStore(tmp_path / "store")
    runs.create_run(store, "r", "version: 1\n", "d", ["train"], "kubernetes", {"stages": ["train"]})
    runs.update_run(store, "r", lambda run: replace(run, stages={"train": runs.StageState("running", 1)}))
    store.put(f"{KEY}/plan.json", json.dumps({"launch": {"num_nodes": 2, "nproc_per_node": 2}}).encode())
    began = time.time() - 0.001
    nodes = []
    for index in range(2):
        node = tmp_path / f"node-{index}"
        node.mkdir()
        (node / "pid-0-0").write_text(f"1 {2 * index}")  # local rank 1 died before it said who it is
        nodes.append((node, LogShipper(store, KEY, node / "logs", node, first_rank=2 * index)))
    for turn in range(2):
        for node, shipper in nodes:
            for local_rank in range(2):
                printed(node, local_rank, f"{turn} of {node.name}\nhalf a")
                printed(node, local_rank, " line\n")
            shipper.ship()
    for _, shipper in nodes:
        shipper.close()
    found = Reader(store, None, None).read(runs.read_run(store, "r"))
    assert [file.rank for file, _ in found] == [0, 1, 2, 3]
    for file, lines in found:
        name = f"node-{file.rank // 2}"
        words = [f"0 of {name}", "half a line", f"1 of {name}", "half a line"]
        assert [line.text.decode().rstrip("\n") for line in lines] == words
        times = [line.time for line in lines]
        assert times == sorted(times)
        assert began <= times[0] <= times[-1] <= time.time()
    assert "[rank 3] 1 of node-1" in capsys.readouterr().out
