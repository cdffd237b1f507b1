"""Of any two meshes that `validate` allows for a model and an optimizer, on up to four ranks, what ranks of
the one save, ranks of the other load: weights, states and buffers, bit for bit. Each rank's first weights are
its part of those that one rank draws."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.plans import run_ranks

pytestmark = pytest.mark.torch
# Each change of mesh has a deadline of its own (`CHANGE_SECONDS`); this is for all, below pytest's.
ALL_SECONDS = 850.0


def test_any_mesh_reads_what_any_other_wrote(tmp_path: Path) -> None:
    output = tmp_path / "output"
    folder = tmp_path / "stores"
    folder.mkdir()
    code = run_ranks(1, "kit.any_mesh", str(folder), output=output, timeout=ALL_SECONDS)
    text = output.read_text(errors="replace")
    assert code == 0, text[-6000:]
    changes = int(text.splitlines()[-1].split()[0])
    assert changes > 30
