"""docs/how-to/model-parallelism.md and plan.md: their commands print what they show."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mlpipe.cli.app import run_app

pytestmark = pytest.mark.unit
ROOT = Path(__file__).resolve().parents[3]
PAGES = "".join((ROOT / f"docs/how-to/{name}.md").read_text() for name in ("model-parallelism", "plan"))
SHOWN = re.findall(r"^```console\n\$ mlpipe (\w+ pipelines/.*?)\n(.*?)^```", PAGES, flags=re.M | re.S)


def test_the_pages_show_what_is_printed() -> None:
    assert len(SHOWN) == 4
    for command, lines in SHOWN:
        argv = [sys.executable, "-m", "mlpipe.cli", *shlex.split(command)]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=300)
        printed = (done.stdout + done.stderr).splitlines()
        assert [line for line in lines.splitlines() if line not in ["...", *printed]] == [], printed


def test_a_way_to_exchange_keys_and_values_is_compared_with_the_other(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ("mesh={dp_shard: fill, cp: 4}", "context={exchange: ring}", "data.micro_batch=1")
    sets = [word for one in given for word in ("--set", f"train.{one}")]
    with pytest.raises(SystemExit):
        run_app(["plan", str(ROOT / "pipelines/llm.yaml"), "--stage", "train", "--explain", *sets])
    told = capsys.readouterr().out
    assert "mesh: dp_shard 4, cp 4; keys and values in a ring" in told
    assert re.search(
        r"Keys and values of cp 4 go round from worker to worker: if they are gathered at once, a step would "
        r"take \d\.\d\d times the time, and a worker needs .* of ",
        told,
    )


def test_advice_is_what_a_model_with_experts_can_have(capsys: pytest.CaptureFixture[str]) -> None:
    """No compile."""
    moe = ["--set", "train.model.preset=moe-2m", "--set", "train.precision=bf16"]
    told = []
    for more in ([], moe):
        argv = ["plan", str(ROOT / "pipelines/quickstart.yaml"), "--stage", "train", "--explain", *more]
        with pytest.raises(SystemExit):
            run_app(argv)
        told.append(capsys.readouterr().out)
    assert "compile: block is worth" in told[0]
    assert "compile: block is worth" not in told[1]
