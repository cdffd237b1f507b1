"""The repository's own Jenkinsfile, run stage by stage on Jenkins' CPS engine with the real mlpipe and the
local backend. The interpreter around the engine is ours (`kit/groovy`): no Jenkins takes part."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from kit import groovy, warm
from kit.command_runs import Cli, shell, write_spec
from kit.jenkins import TOKEN, USER, FakeJob, fake_jenkins
from kit.servers import ServerMissingError

pytestmark = pytest.mark.services
ROOT = Path(__file__).resolve().parents[2]
CHECK = ["agent mlpipe-check", "released mlpipe-check"]
MODEL = ["lock mlpipe-gpus", "agent mlpipe", "released mlpipe", "unlock mlpipe-gpus"]
AGENT = ["agent mlpipe", "released mlpipe"]


class Controller:
    """Builds of `pipeline.yaml` of one repository, each agent with a fresh checkout of it."""

    def __init__(self, folder: Path, *, aborted: bool = False) -> None:
        """Unless builds are to be `aborted`, which signals what `sh` started, `mlpipe` is a fork."""
        self.folder = folder
        self.repository = folder / "repository"
        (self.repository / "k8s/jenkins").mkdir(parents=True)
        for name in ("Jenkinsfile", "k8s/jenkins/build.sh"):
            shutil.copy(ROOT / name, self.repository / name)
        (folder / "workspace").mkdir()
        self.cli = Cli(folder)
        environment = {
            **self.cli.env,
            "XDG_STATE_HOME": "/dev/null/none",  # an agent remembers nothing of what others did
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "JENKINS_URL": "http://jenkins.example.com/",
            "JOB_NAME": "team/train",
            "BUILD_NUMBER": "1",
        }
        self.environment = environment if aborted else warm.programs(folder / "bin", environment)

    def build(self, parameters: dict[str, str | bool], **more: Any) -> groovy.Ran:
        given = {"PIPELINE": "pipeline.yaml", "BACKEND": "local", **parameters}
        try:
            return groovy.executed(
                self.repository / "Jenkinsfile",
                self.folder / "workspace",
                self.environment,
                given,
                repository=str(self.repository),
                **more,
            )
        except ServerMissingError as error:
            pytest.skip(str(error))

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def run(self) -> Any:
        (found,) = self.cli.json("list")["runs"]
        return self.cli.json("status", found["run_id"])


def test_a_denied_model_is_kept_and_a_later_build_promotes_it(tmp_path: Path) -> None:
    """In the store that the pipeline file names, and nobody else."""
    controller = Controller(tmp_path)
    del controller.environment["MLPIPE_STORE"]
    train = {
        "model": {"preset": "llama-1m", "seq_len": 32, "dim": 32, "num_layers": 1, "num_heads": 2,
                  "num_kv_heads": 2, "ffn_dim": 64},
        "data": {"tokens": "{{stages.corpus.output}}", "batch_size": 2},
        "steps": 2,
        "strategy": "single",
        "checkpoint": {"every": "2 steps"},
    }  # fmt: skip
    corpus = ["mlpipe-corpus", "--out", "{{output}}", "--vocab-size", "300", "--max-bytes", "200 KiB"]
    stages = [
        {"name": "corpus", "command": corpus},
        {"name": "train", "needs": ["corpus"], "train": train},
        {"name": "evaluate", "needs": ["train"], "evaluate": {"max_tokens": 256, "generate_tokens": 0}},
        {"name": "promote", "needs": ["evaluate"], "promote": {"as": "tiny"}},
    ]
    text = json.dumps({"version": 1, "name": "tiny", "store": str(controller.cli.store), "stages": stages})
    (controller.repository / "pipeline.yaml").write_text(text)
    denied = controller.build({"OVERRIDES": "train.seed=7"}, input="deny")
    assert denied.result == "ABORTED", controller.log()
    assert dict(denied.stages) == {
        "Check": "SUCCESS", "Validate": "SUCCESS", "Plan": "SUCCESS", "Render": "SKIPPED",
        "Model": "SUCCESS", "Train": "SUCCESS", "Evaluate": "SUCCESS", "Approve": "ABORTED",
    }  # fmt: skip
    after = [*AGENT, "agent mlpipe", "junit 4 tests, 0 failed", "released mlpipe"]
    assert denied.events == [*CHECK, *MODEL, "input without an agent", *after]
    run = controller.run()
    assert run["state"] == "cancelled"
    assert run["stages"]["train"]["last_checkpoint"]["step"] == 2
    assert run["run_id"].startswith("build-1-")
    assert controller.cli.json("models", "list")["models"] == []

    controller.environment["BUILD_NUMBER"] = "2"
    asked = {"RUN_ID": run["run_id"], "OVERRIDES": "train.seed=7"}
    ran = controller.build(asked, input="approve")
    assert ran.result == "SUCCESS", controller.log()
    assert [name for name, _ in ran.stages[-3:]] == ["Release", "Promote", "Report"]
    assert ran.events[-1:] == ["released mlpipe"]
    run = controller.run()  # the same one
    assert run["state"] == "done"
    assert {name: stage["attempt"] for name, stage in run["stages"].items()} == dict.fromkeys(
        run["stages"], 1
    )
    assert len(controller.cli.json("models", "list")["models"]) == 1
    assert "<html" in (tmp_path / "archived-report.html").read_text()
    assert '"stages"' in (tmp_path / "archived-plan.json").read_text()


def test_a_build_that_was_asked_for_from_the_command_line_fails(tmp_path: Path) -> None:
    """The pipeline comes from the store alone."""
    controller = Controller(tmp_path)
    write_spec(tmp_path, {"a": shell("true"), "b": ["sh", "-c", "exit 7"]}, {"b": ["a"]})
    with fake_jenkins() as jenkins:
        names = ("RUN_ID", "STORE", "SPEC_DIGEST")
        jenkins.jobs["team/train"] = FakeJob(dict.fromkeys(names, ""))
        access = {"JENKINS_URL": jenkins.url, "JENKINS_USER_ID": USER, "JENKINS_API_TOKEN": TOKEN}
        controller.cli.env |= access
        controller.cli("submit", "pipeline.yaml", "--to", "jenkins", "--job", "team/train", "--run-id", "r")
        asked: dict[str, str | bool] = {name: jenkins.items[0].parameters[name] for name in names}
    ran = controller.build({**asked, "PIPELINE": "no-such-file.yaml"}, input="approve")
    assert ran.result == "FAILURE", controller.log()
    assert ran.stages[-2:] == [("Model", "FAILURE"), ("Train", "FAILURE")]
    assert "exit code 3" in str(ran.error)
    assert ran.events == [*AGENT, *MODEL, "agent mlpipe", "junit 2 tests, 1 failed", "released mlpipe"]
    assert controller.run()["stages"]["b"]["state"] == "failed"
    assert (tmp_path / "archived-report.html").exists()
    other = controller.build({**asked, "SPEC_DIGEST": "0" * 64}, input="approve")
    assert other.stages[-1] == ("Validate", "FAILURE")
    assert "not the one that was asked for" in controller.log()


def test_a_build_that_is_aborted_or_takes_too_long_cancels_its_run(tmp_path: Path) -> None:
    """In the store that OVERRIDES names: another than that of the agent or of the file."""
    controller = Controller(tmp_path, aborted=True)
    del controller.environment["MLPIPE_STORE"]
    for command, more in (
        ("sleep 600", {"timeouts": {"Model": 30}}),
        (f"touch {tmp_path}/abort; sleep 600", {}),
    ):
        write_spec(controller.repository, {"a": shell(command)})
        ran = controller.build({"OVERRIDES": f"store={controller.cli.store}"}, **more)
        assert ran.result == "ABORTED", controller.log()
        assert ran.stages[-2:] == [("Model", "ABORTED"), ("Train", "ABORTED")]
    assert controller.log().count("mlpipe cancel --ignore-not-found") == 2
    assert [run["state"] for run in controller.cli.json("list")["runs"]] == ["cancelled"] * 2


def test_a_dry_run_and_a_change_request_start_nothing(tmp_path: Path) -> None:
    controller = Controller(tmp_path)
    write_spec(controller.repository, {"a": shell("true")})
    dry = controller.build({"DRY_RUN": True})
    assert dry.result == "SUCCESS", controller.log()
    skipped = {"Model": "SKIPPED", "Approve": "SKIPPED", "Release": "SKIPPED"}
    assert dict(dry.stages) == {
        "Check": "SUCCESS", "Validate": "SUCCESS", "Plan": "SUCCESS", "Render": "SKIPPED", **skipped
    }  # fmt: skip
    shutil.copy(ROOT / "pipelines/llm.yaml", controller.repository / "pipeline.yaml")
    controller.environment["CHANGE_ID"] = "7"
    del controller.environment["MLPIPE_STORE"]  # the file's own, which needs no credentials here
    ran = controller.build({})
    assert ran.result == "SUCCESS", controller.log()
    assert dict(ran.stages) == {**dict(dry.stages), "Render": "SUCCESS"}
    assert ran.events == dry.events == CHECK
    assert (tmp_path / "archived-00-driver.yaml").exists()
    assert controller.cli.json("list")["runs"] == []
