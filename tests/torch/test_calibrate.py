"""What `mlpipe calibrate` measures: every figure there and plausible, in a short time box."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from kit import plans, processes
from kit.command_runs import until
from kit.servers import free_port

from mlpipe.train import calibrate

pytestmark = pytest.mark.torch


_QUICK = """
from mlpipe._core.presets import LlamaConfig
from mlpipe.plan import reference
from mlpipe.plan.shapes.dense import Dense
from mlpipe.train import calibrate, measure
small = LlamaConfig(256, 64, 2, 4, 2, 176, 256, 1e4, 1e-5, True)
reference.REFERENCE["cpu"], reference.BLOCK["cpu"] = Dense(small), small
calibrate._BOX_SECONDS = calibrate._PASSES_SECONDS = 0.005
calibrate._MANY_CPU, measure.REFERENCE_BATCH = 4, 1
calibrate._SHAPES_CPU = calibrate._SHAPES_CPU[:3]
calibrate.main()
"""


def test_every_figure_is_measured(tmp_path: Path) -> None:
    """Of two ranks, with what they exchange."""
    (tmp_path / "quick.py").write_text(_QUICK)
    output = tmp_path / "output"
    files = str(tmp_path / "measured.json"), str(tmp_path / "store")
    code = plans.run_ranks(2, "quick", *files, output=output, PYTHONPATH=str(tmp_path))
    assert code == 0, output.read_text()[-5000:]
    found = json.loads((tmp_path / "measured.json").read_text())
    assert found["kernels"].keys() == {"fp32", "bf16"}
    for rates in found["kernels"].values():
        sizes = [flops for flops, _ in rates["matmul_points"]]
        assert sizes == sorted(sizes)
        assert max(share for _, share in rates["matmul_points"]) == 1.0
        assert 1e6 < rates["attention_flops"] < 1e15  # twenty times slower than any machine is plausible, too
        assert 1e6 < rates["peak_flops"] < 1e15
        assert rates["passes_seconds"] > 0
    for name, value in found.items():
        # a difference of two times: beside others' work it may come out as 0
        assert name in ("kernels", "new_tensor_seconds") or value > 0, name
    assert found["new_tensor_seconds"] >= 0
    assert not [left for left in (tmp_path / "store").rglob("*") if left.is_file()]


def test_a_rank_alone_exchanges_nothing() -> None:
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        bench = calibrate.Bench()
        assert bench.works.keys() == {"fp32", "bf16"}
        assert bench.collective() == bench.sharding() == (0.0, 0.0)
    finally:
        dist.destroy_process_group()


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
