"""Its keys in the pipeline file."""

from collections.abc import Iterator

from pydantic import Field

from mlpipe.spec import fields as f
from mlpipe.spec.base import SpecModel
from mlpipe.spec.part import Reference, SpecPart
from mlpipe.spec.problems import Problem
from mlpipe.spec.tree import Node, get


class Count(SpecModel):
    """Count the words of a file."""

    command: f.Name | None = Field(None, description="Whose output it reads. Default: the one it needs.")
    file: f.Text = Field(description="In the folder of the stage before.")
    at_least: int = Field(1, description="Fewer fail the run.")


def problems(stage: Node) -> Iterator[Problem]:
    node = get(stage, "count", "at_least")
    if node is not None and isinstance(node.value, int) and node.value < 1:
        yield Problem.at(node.place, f"a text has no {node.value} words", "write 1 or more")


PART = SpecPart(Count, "Count words.", references=(Reference("command"),), problems=problems)
