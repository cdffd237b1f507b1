"""`mlpipe render`: files to commit, and the check that they are fresh."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from kit.command_runs import Cli
from kit.rendered import PIPELINES, QUICKSTART

pytestmark = pytest.mark.unit
SETS = [part for override in QUICKSTART for part in ("--set", override)]
RENDER = (
    "render",
    str(PIPELINES / "quickstart.yaml"),
    "--for",
    "kubernetes",
    "--store",
    "s3://ml-runs/x",
    *SETS,
)


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path)


def test_files_and_their_check(cli: Cli) -> None:
    written = cli(*RENDER, "--out", "k").stdout.splitlines()
    names = ["00-driver.yaml", "01-corpus.yaml", "02-train.yaml", "03-evaluate.yaml"]
    assert written == [f"k/{name}" for name in names]
    before = {path.name: path.read_bytes() for path in (cli.folder / "k").iterdir()}
    assert sorted(before) == names
    assert b"# Stage promote is done in the driver's own process" in before["00-driver.yaml"]
    assert "k: 4 files, the same" in cli(*RENDER, "--out", "k", "--check").stdout
    cli(*RENDER, "--out", "k")
    assert before == {path.name: path.read_bytes() for path in (cli.folder / "k").iterdir()}

    done = cli(*RENDER, "--out", "k", "--check", "--set", "kubernetes.form=indexed-job", code=2)
    assert "--- k/02-train.yaml" in done.stdout
    assert "-kind: JobSet" in done.stdout
    assert "without --check it is written anew" in done.stderr
    assert cli.json(*RENDER, "--out", "k", "--check")["same"] is True
    assert before == {path.name: path.read_bytes() for path in (cli.folder / "k").iterdir()}


@pytest.mark.parametrize(("old", "new"), [(b"\n", b"\r\n"), (b"\n", b"\x0b"), (b"\n", b"\xc2\x85")])
def test_the_check_sees_every_byte(cli: Cli, old: bytes, new: bytes) -> None:
    """Of what splitlines() takes for an end of a line none is another."""
    cli(*RENDER, "--out", "k")
    path = cli.folder / "k" / "02-train.yaml"
    path.write_bytes(path.read_bytes().replace(old, new, 1))
    assert "--- k/02-train.yaml" in cli(*RENDER, "--out", "k", "--check", code=2).stdout
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    cli(*RENDER, "--out", "k", "--check", code=2)


def test_files_of_stages_that_are_gone_go_too_and_others_stay(cli: Cli) -> None:
    cli(*RENDER, "--out", "k")
    folder = cli.folder / "k"
    (folder / "05-old.yaml").write_bytes((folder / "03-evaluate.yaml").read_bytes())
    (folder / "06-own.yaml").write_text("kind: ConfigMap\n")
    assert "--- k/05-old.yaml" in cli(*RENDER, "--out", "k", "--check", code=2).stdout
    cli(*RENDER, "--out", "k")
    assert not (folder / "05-old.yaml").exists()
    assert (folder / "06-own.yaml").exists()
    cli(*RENDER, "--out", "k", "--check")


def test_a_script_for_slurm_has_any_text(cli: Cli) -> None:
    argv = (*RENDER[:2], "--for", "slurm", "--set", "corpus.command=[echo, é😀]", "--out", "jobs")
    cli(*argv)
    (script,) = (cli.folder / "jobs").glob("*corpus*")
    assert "é😀" in script.read_text(encoding="utf-8")
    assert "the same" in cli(*argv, "--check").stdout


def test_one_stage(cli: Cli) -> None:
    cli(*RENDER, "--out", "k", "--stage", "train")
    assert sorted(path.name for path in (cli.folder / "k").iterdir()) == ["00-driver.yaml", "02-train.yaml"]
    done = cli(*RENDER, "--stage", "nope", code=2)
    assert "no stage 'nope'" in done.stderr
    assert "corpus, train, evaluate, promote" in done.stderr


def test_to_standard_output(cli: Cli) -> None:
    text = cli(*RENDER, "--run-id", "mine").stdout
    objects = list(yaml.safe_load_all(text))
    assert objects == cli.json(*RENDER, "--run-id", "mine")["objects"]
    assert {found["metadata"]["labels"]["mlpipe.dev/run"] for found in objects} == {"mine"}
    assert cli.json(*RENDER)["run_id"].startswith("quickstart-")


def test_bad_input(cli: Cli) -> None:
    assert "add --out DIR" in cli(*RENDER, "--check", code=2).stderr
    assert "is no run id" in cli(*RENDER, "--run-id", "A B", code=2).stderr
    assert "'local' is not" in cli("render", "x", "--for", "local", code=2).stderr
    folder = cli(*RENDER[:4], "--set", "image=x", "--store", "./runs", code=2).stderr
    assert "is a folder that the pods do not share" in folder
    patch = "kubernetes.patches=[{target: {kind: Pod}, json: [{op: remove, path: /spec/no}]}]"
    done = cli(*RENDER, "--set", patch, code=2)
    assert "kubernetes.patches[0].json, Pod of stage corpus: /spec/no: there is no 'no'" in done.stderr
    idle = "kubernetes.patches=[{target: {kind: PodGroup}, strategic: {}}]"
    assert "fits no PodGroup" in cli(*RENDER, "--set", idle, code=2).stderr
    (cli.folder / "file").write_text("")
    for out in ("file", "file/below"):
        told = cli(*RENDER, "--out", out, code=2).stderr
        assert f"error: {out}: " in told
        assert "is a file" in told.split("hint: ")[1]


def test_an_error_of_the_lint_is_told_once(cli: Cli) -> None:
    done = cli(*RENDER, "--set", "kubernetes.shm=4 GiB", "--set", "image=r.example.com/x:1", code=2)
    for stage in ("corpus", "train", "evaluate"):
        assert done.stderr.count(f"stage {stage}: /dev/shm of 4.0 GiB counts as memory") == 1
    assert done.stderr.count("warning: image r.example.com/x:1 is a tag") == 1
