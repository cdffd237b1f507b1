"""The key of a stage that runs a program."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from mlpipe.spec import fields as f
from mlpipe.spec.part import SpecPart
from mlpipe.spec.tree import Node

Command = Annotated[tuple[f.Text, ...], Field(min_length=1, strict=False)]


def _texts(command: Node) -> Iterator[Node]:
    return (leaf for _, leaf in command.walk())


PART = SpecPart(Command, "Program and arguments; no shell. `{{output}}` is its folder.", texts=_texts)
