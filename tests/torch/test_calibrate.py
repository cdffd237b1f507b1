"""What `mlpipe calibrate` measures: every figure there and plausible, in a short time box."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit import plans, processes
from kit.command_runs import until
from kit.servers import free_port

from mlpipe.train import calibrate, measure

pytestmark = pytest.mark.torch


def test_every_figure_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "_BOX_SECONDS", 0.005)
    monkeypatch.setattr(calibrate, "_PASSES_SECONDS", 0.005)
    monkeypatch.setattr(calibrate, "_MANY_CPU", 4)
    monkeypatch.setattr(measure, "REFERENCE_BATCH", 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # OpenMP's spin while they wait: eight times as slow beside other tests
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        found = calibrate.measure(str(tmp_path / "store"))
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(threads)
    assert found.kernels.keys() == {"fp32", "bf16"}
    for rates in found.kernels.values():
        sizes = [flops for flops, _ in rates.matmul_points]
        assert sizes == sorted(sizes)
        assert max(share for _, share in rates.matmul_points) == 1.0
        assert 1e6 < rates.attention_flops < 1e15  # twenty times slower than any machine is plausible, too
        assert 1e6 < rates.peak_flops < 1e15
    alone = {
        "link_bytes_per_second",
        "collective_seconds",
        "gather_bytes_per_second",
        "scatter_bytes_per_second",
    }
    check_positive({name: value for name, value in asdict(found).items() if name not in alone})
    assert all(getattr(found, name) == 0 for name in alone)
    assert not list((tmp_path / "store").rglob("*.part*"))


def check_positive(found: dict[str, Any]) -> None:
    """All figures, but for a difference of two times: beside others' work it may come out as 0."""
    for name, value in found.items():
        assert name in ("kernels", "new_tensor_seconds") or value > 0, name
    assert found["new_tensor_seconds"] >= 0


_QUICK = """
from mlpipe.train import calibrate, measure
calibrate._BOX_SECONDS = calibrate._PASSES_SECONDS = 0.005
calibrate._MANY_CPU, calibrate.REFERENCE_BATCH = 4, 1
calibrate.main()
"""


def test_two_ranks_measure_what_they_exchange(tmp_path: Path) -> None:
    (tmp_path / "quick.py").write_text(_QUICK)
    output = tmp_path / "output"
    files = str(tmp_path / "measured.json"), str(tmp_path / "store")
    code = plans.run_ranks(2, "quick", *files, output=output, PYTHONPATH=str(tmp_path))
    assert code == 0, output.read_text()[-5000:]
    found = json.loads((tmp_path / "measured.json").read_text())
    check_positive(found)
    for rates in found["kernels"].values():
        assert rates["passes_seconds"] > 0


_ENDLESS = """
import subprocess, sys, time
if sys.argv[1:]:
    from mlpipe.train import calibrate, measure
    calibrate.measure = lambda store: print("measuring", flush=True) or time.sleep(600)
    calibrate.main()
print(subprocess.Popen([sys.executable, __file__, "rank", "store"]).pid, flush=True)
time.sleep(600)
"""


def test_a_rank_does_not_outlive_who_started_it(tmp_path: Path) -> None:
    """As the command kills a torchrun that takes too long."""
    (tmp_path / "endless.py").write_text(_ENDLESS)
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    parent = subprocess.Popen(
        [sys.executable, tmp_path / "endless.py"], env=plans.environment() | alone, stdout=subprocess.PIPE
    )
    try:
        assert parent.stdout is not None
        rank = int(parent.stdout.readline())
        assert parent.stdout.readline() == b"measuring\n"
    finally:
        parent.kill()
        parent.wait(300)
    until(lambda: processes.gone([rank]), "the rank's end")
