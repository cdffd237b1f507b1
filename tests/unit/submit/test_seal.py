"""Others write into a store: what they change there commands nobody who knows better, and is told by its key.
On a laptop as real processes, on a cluster against a stand-in API server."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from kit.command_runs import Cli, shell, write_spec

from mlpipe._core.errors import SubmitError
from mlpipe._core.files import state_folder
from mlpipe.cli.session import CliSession
from mlpipe.spec.load import load_pipeline
from mlpipe.store import known, runs
from mlpipe.store.folder import FolderStore
from mlpipe.submit import adopt, planning, seal
from mlpipe.submit.kubernetes import KubernetesBackend
from mlpipe.submit.submission import Submission

pytestmark = pytest.mark.unit
IMAGE = "registry.example.com/team/mlpipe@sha256:" + "0" * 64


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """With a run `r` that failed."""
    cli = Cli(tmp_path)
    write_spec(tmp_path, {"a": shell("echo first >> ran; test -e go")})
    cli("run", "pipeline.yaml", "--run-id", "r", "--set", "stages.a.env={WHO: me}", code=3)
    return cli


def rewrite(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_a_rewritten_pipeline_is_not_resumed(cli: Cli):
    """The attack: a stage of another's, with the keys to the store, rewrites ours."""
    rewrite(cli.store / "runs/r/pipeline.yaml", "echo first", "echo stolen")
    said = cli("resume", "r", code=2).stderr
    assert "pipeline.yaml (stages.a.command)" in said
    assert "--trust-store" in said
    stored = json.loads((cli.store / "runs/r/run.json").read_text())
    assert stored["stages"]["a"]["attempt"] == 1
    again = ["submit", "pipeline.yaml", "--run-id", "r", "--set", "stages.a.env={WHO: me}"]
    assert "another pipeline: stages.a.command" in cli(*again, code=2).stderr  # as a repeated build does
    # on a machine that knows nothing of the run, its own digest speaks
    cli.env["XDG_STATE_HOME"] = str(cli.folder / "elsewhere")
    assert "spec_digest in run.json" in cli("resume", "r", code=2).stderr
    assert (cli.folder / "ran").read_text() == "first\n"
    cli("resume", "r", "--trust-store", code=3)  # whoever means it
    assert (cli.folder / "ran").read_text() == "first\nstolen\n"
    cli("resume", "r", code=3)  # and has said so once


def test_rewritten_overrides_backend_and_folder_are_refused(cli: Cli):
    path = cli.store / "runs/r/run.json"
    text = path.read_text()
    for old, new, said in (
        ("{WHO: me}", "{LD_PRELOAD: x}", "set in run.json"),
        ('"backend": "local"', '"backend": "kubernetes"', "backend in run.json"),
        (f'"folder": "{cli.folder}"', '"folder": "/tmp"', "folder in run.json"),
        ('"stages": [', '"local": {"context": "production"}, "stages": [', "local in run.json"),
        ('"a": {', '"b": {', "the stages of a run keep their names"),
    ):
        rewrite(path, old, new)
        assert said in cli("resume", "r", code=2).stderr
        path.write_text(text)
    assert (cli.folder / "ran").read_text() == "first\n"


def test_who_resumes_with_other_settings_vouches_for_them(cli: Cli):
    cli("resume", "r", "--set", "stages.a.env={WHO: other}", code=3)
    cli("resume", "r", code=3)
    elsewhere = str(cli.folder / "elsewhere")
    here, cli.env["XDG_STATE_HOME"] = cli.env["XDG_STATE_HOME"], elsewhere
    said = cli("resume", "r", "--set", "stages.a.env={WHO: third}", code=3).stderr
    assert "was not submitted from this machine" in said
    cli.env["XDG_STATE_HOME"] = here  # which has seen nothing of that
    assert "WHO: third" in cli("resume", "r", code=2).stderr
    (cli.folder / "go").touch()
    cli("resume", "r", "--trust-store")


def cluster_run(folder: Path) -> tuple[FolderStore, seal.Seal]:
    spec = write_spec(folder, {"a": ["true"]})
    document = json.loads(spec.read_text())
    document |= {"image": IMAGE}
    spec.write_text(json.dumps(document))
    store, overrides = FolderStore(folder / "store"), ("stages.a.env={A: b}",)
    pipeline = load_pipeline(str(spec), overrides=overrides)
    backend = KubernetesBackend({"context": "c", "namespace": "n"})
    backend.check = lambda *_, **__: None  # there is no cluster
    submission = Submission(
        str(spec), spec.read_text(), overrides, pipeline, store.url, str(folder), run_id="r"
    )
    adopt.create(store, backend, submission, CliSession())
    return store, seal.of_submission(submission, backend)


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("pipeline.yaml", '"true"', '"false"', "pipeline.yaml"),
        ("run.json", "{A: b}", "{A: c}", "set in run.json"),
        ("run.json", '"backend": "kubernetes"', '"backend": "local"', "backend in run.json"),
    ],
)
def test_a_driver_on_a_cluster_drives_what_its_own_object_says(tmp_path, name, old, new, said):
    store, asked = cluster_run(tmp_path)
    digests = asked.digests()
    assert seal.verified(store, runs.read_run(store, "r"), digests=digests).digests() == digests
    rewrite(tmp_path / "store/runs/r" / name, old, new)
    # also where the attacker has made run.json agree
    run = runs.read_run(store, "r")
    runs.update_run(store, "r", lambda run: replace(run, spec_digest=seal.read(store, run).load("r").digest))
    with pytest.raises(SubmitError, match=said) as refused:
        seal.verified(store, run, digests=digests)
    assert refused.value.kind == "input"


def test_a_plan_of_a_stage_that_runs_is_not_believed(tmp_path):
    store, asked = cluster_run(tmp_path)
    plan = planning.planner(store, "r", asked.load("r"), KubernetesBackend({}).hardware, fetch=False)("a", 1)
    text = plan.to_json()
    key = f"{plan.attempt_key}/plan.json"
    store.put(key, text.encode())
    seal.check_plan(store, plan)
    for changed, said in (
        (text.replace('"true"', '"false"'), r"command\.argv"),
        (text.replace('"nproc_per_node": 1', '"nproc_per_node": true'), r"launch\.nproc_per_node"),
        ("{", "it is none"),
        ("[]", "it is none"),
    ):
        assert changed != text
        store.put(key, changed.encode())
        with pytest.raises(SubmitError, match=said) as refused:
            seal.check_plan(store, plan)
        assert refused.value.kind == "input"
    # of another version: whether its gang is ours, the cluster knows; nothing of it is used
    store.put(key, text.replace(plan.to_plain()["code_digest"], "another").encode())
    seal.check_plan(store, plan)


def test_a_machine_that_cannot_remember_works_without(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    known.keep_seal("s3://bucket/team", "r", "{}")
    assert known.read_seal("s3://bucket/team", "r") is None
    assert known.stores() == []
    monkeypatch.setenv("XDG_STATE_HOME", "relative")  # which does not count
    assert state_folder().is_absolute()
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # of a user who is a number
    assert state_folder().is_absolute()
