"""A run is found by its id in any store that this machine has used; where it is in none, that is said."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kit.command_runs import Cli, shell, write_spec

pytestmark = pytest.mark.unit


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """With a run `r` in the store that its pipeline file names, and nothing that names it any more."""
    cli = Cli(tmp_path)
    del cli.env["MLPIPE_STORE"]
    write_spec(tmp_path, {"a": shell("echo hello")})
    cli("run", "pipeline.yaml", "--run-id", "r", "--store", "elsewhere")
    return cli


def test_a_run_is_found_where_it_is(cli: Cli):
    elsewhere = str(cli.folder / "elsewhere")
    said = cli("status", "r")
    assert f"run r is in {elsewhere}" in said.stderr
    assert "done" in said.stdout
    assert "hello" in cli("logs", "r").stdout
    assert elsewhere in cli("report", "r").stdout
    for name, begins in {"r.HTML": "<!", "r.MD": "#", "r.Xml": "<?xml"}.items():
        cli("report", "r", "--out", name)
        assert (cli.folder / name).read_text().startswith(begins)
    for name in ("r.pdf", "r"):
        assert "end it in .html or .md or .xml" in cli("report", "r", "--out", name, code=2).stderr
        assert not (cli.folder / name).exists()
    assert "done" in cli("cancel", "r").stdout
    assert "--store" in cli("status", "r", "--store", "here", code=2).stderr  # which names one, and no other
    assert cli.json("list")["runs"] == []


def test_a_run_that_is_nowhere(cli: Cli):
    gone = "s3://gone/team"
    cli.env |= {
        "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "MLPIPE_STORE_DEADLINE_SECONDS": "1",
    }
    cli("status", "q", "--store", gone, code=4)
    (used,) = (cli.folder / "state/mlpipe/stores").glob("*/url")
    for name in ("another", "yet-another"):
        used.parent.with_name(name).mkdir()
        (used.parent.with_name(name) / "url").write_text(gone)  # as of a day when it was there
    for number in range(4):  # used before
        older = used.parent.with_name(f"older-{number}") / "url"
        older.parent.mkdir()
        older.write_text(str(cli.folder / older.parent.name))
        os.utime(older, (number, number))
    said = cli("status", "q", code=2).stderr
    assert "there is no run q" in said
    assert "older-2 either, nor in 2 more;" in said
    assert f"not in {cli.folder / 'elsewhere'}" in said
    assert f"{gone} and 1 more could not be asked" in said
    for verb in ("cancel", "report"):
        assert "there is no run q" in cli(verb, "--ignore-not-found", "q").stdout
        cli(verb, "--ignore-not-found", "q", "--store", "ftp://x", code=2)  # not found is another matter
    half = cli.folder / "runs/runs/q"
    half.mkdir(parents=True)
    (half / "pipeline.yaml").touch()  # claimed, if no more
    assert cli("cancel", "--ignore-not-found", "q", code=None).stdout.count("there is no run") == 0


def test_a_run_id_in_several_stores_is_not_guessed(cli: Cli):
    """But found where one store has several names; what is shown to go on with it names its store."""
    (cli.folder / "link").symlink_to("elsewhere")
    for spelling in ("deep/../elsewhere", "link"):
        cli("status", "r", "--store", spelling)
    cli("status", "r")
    write_spec(cli.folder, {"a": shell("exit 1")})
    cli("run", "pipeline.yaml", "--run-id", "r", "--store", "third", code=3)
    said = cli("cancel", "r", code=2).stderr
    assert "several stores have a run r" in said
    assert said.count(str(cli.folder)) == 2
    resume = f"go on with: mlpipe resume r --store {cli.folder / 'third'}\n"
    assert resume in cli("cancel", "r", "--store", "deep/../third").stdout
    assert "did you mean r? " in cli("cancel", "rr", "--store", "third", code=2).stderr


def test_a_name_with_an_end_of_line_is_shown_in_one(cli: Cli):
    odd = "else\nwhere"
    cli("run", "pipeline.yaml", "--run-id", "q", "--store", odd)
    assert r"/else\nwhere" in cli("status", "q").stderr
    assert r"/else\nwhere either" in cli("status", "p", code=2).stderr
    assert r"/else\nwhere: there is no run p" in cli("status", "p", "--store", odd, code=2).stderr
    cli("run", "pipeline.yaml", "--run-id", "q", "--store", "third")
    assert r"/else\nwhere" in cli("status", "q", code=2).stderr


def test_the_store_of_a_pipeline_for_scripts(cli: Cli):
    spec = ["validate", "--print-store", "pipeline.yaml"]
    assert cli(*spec).stdout == f"{cli.folder / 'runs'}\n"
    assert cli(*spec, "--set", "store=s3://bucket/team/").stdout == "s3://bucket/team\n"
    assert cli(*spec, "--set", "store=s3://bucket/team", "--store", "x").stdout == f"{cli.folder / 'x'}\n"
    assert cli(*spec, "--set", "nonsense=1", code=2).stdout == ""
