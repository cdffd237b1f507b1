"""A pipeline's file in Python."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlpipe.spec.model import Pipeline

Overrides = Mapping[str, Any] | Sequence[str]


@dataclass(frozen=True)
class LoadedPipeline:
    """A pipeline's file as it was read, with what is changed for this run. `text`: of the file, before
    `overrides`. `spec`: the pipeline that both make, typed, with all defaults."""

    path: str
    text: str = field(repr=False)
    overrides: tuple[str, ...]
    spec: Pipeline = field(repr=False)

    @property
    def name(self) -> str:
        """Of the pipeline, with which the ids of its runs begin."""
        return self.spec.name

    @property
    def stages(self) -> list[str]:
        """Their names, in the order of the file."""
        return [stage.name for stage in self.spec.stages]

    def override(self, overrides: Overrides) -> LoadedPipeline:
        """The same file with more changes. Raises SpecError."""
        from mlpipe.spec.load import load_pipeline_text

        changed = (*self.overrides, *as_overrides(overrides))
        spec = load_pipeline_text(self.text, self.path, overrides=changed)
        return LoadedPipeline(self.path, self.text, changed, spec)

    def smoke(
        self, *, ranks: int | None = None, steps: int | None = None, tiny: bool = False
    ) -> LoadedPipeline:
        """For a test of all stages in seconds, by the same code: on `ranks` workers of this machine, for
        `steps` steps of each training; `tiny`: with the smallest shapes and data. Nothing is registered.
        Raises SpecError."""
        from mlpipe.spec.smoke import Smoke, overrides
        from mlpipe.submit.process_executor import gpu_ids

        return self.override(overrides(self.spec, Smoke(ranks, steps, tiny), num_gpus=len(gpu_ids())))


def load(path: str | Path, overrides: Overrides = ()) -> LoadedPipeline:
    """Reads a pipeline's file. `overrides`: as `--set` takes them, `{"train.steps": 200}` or
    `["train.steps=200"]`; a value of None removes its key. Raises SpecError, which names every mistake at
    once."""
    from mlpipe.spec.load import read_pipeline

    changes = as_overrides(overrides)
    text, spec = read_pipeline(path, overrides=changes)
    return LoadedPipeline(str(path), text, changes, spec)


def as_overrides(overrides: Overrides) -> tuple[str, ...]:
    """As `KEY=VALUE`, in the order of `side_by_side`."""
    from mlpipe.spec.overrides import side_by_side

    if isinstance(overrides, str):
        return (overrides,)
    if not isinstance(overrides, Mapping):
        return side_by_side(tuple(overrides))
    return side_by_side([f"{key}={json.dumps(value)}" for key, value in overrides.items()])
