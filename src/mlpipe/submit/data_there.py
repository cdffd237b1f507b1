"""Data that a training on this machine reads, looked for before anything starts: its ranks would say so after
the seconds that they take to begin. What a bucket, a `{{placeholder}}` or a stage before it brings is not
looked for."""

from __future__ import annotations

from collections.abc import Iterator
from glob import has_magic, iglob
from pathlib import Path

from mlpipe.spec import overrides as override_rules
from mlpipe.spec.placeholders import names
from mlpipe.spec.problems import Problem, SpecErrors
from mlpipe.spec.tree import Node, get, items_of, parse, text_of
from mlpipe.submit.submission import Submission

_FILES = ("parquet", "tars", "chat", "path", "validation", "tokenizer")


def check_data(submission: Submission) -> None:
    """Of trainings that need no other stage. Raises SpecErrors, one for each that is not there."""
    root, _ = parse(submission.text, submission.spec)
    if root is None:
        return
    for override in submission.overrides:
        override_rules.apply(root, override)
    problems: list[Problem] = []
    for stage in items_of(root, "stages"):
        data = get(stage, "train", "data")
        if data is not None and not items_of(stage, "needs") and submission.stage in (None, _name(stage)):
            for source in (data, *items_of(data, "mix"), *items_of(data, "chat")):
                problems += _problems(source, submission.folder)
    if problems:
        raise SpecErrors(problems)


def _name(stage: Node) -> str | None:
    return text_of(get(stage, "name"))


def _problems(source: Node, folder: str) -> Iterator[Problem]:
    if (tokens := _path(source, "tokens")) and not Path(folder, tokens, "manifest.json").is_file():
        yield Problem.at(
            source.value["tokens"].place,
            f"there are no tokens in {tokens}, which has no manifest.json",
            "make them with mlpipe-corpus --out DIR",
        )
    for key in _FILES:
        if (path := _path(source, key)) and not _exists(folder, path):
            yield Problem.at(source.value[key].place, f"there is no {path}", f"name what data.{key} reads")


def _path(source: Node, key: str) -> str | None:
    """None: there is none, or it is not looked for."""
    text = text_of(get(source, key))
    return None if text is None or "://" in text or names(text) else text


def _exists(folder: str, path: str) -> bool:
    if Path(folder, path).exists():
        return True
    return has_magic(path) and any(True for _ in iglob(path, root_dir=folder, recursive=True))
