"""Ranks that begin warm meet and end as ranks that are new interpreters do, though all groups of one share a
device of gloo, and torch gives nothing back at its end (`kit/warm.py`)."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from kit import plans
from kit.servers import free_port

pytestmark = pytest.mark.torch

RANK = """
import json, os, sys, tempfile
from datetime import timedelta
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist

folder, port, rank = Path(sys.argv[1]), sys.argv[2], int(os.environ["RANK"])
found = {"scripts": sorted(one.name for one in metadata.entry_points(group="console_scripts"))}
os.environ["GLOO_SOCKET_IFNAME"] = "none0"
try:
    dist.init_process_group("gloo")
except RuntimeError as error:
    found["of no interface"] = "none0" in str(error)
os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "MASTER_PORT": port}
dist.init_process_group("gloo", timeout=timedelta(minutes=5))
torch.manual_seed(rank)
groups = [dist.group.WORLD, dist.new_group([0, 1], timeout=timedelta(minutes=7)), dist.new_group([rank])]
for number, group in enumerate(groups):
    tensor = torch.rand(10_000)
    dist.all_reduce(tensor, group=group)
    timeout = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    found[number] = dist.get_backend_config(group), timeout, tensor.tolist()
dist.barrier()
(folder / f"{rank}.json").write_text(json.dumps(found))
json.kept = tempfile.TemporaryDirectory(dir=folder)  # to the end of the process, not of the module
"""


def test_forked_ranks_are_what_new_interpreters_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In sums, timeouts and interfaces of their groups, what is installed, and what they leave."""
    (tmp_path / "a_rank.py").write_text(RANK)
    path = os.pathsep.join([str(tmp_path), plans.environment()["PYTHONPATH"]])

    def found(name: str) -> list[Any]:
        folder, output = tmp_path / name, tmp_path / f"{name}.log"
        folder.mkdir()
        arguments = str(folder), str(free_port())
        assert plans.run_ranks(2, "a_rank", *arguments, output=output, PYTHONPATH=path) == 0, (
            output.read_text()
        )
        assert sorted(one.name for one in folder.iterdir()) == ["0.json", "1.json"]
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]

    forked = found("forked")
    monkeypatch.setattr(plans, "Popen", lambda kind, argv, **options: subprocess.Popen(argv, **options))
    assert forked == found("new")
    for number, seconds in enumerate((300.0, 420.0)):
        assert forked[0][str(number)] == forked[1][str(number)]
        assert forked[0][str(number)][1] == seconds
    assert all(one["of no interface"] for one in forked)
