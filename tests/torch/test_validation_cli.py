"""Validation at the command line, with the metric that docs/how-to/validate.md shows: interrupted, resumed,
stopped early; the best one evaluated and promoted."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from kit import plans
from kit.command_runs import Cli, until

from mlpipe.spec.load import load_pipeline_text
from mlpipe.store import catalogue
from mlpipe.store.folder import FolderStore
from mlpipe.train.data.corpus import build_corpus

pytestmark = pytest.mark.torch

PAGE = (Path(__file__).parents[2] / "docs/how-to/validate.md").read_text()
(METRICS,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
(PIPELINE,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
PATIENCE = 4
# Each validation but the first waits as long as the file `hold` is there.
HELD = """
import pathlib, time
_compute, _computed = TopK.compute, []

def _held(self):
    _computed.append(self)
    while len(_computed) > 1 and pathlib.Path("hold").exists():
        time.sleep(0.05)
    return _compute(self)

TopK.compute = _held
"""


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    (tmp_path / "my_metrics.py").write_text(METRICS + HELD)
    text = tmp_path / "text"
    text.mkdir()
    for number in range(60):
        (text / f"{number}.py").write_text(f"def f{number}(x):\n    return x + {number}\n" * 40)
    build_corpus(tmp_path / "tokens", source=text, tokenizer_kind="bytes")
    model = {
        "preset": "llama-1m", "seq_len": 32, "max_seq_len": 64,
        "dim": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 64,
    }  # fmt: skip
    own = {"entry": "my_metrics:TopK", "args": {"k": 5}, "name": "top_five"}
    train = {
        "model": model,
        "data": {"tokens": str(tmp_path / "tokens"), "batch_size": 8},
        "optimizer": {"lr": 1e-3, "schedule": "constant"},
        "steps": 1000,
        "strategy": "fsdp",
        "precision": "fp32",
        "checkpoint": {"every": "15 steps", "keep": 2},
        "validate": {
            "every": "10 steps",
            "max_tokens": 32 * 7,
            "metrics": ["loss", "accuracy", own],
            # the worst is the best: the first one, which others do not push out; and nothing is much better
            "best": {"metric": "loss", "mode": "max"},
            "stop": {"patience": PATIENCE, "min_delta": 100.0},
            "sample": "def ",
            "generate_tokens": 4,
        },
    }
    evaluate = {
        "checkpoint": "best",
        "metrics": ["accuracy", own],
        "gate": "top_five >= 0",
        "max_tokens": 32 * 7,
    }
    spec = {
        "version": 1,
        "name": "validated",
        "stages": [
            {"name": "train", "train": train, "resources": {"workers_per_node": 2}},
            {"name": "evaluate", "needs": ["train"], "evaluate": evaluate},
            {"name": "promote", "needs": ["evaluate"], "promote": {"as": "validated"}},
        ],
    }
    (tmp_path / "pipeline.yaml").write_text(json.dumps(spec))
    return Cli(tmp_path, warm=True)


def records(cli: Cli, attempt: int, kind: str) -> list[dict[str, Any]]:
    path = cli.store / f"runs/r/stages/train/attempt-{attempt}/records/rank-0.jsonl"
    found = plans.lines(path.read_bytes()) if path.exists() else []
    return [record for record in found if record["kind"] == kind]


def test_interrupted_and_resumed_it_stops_early_and_the_best_is_evaluated_promoted_and_exported(cli: Cli):
    (cli.folder / "hold").touch()
    running = cli.start("run", "pipeline.yaml", "--run-id", "r")
    until(lambda: len(records(cli, 1, "validation")) >= 1, "the first validation", 600)
    running.send_signal(signal.SIGINT)
    until(lambda: list(cli.folder.glob("cache/**/stop")), "the ranks to be told")
    (cli.folder / "hold").unlink()
    _, err = running.communicate(timeout=600)
    assert running.returncode == 130, err
    document = cli.json("resume", "r", "--set", "train.strategy=ddp")
    assert document["state"] == "done"
    validations = [one for attempt in (1, 2) for one in records(cli, attempt, "validation")]
    # the count went on over the interruption, and each was done once
    assert [one["step"] for one in validations] == [10 * n for n in range(1, PATIENCE + 2)]
    assert [one["best"] for one in validations] == [True] + [False] * PATIENCE
    assert set(validations[0]["metrics"]) == {"loss", "accuracy", "top_five"}
    assert validations[0]["sample"].startswith("def ")
    stopped = document["stages"]["train"]
    last = 10 * (PATIENCE + 1)
    assert stopped["message"].startswith(f"stopped early at step {last} of 1000: loss: the last {PATIENCE} ")
    status = cli("status", "r").stdout
    assert "stopped early at step" in status
    assert f"val loss {validations[-1]['metrics']['loss']:.3f}" in status

    listed = cli.json("checkpoints", "list", "r")["checkpoints"]
    assert [one["step"] for one in listed if one["best"]] == [10]
    # the best, the one that was gone on from, and the two that are kept
    assert [one["step"] for one in listed if one["step"] in (10, 15, 30, 45, last)] == [10, 45, last]
    first = validations[0]["metrics"]["loss"]
    assert f"best: loss {first:.4g}" in cli("checkpoints", "list", "r").stdout
    evaluation = document["stages"]["evaluate"]["outcome"]
    assert evaluation["step"] == 10
    assert evaluation["metrics"]["val_loss"] == pytest.approx(first, rel=1e-6)
    assert evaluation["metrics"]["top_five"] == pytest.approx(validations[0]["metrics"]["top_five"])
    shown = cli.json("models", "show", "validated", "1")
    assert shown["step"] == 10
    assert shown["lineage"]["metrics"]["top_five"] == evaluation["metrics"]["top_five"]
    assert cli.json("checkpoints", "export", "r", "--best", "--out", "model")["step"] == 10

    report = Path(document["report"]).read_text()
    assert "stopped early at step" in report
    assert "Validation: top_five" in report
    # of a run that is over, as long as nobody asks for more patience
    again = cli.json("resume", "r", "--set", "train.steps=2000")
    assert again["stages"]["train"]["message"].startswith(f"stopped early at step {last} of 2000")
    assert not records(cli, 3, "step")
    more = cli.json("resume", "r", "--set", f"train.validate.stop.patience={PATIENCE + 1}")
    assert more["stages"]["train"]["message"].startswith(f"stopped early at step {last + 10} of 2000")
    store = FolderStore(cli.store)
    best = catalogue.best(store, "runs/r/stages/train")
    assert best is not None
    assert best.step == 10
    state = catalogue.load_manifest(store, best.key)["scalars"]["validation"]
    assert state["metrics"]["loss"] == first
    assert catalogue.read_best(store, best.key) == state


def test_the_pipeline_of_the_page_is_one():
    pipeline = load_pipeline_text(PIPELINE, "validate.md")
    names = [
        one if isinstance(one, str) else one.label for one in pipeline.stage("train").work.validate_.metrics
    ]
    assert names == ["loss", "perplexity", "top_k"]
