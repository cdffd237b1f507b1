"""Backends by their table and by the entry points of other packages: a toy one, as real processes. That one
of ours is one file and one line, the guide's test shows (tests/torch/test_extend.py)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from kit import toy_backend
from kit.command_runs import Cli, shell, until, write_spec

from mlpipe._core.errors import SubmitError
from mlpipe.submit import backends

pytestmark = pytest.mark.unit
TOY = Path(toy_backend.__file__)
SUBMIT = ("submit", "pipeline.yaml", "--to", "toy", "--queue", "queue", "--run-id")


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    found = Cli(tmp_path)
    write_spec(tmp_path, {"a": shell('echo from the queue; echo 1 > "$1/made"')})
    return found


@pytest.fixture
def of_another_package(cli: Cli) -> Cli:
    """Installed as pip does it: the module, and metadata with the entry point."""
    site = cli.folder / "site"
    metadata = site / "toy_backend-1.0.dist-info"
    metadata.mkdir(parents=True)
    shutil.copy(TOY, site / "toy_backend.py")
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-backend\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[mlpipe.backends]\ntoy = toy_backend:ToyBackend\n")
    cli.env["PYTHONPATH"] = str(site)
    return cli


def test_a_backend_of_another_package(of_another_package: Cli) -> None:
    cli = of_another_package
    assert "kubernetes|jenkins|slurm|rented|toy|auto]" in cli("submit", "--help").stdout
    assert "--queue FOLDER" in cli("submit", "--help", "--to", "toy").stdout
    planned = cli.json(*SUBMIT, "r", "--dry-run")
    assert planned["stages"][0]["argv"][1:4] == ["-P", "-m", "mlpipe.submit.pod"]
    assert "needs --queue FOLDER" in cli(*SUBMIT[:4], code=2).stderr
    cli(*SUBMIT, "r", "--wait")
    run = cli.json("status", "r")
    assert (run["backend"], run["state"], run["meta"]["toy"]) == ("toy", "done", {"queue": "queue"})
    assert cli("logs", "r").stdout == "the queue: from the queue\n"
    assert (cli.folder / "queue/r-a-1/plan.json").exists()
    assert "setsid" in [finding["name"] for finding in cli.json("doctor", "--for", "toy")["findings"]]


def test_its_run_is_cancelled_and_resumed(of_another_package: Cli) -> None:
    cli = of_another_package
    write_spec(cli.folder, {"a": shell("touch begun; test -e go || sleep 300; echo from the store")})
    cli(*SUBMIT, "r")
    until(lambda: (cli.folder / "begun").exists(), "the stage to begin")
    assert cli.json("cancel", "r")["state"] == "cancelled"
    (cli.folder / "go").touch()
    assert cli.json("resume", "r")["state"] == "done"
    cli.env.pop("PYTHONPATH")  # on a machine that lacks the package
    assert "no backend 'toy'" in cli("resume", "r", "--set", "stages.a.env={A: b}", code=2).stderr
    assert cli("logs", "r").stdout == "from the store\n"


def test_options_belong_to_the_backend_that_is_named(cli: Cli) -> None:
    for words, said in (
        (["submit", "pipeline.yaml", "--context", "c"], "--context is for --to kubernetes"),
        (["submit", "pipeline.yaml", "--to", "jenkins"], "--to jenkins needs --job FOLDER/JOB"),
        (["submit", "pipeline.yaml", "--to", "kubernetes", "--job", "j"], "--job is for --to jenkins"),
        (
            ["submit", "pipeline.yaml", "--dry-run=server"],
            "--dry-run=server is for --to kubernetes and slurm",
        ),
        (["submit", "pipeline.yaml", "--to", "pbs"], "'pbs' is not one of 'local', 'kubernetes'"),
        (["doctor", "--context", "c"], "--context is for --for kubernetes"),
        (["render", "pipeline.yaml", "--for", "local"], "'local' is not one of 'kubernetes', 'jenkins'"),
    ):
        assert said in " ".join(cli(*words, code=2).stderr.split())


def test_a_backend_that_cannot_be_loaded_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backends.TABLE, "broken", "mlpipe.submit.nowhere:Backend")
    with pytest.raises(SubmitError, match="'broken' cannot be loaded") as refused:
        backends.load("broken")
    assert refused.value.kind == "input"
