"""Rules of a training on samples that differ in length, conversations or one's own, between `data` and other
keys."""

from __future__ import annotations

from collections.abc import Iterator

from mlpipe.spec.problems import Problem
from mlpipe.spec.tree import Node, get, items_of, problem_of_key, text_of

_BUCKET = "s3://"


def problems(train: Node) -> Iterator[Problem]:
    """Of a training that has some."""
    yield from _of_conversations(train) if get(train, "data", "chat") is not None else _of_own(train)
    packing = get(train, "data", "packing")
    if get(train, "model", "entry") is not None and text_of(packing) in ("best_fit", "balanced"):
        assert packing is not None
        yield Problem.at(
            packing.place,
            "only mlpipe's own models keep several samples of a row apart",
            "write packing: off, or leave it away",
        )
    compiled = get(train, "compile")
    if compiled is not None and text_of(compiled) in ("block", "model"):
        what = "conversations" if get(train, "data", "chat") is not None else "samples"
        yield problem_of_key(
            compiled, f"{what} differ in length, and each length would be compiled", "remove compile"
        )


def _of_conversations(train: Node) -> Iterator[Problem]:
    data = train.value["data"]
    mixed = [get(one, "path") for one in items_of(data, "chat")]
    for path in (get(data, "chat"), get(data, "validation"), *mixed):
        if path is not None and (text_of(path) or "").startswith(_BUCKET):
            yield Problem.at(
                path.place,
                "JSON lines are read from this machine's disk, not from a bucket",
                "fetch the file in a command stage, and write '{{stages.NAME.output}}/train.jsonl'",
            )
    no_folder = get(train, "model") is not None and get(train, "model", "pretrained") is None
    if no_folder and get(train, "data", "tokenizer") is None:
        yield problem_of_key(
            train.value["data"],
            "conversations are read with a tokenizer, and none is named",
            "add 'tokenizer: ...', the folder of a model or a tokenizer.json",
        )


def _of_own(train: Node) -> Iterator[Problem]:
    for key, fine, why in (
        ("collate", None, "samples are padded or packed by their lengths"),
        (
            "workers",
            0,
            "which samples a worker reads is decided by all of a step's lengths, in its own process",
        ),
        ("splits", 1, "packing needs a data set with [i], of which each sample has one length"),
    ):
        node = get(train, "data", key)
        if node is not None and node.value != fine:
            message = f"data.{key} does not go with data.packing: {why}"
            yield problem_of_key(node, message, "remove one of them")
