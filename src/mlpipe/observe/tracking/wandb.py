"""Weights & Biases, by its own package (the extra `wandb`). Offline, it writes what `wandb sync` sends."""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mlpipe._core.errors import MlpipeError
from mlpipe._core.records import Record, Save, Start, Step
from mlpipe._core.retry import AwayError
from mlpipe.observe.tracking.tracker import TrackedRun, scalars

# For what is left at the end, also in its hook at the end of the process; less than tracking.END_SECONDS.
_FINISH_SECONDS = 15.0


class Wandb:
    """`settings`: `project`, `entity`, `mode`. `folder`: where its files go."""

    name = "wandb"

    def __init__(self, settings: Mapping[str, Any], run: TrackedRun, folder: Path) -> None:
        self._settings = settings
        self._run = run
        self._folder = folder
        self._wandb_run: Any = None
        self._known = 0
        self.where = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
        self.url: str | None = None

    def begin(self, start: Start) -> int:
        """Takes the run up again, if it is there."""
        wandb: Any = importlib.import_module("wandb")
        run = self._run
        self._folder.mkdir(parents=True, exist_ok=True)
        self._wandb_run = self._init(
            wandb,
            project=self._settings.get("project") or run.pipeline,
            entity=self._settings.get("entity"),
            id=hashlib.sha256(f"{run.store_url}/{run.stage_key}".encode()).hexdigest()[:16],
            name=f"{run.run_id}/{run.stage}",
            mode=self._settings.get("mode") or "online",
            resume="allow",
            config={"mlpipe": {"pipeline": run.config, "plan": run.decided, "run_id": run.run_id}},
            dir=str(self._folder),
            settings=wandb.Settings(
                console="off", silent=True, x_disable_stats=True, finish_timeout=_FINISH_SECONDS
            ),
        )
        self.url = self._wandb_run.url if self._settings.get("mode") != "offline" else None
        at = start.start_step or 0
        # offline nobody says what it has: the process before told all up to its checkpoint, but for seconds
        self._known = max(int(self._wandb_run.step) - 1, 0) if self.url else at
        if start.resumed_from:
            self._wandb_run.summary["resumed_from"] = start.resumed_from
        return self._known

    def _init(self, wandb: Any, **given: Any) -> Any:
        """Raises AwayError if W&B cannot be reached; whom it does not know it will not know later either."""
        try:
            return wandb.init(**given)
        except wandb.errors.AuthenticationError:
            raise
        except wandb.errors.CommError as error:
            wandb.teardown()  # its service takes the run's id for in use
            raise AwayError(str(error).partition("\n")[0][:300], applied=True) from None

    def log(self, records: Sequence[Record]) -> None:
        """A row a record; W&B takes only steps behind those that it has."""
        for record in records:
            step = getattr(record, "step", None) or 0
            if isinstance(record, Step) and step <= self._known:
                continue
            if isinstance(record, Save) and record.error is None and record.key:
                self._wandb_run.summary["checkpoint"] = record.key
            row: dict[str, Any] = dict(scalars(record))
            if sample := getattr(record, "sample", None):
                row["sample"] = sample
            if row:  # a checkpoint of some steps ago stands in the row of today
                self._known = max(self._known, step)
                self._wandb_run.log(row, step=self._known)

    def end(self, outcome: str) -> None:
        """Sends the rest."""
        self._wandb_run.finish(exit_code=0 if outcome != "failed" else 1)


def check_installed() -> None:
    """Raises MlpipeError (input)."""
    if find_spec("wandb") is None:
        hint = "pip install 'mlpipe[wandb]' where the training runs, or take it out of `track`"
        raise MlpipeError("the package wandb is not installed", where="track: wandb", hint=hint, kind="input")
