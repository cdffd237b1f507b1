"""The process that measures one core unasked, as it is: two precisions, plausible figures, ended and kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlpipe.plan import machine
from mlpipe.spec.load import load_pipeline
from mlpipe.submit import measuring

pytestmark = pytest.mark.torch
QUICKSTART = Path(__file__).parents[2] / "pipelines" / "quickstart.yaml"


def test_a_core_is_measured_in_each_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLPIPE_CALIBRATE", "on")
    monkeypatch.setattr(measuring, "_LONGEST_SECONDS", 600.0)  # a guard: beside other tests
    said: list[str] = []
    measuring.measure_first(load_pipeline(QUICKSTART), said.append)
    known = machine.read()
    assert known is not None, said
    assert known.core.keys() == set(machine.PRECISIONS)
    for core in known.core.values():
        assert 1e7 < core.matmul_flops < 1e14  # a hundred times slower than any machine is plausible, too
        assert 1e-4 < core.passes_seconds < 1e3
    assert "a core does the passes" in said[0]
