"""Whose fault it is that a process of a stage cannot go on."""

from __future__ import annotations

import errno

import pytest
from kit import plans

from mlpipe.plan.process import main_of_stage

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 4, "error: [Errno 28] No space left on device"),
        (ValueError("the plan asks for nothing"), 2, "plan.json: the plan asks for nothing"),
    ],
)
def test_a_full_disk_is_not_the_plans_fault(error, code, said, tmp_path, capsys):
    def run(*_):
        raise error

    tokens = plans.write_tokens(tmp_path / "tokens", num_tokens=100)
    (tmp_path / "plan.json").write_text(plans.train_plan("file:///s", tokens).to_json())
    argv = ["--plan", str(tmp_path / "plan.json"), "--scratch", str(tmp_path)]
    assert main_of_stage("stage", None, argv, run) == code
    assert said in capsys.readouterr().err


def test_a_plan_that_is_not_there_is_of_its_caller(tmp_path, capsys):
    argv = ["--plan", str(tmp_path / "none.json"), "--scratch", str(tmp_path)]
    assert main_of_stage("stage", None, argv, lambda *_: 0) == 2
    assert "none.json" in capsys.readouterr().err
