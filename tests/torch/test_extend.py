"""What docs/how-to/extend.md shows is all that it takes: a copy of mlpipe with all of its extensions runs its
pipeline."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kit import console
from kit.guide import EXTENSIONS, TEXT, blocks, copy_with
from kit.plans import write_tokens

pytestmark = pytest.mark.torch


def test_all_of_them_run(tmp_path: Path) -> None:
    source = copy_with(EXTENSIONS, tmp_path)
    write_tokens(tmp_path / "tokens")
    for path, text in blocks(TEXT, "yaml").items():
        (tmp_path / path).write_text(text)
    env = {name: value for name, value in os.environ.items() if not name.startswith("MLPIPE_")}
    env["MLPIPE_CALIBRATE"] = "off"
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    env["PYTHONPATH"] = str(source)
    console.run(TEXT, tmp_path, env, 600)
    run = tmp_path / "runs" / "runs" / "first"
    stage = json.loads((run / "run.json").read_text())["stages"]["check"]
    assert (stage["state"], stage["outcome"]["step"]) == ("done", 10)
    plan = json.loads((run / "stages" / "check" / "attempt-1" / "plan.json").read_text())
    assert plan["verify"] == {"train_stage": "train"}
    assert ">check<" in (run / "report.html").read_text()

    # A failure of its own ends a run as one of ours does: as if the driver had died before the stage.
    blob = next(run.glob("stages/train/checkpoints/step-000000010/*/model-*"))
    whole = blob.read_bytes()
    blob.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    state = json.loads((run / "run.json").read_text())
    state["state"], state["stages"]["check"]["state"] = "running", "pending"
    (run / "run.json").write_text(json.dumps(state))
    again = [sys.executable, "-m", "mlpipe.cli", "resume", "first"]
    done = subprocess.run(
        again, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600, check=False
    )
    assert (done.returncode, blob.name in done.stderr) == (3, True), done.stderr
    stage = json.loads((run / "run.json").read_text())["stages"]["check"]
    assert (stage["state"], blob.name in stage["message"]) == ("failed", True)
