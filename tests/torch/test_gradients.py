"""Each technique, and each mix of two, has the gradients of one process: of every parameter, in fp64."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kit import plans
from kit.gradient_worker import MIXES

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """The largest difference of any value on any of four ranks, relative to the largest of its tensor."""
    folder: Path = tmp_path_factory.mktemp("gradients")
    tokens, output = plans.write_tokens(folder / "tokens"), folder / "output"
    code = plans.run_ranks(4, "kit.gradient_worker", str(tokens), output=output)
    text = output.read_text(errors="replace")
    assert code == 0, text[-4000:]
    worst: dict[str, float] = json.loads(text.splitlines()[-1])
    return worst


@pytest.mark.combines("pp", "dp_replicate", "pipeline *")
@pytest.mark.combines("pp", "tp", "pipeline *")
@pytest.mark.combines("pp", "dp_shard", "pipeline gpipe")
@pytest.mark.combines("pp", "dp_shard", "pipeline interleaved")
@pytest.mark.combines("pp", "cp", "pipeline gpipe")
@pytest.mark.combines("pp", "cp", "pipeline 1f1b")
@pytest.mark.combines("pp", "ep", "pipeline gpipe")
@pytest.mark.combines("pp", "ep", "pipeline interleaved")
@pytest.mark.combines("tp", "strategy zero2")
@pytest.mark.combines("cp", "strategy zero2")
@pytest.mark.combines("pp", "strategy zero2")
@pytest.mark.combines("ep", "strategy zero2")
@pytest.mark.combines("pp", "communication resident")
@pytest.mark.combines("cp", "communication resident")
@pytest.mark.combines("tp", "communication resident")
@pytest.mark.combines("ep", "communication resident")
@pytest.mark.combines("pp", "resources in groups")
@pytest.mark.combines("cp", "resources in groups")
@pytest.mark.combines("tp", "resources in groups")
@pytest.mark.combines("ep", "resources in groups")
@pytest.mark.parametrize("mix", MIXES)
def test_gradients_are_those_of_one_process_in_fp64(found: dict[str, float], mix: str) -> None:
    """Along tp the loss, whose logits are split, is in fp32."""
    assert found[mix] < (1e-6 if "tp" in mix.split(",")[0].split() else 1e-13)
