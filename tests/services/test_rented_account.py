"""`submit --to rented` on a real account of Vast.ai, with a budget of one dollar. Nobody has run this yet: it
needs VAST_API_KEY, an image with this mlpipe that hosts may pull, and a store that the internet reaches."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from kit.command_runs import Cli, until

from mlpipe.submit.rented.vast import Vast
from mlpipe.submit.rented.vendor import Machine

NAMES = ("VAST_API_KEY", "MLPIPE_TEST_VAST_IMAGE", "MLPIPE_TEST_VAST_STORE")
MISSING = [name for name in NAMES if not os.environ.get(name)]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(bool(MISSING), reason=f"spends money: export {', '.join(MISSING)}"),
]


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    made = Cli(tmp_path)
    made.env["MLPIPE_STORE"] = os.environ["MLPIPE_TEST_VAST_STORE"]
    write = [*["mlpipe-corpus", "--out", "{{output}}"], *["--vocab-size", "1024", "--max-bytes", "2 MiB"]]
    train = {
        "model": {"preset": "llama-1m", "seq_len": 128},
        "data": {"tokens": "{{stages.corpus.output}}", "batch_size": 8},
        "steps": 500,
        "checkpoint": {"every": "50 steps", "keep": 2},
    }
    resources = {"gpus_per_node": 1, "gpu": "RTX-3090"}
    stages = [
        {"name": "corpus", "command": write},
        {"name": "train", "needs": ["corpus"], "train": train, "resources": resources},
    ]
    spec = {"version": 1, "name": "dollar", "image": os.environ["MLPIPE_TEST_VAST_IMAGE"], "stages": stages}
    (tmp_path / "pipeline.yaml").write_text(json.dumps(spec))
    return made


def ours() -> list[Machine]:
    return [one for one in Vast.from_environment().machines() if one.label.startswith("mlpipe/")]


def submit(cli: Cli) -> str:
    words = ["pipeline.yaml", "--to", "rented", "--max-usd", "1", "--max-time", "1 h", "--gpu", "any"]
    return str(cli.json("submit", *words)["run_id"])


def test_a_training_of_a_minute(cli: Cli) -> None:
    assert ours() == []
    run = submit(cli)
    until(lambda: cli.json("status", run)["state"] in ("done", "failed", "cancelled"), "the run", 3600)
    assert cli.json("status", run)["state"] == "done"
    assert ours() == []


def test_one_that_is_cancelled_leaves_nothing(cli: Cli) -> None:
    run = submit(cli)
    until(ours, "a machine", 600)
    cli("cancel", run)
    assert ours() == []
