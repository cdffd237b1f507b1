"""Data that are not there are told with their line before anything starts, where this machine reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mlpipe.cli.app import app
from mlpipe.cli.session import CliSession
from mlpipe.spec.load import load_pipeline_text
from mlpipe.spec.places import RunPlace
from mlpipe.spec.problems import SpecErrors
from mlpipe.submit import backends
from mlpipe.submit.backend import Backend
from mlpipe.submit.data_there import check_data
from mlpipe.submit.places import ask
from mlpipe.submit.submission import Submission

pytestmark = pytest.mark.unit

MODEL = {"entry": "mine:model"}


def submission(folder: Path, data: dict[str, Any], *overrides: str, **stage: Any) -> Submission:
    train = {"model": MODEL, "data": data, "steps": 2}
    body = [{"name": "a", "command": ["true"]}, {"name": "train", "train": train, **stage}]
    text = json.dumps({"version": 1, "name": "p", "stages": body}, indent=1)
    pipeline = load_pipeline_text(text, "p.yaml", overrides=overrides)
    return Submission("p.yaml", text, overrides, pipeline, "store", str(folder))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("tokens/manifest.json", "files/a.parquet", "talk.jsonl", "half/train.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    return tmp_path


BATCH = {"batch_size": 4}
WORDS = {"tokenizer": "talk.jsonl", **BATCH}


@pytest.mark.parametrize(
    ("data", "missing"),
    [
        ({"parquet": "files"} | BATCH, []),
        ({"parquet": "files/*.parquet"} | BATCH, []),
        ({"parquet": "s3://bucket/x", "validation": "files/b.parquet"} | BATCH, ["files/b.parquet"]),
        ({"parquet": "files/*.csv"} | BATCH, ["files/*.csv"]),
        ({"tars": "tars/{{run.id}}"} | BATCH, []),
        ({"chat": "talk.jsonl", "template": "chatml"} | WORDS, []),
        ({"chat": "walk.jsonl"} | WORDS | {"tokenizer": "none"}, ["walk.jsonl", "none"]),
        ({"chat": [{"path": "talk.jsonl"}, {"path": "walk.jsonl"}]} | WORDS, ["walk.jsonl"]),
        ({"mix": [{"tokens": "tokens"}, {"tokens": "half"}, {"parquet": "none"}]} | BATCH, ["half", "none"]),
        ({"entry": "mine:points", "args": {"path": "none"}} | BATCH, []),
    ],
)
def test_each_source_that_is_not_there_has_its_line(folder, data, missing):
    model = 'train.model={"entry": "mine:model", "seq_len": 8}'
    asked = submission(folder, data, model)
    if not missing:
        check_data(asked)
        return
    with pytest.raises(SpecErrors) as caught:
        check_data(asked)
    lines = asked.text.split("\n")
    assert len(caught.value.problems) == len(missing)
    for problem, path in zip(caught.value.problems, missing, strict=True):
        assert path in problem.message
        assert lines[problem.line - 1][problem.col - 1 :].startswith(f'"{path}"')


def test_what_a_stage_before_it_may_write_and_another_stage_are_not_looked_for(folder):
    data = {"parquet": "none"} | BATCH
    check_data(submission(folder, data, needs=["a"]))
    asked = submission(folder, data)
    check_data(Submission(**{**vars(asked), "stage": "a"}))
    with pytest.raises(SpecErrors, match=r"--set train\.data\.parquet=other: there is no other"):
        check_data(submission(folder, data, "train.data.parquet=other"))


def test_run_and_submit_refuse_what_this_machine_would_train(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("MLPIPE_CALIBRATE", "off")
    model = {"preset": "llama-1m", "seq_len": 64, "vocab_size": 512}
    train = {"model": model, "data": {"tokens": "half", "batch_size": 4}, "steps": 2}
    body = {"version": 1, "name": "p", "stages": [{"name": "train", "train": train}]}
    (folder / "p.yaml").write_text(json.dumps(body))

    def said(*arguments: str) -> Any:
        return CliRunner().invoke(app, [*arguments], obj=CliSession()).exception

    for verb in (("run",), ("submit",), ("submit", "--dry-run")):
        assert "p.yaml:1:" in str(said(verb[0], "p.yaml", *verb[1:]))
    assert not (folder / "runs").exists()
    assert said("plan", "p.yaml") is None


class Place(Backend):
    name = "place"

    def executor(self, *_: Any) -> Any:
        raise NotImplementedError


class Elsewhere(Place):
    trains_elsewhere = True


def test_of_several_places_only_those_that_would_read_it_here_lack_it(folder, monkeypatch):
    (folder / "mine.py").write_text("def model(): ...")
    for kind in (Place, Elsewhere):
        monkeypatch.setitem(backends.TABLE, kind.__name__, f"{__name__}:{kind.__name__}")
    places = [RunPlace.model_validate({"name": n.lower(), "backend": n}) for n in ("Place", "Elsewhere")]
    here, elsewhere = ask(places, submission(folder, {"parquet": "none"} | BATCH))
    assert here.cannot is not None
    assert here.cannot.endswith(": there is no none")
    assert elsewhere.cannot is None
