"""The key of a stage that runs a program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from mlpipe.spec import fields as f
from mlpipe.spec.part import SpecPart
from mlpipe.spec.tree import Node

if TYPE_CHECKING:
    from mlpipe.spec.smoke import Smoke

_TINY_CORPUS = "256 KiB"
Command = Annotated[tuple[f.Text, ...], Field(min_length=1, strict=False)]


def _texts(command: Node) -> Iterator[Node]:
    return (leaf for _, leaf in command.walk())


def _smoke(argv: Sequence[str], smoke: Smoke, num_workers: int) -> dict[str, Any]:
    """Of our own program, which takes the last of two; what another does nobody knows."""
    if not smoke.tiny or PurePath(argv[0]).name != "mlpipe-corpus":
        return {}
    return {"": [*argv, "--max-bytes", _TINY_CORPUS, "--vocab-size", "512"]}


PART = SpecPart(
    Command, "Program and arguments; no shell. `{{output}}` is its folder.", texts=_texts, smoke=_smoke
)
