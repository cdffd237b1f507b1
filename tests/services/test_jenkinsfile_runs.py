"""The Jenkinsfile that mlpipe writes, run stage by stage on Jenkins' CPS engine with the real mlpipe and the
local backend. The interpreter around the engine is ours (`kit/groovy`): no Jenkins takes part."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from kit import groovy, warm
from kit.command_runs import Cli, shell, until, write_spec
from kit.jenkinsfile import Workspace, jenkinsfile
from kit.servers import ServerMissingError

from mlpipe.render import jenkins
from mlpipe.render.jenkins import MAX_STAGES
from mlpipe.spec.load import load_pipeline_text

pytestmark = pytest.mark.services
DIAMOND = {"b": ["a"], "c": ["a"], "d": ["b", "c"]}


class Controller:
    """Builds of one pipeline in one workspace."""

    def __init__(
        self,
        folder: Path,
        stages: Mapping[str, Sequence[str]],
        needs: Mapping[str, Sequence[str]],
        *,
        aborted: bool = False,
        **more: Mapping[str, Any],
    ) -> None:
        """Unless builds are to be `aborted`, which signals what `sh` started, `mlpipe` is a fork."""
        self.folder = folder
        self.workspace = folder / "workspace"
        self.workspace.mkdir()
        write_spec(self.workspace, stages, needs, **more)
        self.cli = Cli(self.workspace)
        text = self.cli("render", "pipeline.yaml", "--for", "jenkins").stdout
        (folder / "Jenkinsfile").write_text(text)
        environment = {
            **self.cli.env,
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "JENKINS_URL": "http://jenkins.example.com/",
            "JOB_NAME": "team/train",
            "BUILD_NUMBER": "1",
        }
        self.environment = environment if aborted else warm.programs(folder / "bin", environment)

    def build(self, **parameters: str | bool) -> groovy.Ran:
        try:
            return groovy.executed(self.folder / "Jenkinsfile", self.workspace, self.environment, parameters)
        except ServerMissingError as error:
            pytest.skip(str(error))

    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def run(self) -> Any:
        (found,) = self.cli.json("list")["runs"]
        return self.cli.json("status", found["run_id"])


def meets(name: str, other: str) -> list[str]:
    """Ends well only if the other runs at the same time."""
    wait = f"n=0; until [ -e {other}-is-here ]; do sleep 0.1; n=$((n + 1)); [ $n -lt 6000 ]; done"
    return shell(f"set -e; touch {name}-is-here; {wait}; echo {name} > $1/file")


def writes(text: str) -> list[str]:
    return shell(f"echo {text} > $1/file")


HOSTILE = (
    "it's \"$HOME\" `id` $(id) ${params.X}", "\\u0027 + 'x' \\\\u0027", "'''", "a\nEND_OF_OVERRIDES\r\n",
    "\u202ecod\u2066", "--help", "", "x'" * 5000,
)  # fmt: skip
KEEPS = """
import json, os, sys
open(os.environ["MLPIPE_OUTPUT"] + "/given", "w").write(json.dumps([sys.argv[1:], os.environ["HOSTILE"]]))
"""


def test_a_build_runs_branches_at_once_each_stage_once_and_hostile_text_reaches_its_command(
    tmp_path: Path,
) -> None:
    stages = {"d": writes("d"), "b": meets("b", "c"), "c": meets("c", "b")}
    stages["a"] = [sys.executable, "-c", KEEPS, *HOSTILE]
    controller = Controller(tmp_path, stages, DIAMOND, a={"env": {"HOSTILE": "".join(HOSTILE)}})
    ran = controller.build(BACKEND="local")
    assert ran.result == "SUCCESS", controller.log()
    names = [name for name, _ in ran.stages]
    assert names[:4] == ["Validate", "Plan", "a", "Level 2"]
    assert sorted(names[4:6]) == ["b", "c"]
    assert names[6:] == ["d"]
    assert {result for _, result in ran.stages} == {"SUCCESS"}
    run = controller.run()
    assert run["state"] == "done"
    assert run["run_id"].startswith("test-1-")
    assert {stage["attempt"] for stage in run["stages"].values()} == {1}
    given = controller.cli.store / f"runs/{run['run_id']}/stages/a/outputs/files/given"
    assert json.loads(given.read_text()) == [list(HOSTILE), "".join(HOSTILE)]
    assert "<html" in (tmp_path / "archived-report.html").read_text()
    assert '"stages"' in (tmp_path / "archived-plan.json").read_text()
    # as after an agent that died: the same build again finds its run, and starts nothing
    assert controller.build(BACKEND="local").result == "SUCCESS"
    assert controller.run()["stages"] == run["stages"]


def test_a_failure_ends_the_build_and_the_branch_beside_it_still_finishes(tmp_path: Path) -> None:
    stages = {"a": writes("a"), "b": ["sh", "-c", "exit 7"], "c": shell("sleep 2"), "d": writes("d")}
    controller = Controller(tmp_path, stages, DIAMOND)
    ran = controller.build(BACKEND="local")
    assert ran.result == "FAILURE"
    assert dict(ran.stages) == {
        "Validate": "SUCCESS", "Plan": "SUCCESS", "a": "SUCCESS", "Level 2": "FAILURE", "b": "FAILURE",
        "c": "SUCCESS",
    }  # fmt: skip
    assert "exit code 3" in str(ran.error)
    run = controller.run()
    assert run["state"] == "failed"
    assert run["stages"]["c"]["state"] == "done"
    assert run["stages"]["d"]["attempt"] == 0
    assert (tmp_path / "archived-report.html").exists()


def test_an_abort_cancels_the_run_and_waits_for_it(tmp_path: Path) -> None:
    stages = {"a": shell("touch $PWD/started; sleep 600"), "b": writes("b")}
    controller = Controller(tmp_path, stages, {"b": ["a"]}, aborted=True)
    found: list[groovy.Ran] = []
    thread = threading.Thread(target=lambda: found.append(controller.build(BACKEND="local")), daemon=True)
    thread.start()
    until(lambda: found or (controller.workspace / "started").exists() or not thread.is_alive(), "the stage")
    if not thread.is_alive():
        pytest.skip("Groovy is not there, or did not start: the other tests of this file say why")
    (tmp_path / "abort").touch()
    thread.join(300)
    (ran,) = found
    assert ran.result == "ABORTED", controller.log()
    assert dict(ran.stages) == {"Validate": "SUCCESS", "Plan": "SUCCESS", "a": "ABORTED"}
    assert "mlpipe cancel" in controller.log()
    assert controller.run()["state"] == "cancelled"


def test_only_a_plan(tmp_path: Path) -> None:
    controller = Controller(tmp_path, {"a": writes("a")}, {})
    ran = controller.build(BACKEND="local", DRY_RUN=True)
    assert ran.result == "SUCCESS"
    assert ran.stages == [("Validate", "SUCCESS"), ("Plan", "SUCCESS"), ("a", "SKIPPED")]
    assert controller.cli.json("list")["runs"] == []


def test_another_pipeline_than_was_asked_for(tmp_path: Path) -> None:
    controller = Controller(tmp_path, {"a": writes("a")}, {})
    asked = controller.cli.json("plan", "pipeline.yaml", "--set", "name=other")
    digest = asked["stages"][0]["plan"]["spec_digest"]
    ran = controller.build(SPEC_DIGEST=digest, DRY_RUN=True)
    assert ran.stages == [("Validate", "SUCCESS"), ("Plan", "FAILURE")]
    assert "is not the one that was asked for" in controller.log()
    assert controller.build(SPEC_DIGEST=digest, OVERRIDES="name=other", DRY_RUN=True).result == "SUCCESS"


def test_many_stages_in_a_loop(tmp_path: Path) -> None:
    """Against a stand-in for mlpipe, for its 30 runs would take a minute."""
    names = [f"s{n}" for n in range(MAX_STAGES + 10)]
    needs = {name: [f"s{n // 2}"] for n, name in enumerate(names) if n}
    controller = Controller(tmp_path, {name: ["x"] for name in names}, needs)
    fake = Workspace(controller.workspace, {})
    fake.prepare()
    controller.environment |= {
        "PATH": f"{controller.workspace / 'bin'}:{os.defpath}",
        "RECORD": str(controller.workspace / "record"),
    }
    ran = controller.build(OVERRIDES="name=it's\n")
    assert ran.result == "SUCCESS", controller.log()
    assert [name for name, _ in ran.stages[:4]] == ["Validate", "Plan", "Stages", "s0"]
    assert sorted(name for name, _ in ran.stages[3:]) == sorted(names)
    submits = [call for call in fake.calls() if call[0] == b"submit"]
    assert sorted(call[6].decode() for call in submits) == sorted(names)
    assert {tuple(call[7:]) for call in submits} == {
        (b"--wait", b"--set", b"name=it's", b"--", b"pipeline.yaml")
    }


def test_the_most_stages_before_the_loop_compile(tmp_path: Path) -> None:
    """With the engine's own transformation, which makes methods longer: side by side, and in a row."""
    names = [f"{'s' * 60}-{n}" for n in range(MAX_STAGES)]
    files = []
    for form, needs in (("wide", {}), ("long", {b: [a] for a, b in pairwise(names)})):
        (tmp_path / form).mkdir()
        Controller(tmp_path / form, {name: ["x"] for name in names}, needs)
        files.append(tmp_path / form / "Jenkinsfile")
    assert checked(files) == [None, None]


def checked(files: Sequence[Path]) -> list[str | None]:
    try:
        return groovy.checked(files)
    except ServerMissingError as error:
        pytest.skip(str(error))


SIMULATING = f"""#!{sys.executable}
import sys

sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from kit import sweep_backend
from mlpipe.cli import main
from mlpipe.submit import backends

backends.TABLE[sweep_backend.NAME] = sweep_backend.TARGET
sys.exit(main())
"""


def test_trials_of_a_sweep_are_branches_and_one_that_fails_is_red_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real mlpipe, on a backend whose trials train nothing; with one trial more than branches."""
    controller = Controller(tmp_path, {"a": writes("a")}, {})
    over = [*({"floor": number} for number in range(2)), {"fails": True}]
    fit = {
        "model": {"entry": "a.b:c", "args": {}}, "data": {"entry": "a.b:d", "batch_size": 8}, "steps": 3,
    }  # fmt: skip
    sweep = {"over": {"model.args": over}, "metric": {"name": "loss"}, "max_parallel": 2}
    spec = {"version": 1, "name": "swept", "stages": [{"name": "fit", "train": fit}], "sweep": sweep}
    (controller.workspace / "pipeline.yaml").write_text(json.dumps(spec))
    monkeypatch.setattr(jenkins, "MAX_TRIAL_BRANCHES", 2)
    pipeline = load_pipeline_text(json.dumps(spec), "pipeline.yaml")
    (tmp_path / "Jenkinsfile").write_text(jenkinsfile(pipeline, "pipeline.yaml", [], "runs"))
    (tmp_path / "bin/mlpipe").write_text(SIMULATING)
    ran = controller.build(BACKEND="simulated", RUN_ID="s")
    assert ran.result == "SUCCESS", controller.log()
    assert [name for name, _ in ran.stages[:3]] == ["Validate", "Plan", "Sweep"]
    names = [f"{number:03d}" for number in range(len(over))]
    expected = {name: "FAILURE" if name == names[-1] else "SUCCESS" for name in names}
    assert dict(ran.stages[3:]) == expected
    assert len(ran.stages) == 3 + len(names)
    found = controller.cli.json("status", "s")
    assert [trial["state"] for trial in found["trials"]] == ["done"] * len(names[1:]) + ["failed"]
    assert found["best"] == "000"
    page = (tmp_path / "archived-report.html").read_text()
    assert "s-000" in page
    assert "it was asked to fail" in controller.log()
