"""`mlpipe data preview`: what is printed, and what only a run knows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlpipe.cli.app import run_app
from mlpipe.train.data.tokenizer import MIN_VOCAB_SIZE, train_tokenizer

pytestmark = pytest.mark.unit
SPEC = """
version: 1
name: tune
stages:
  - name: corpus
    command: [mlpipe-corpus, --out, "{{output}}"]
  - name: tune
    needs: [corpus]
    train:
      model: {preset: llama-1m, seq_len: 64, vocab_size: 512}
      data: {chat: data.jsonl, tokenizer: "{{stages.corpus.output}}", batch_size: 2}
      steps: 1
"""


def test_a_sample_is_shown_and_no_terminal_obeys_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLPIPE_CACHE", str(tmp_path / "cache"))
    Path("tune.yaml").write_text(SPEC)
    Path("data.jsonl").write_text(json.dumps({"prompt": "a\n", "completion": "\x1b[2Jé"}) + "\n")
    train_tokenizer([], MIN_VOCAB_SIZE).save("tokenizer.json")
    argv = ["data", "preview", "tune.yaml"]
    with pytest.raises(SystemExit, match="2"):
        run_app(argv)
    where = "stages.tune.train.data.tokenizer"
    told = capsys.readouterr().err
    assert f"{where}: {{{{stages.corpus.output}}}} is known in a run only" in told
    assert f"--set {where}=PATH" in told
    with pytest.raises(SystemExit, match="0"):
        run_app([*argv, "--set", f"{where}=tokenizer.json"])
    assert "a\n»\\x1b[2Jé<|endoftext|>«" in capsys.readouterr().out
    mixed = "[{path: none.jsonl, weight: 2}, {path: data.jsonl}]"
    Path("tune.yaml").write_text(SPEC.replace("chat: data.jsonl", f"chat: {mixed}"))
    argv += ["--set", f"{where}=tokenizer.json", "--file"]
    with pytest.raises(SystemExit, match="0"):
        run_app([*argv, "1"])
    assert "a\n»\\x1b[2Jé<|endoftext|>«" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        run_app([*argv, "2"])
    assert "there are files 0 to 1" in capsys.readouterr().err
