"""A backend that runs each stage under `setsid` in a folder of its queue, as a batch system would."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mlpipe._core import environment
from mlpipe.observe.logs import Line, LogFile, Reader
from mlpipe.plan.plan import Plan
from mlpipe.store.base import Store
from mlpipe.store.outcome import read_outcome
from mlpipe.store.runs import RunState
from mlpipe.submit import process
from mlpipe.submit.backend import Backend
from mlpipe.submit.executor import Ended, Slots
from mlpipe.submit.handle import ThreadedHandle, ended_by
from mlpipe.submit.here import stage_command
from mlpipe.submit.submission import Finding, Option


class ToyBackend(Backend):
    name = "toy"
    options = (Option("--queue", "FOLDER", "Where its stages run.", required=True),)

    def executor(self, store: Store, run: RunState, holder: str) -> Queue:
        return Queue(store, Path(self.place["queue"]), holder)

    def logs(
        self, store: Store, *, stage: str | None = None, rank: int | None = None, after: float | None = None
    ) -> Reader:
        return QueueLogs(store, stage, rank, after, queue=Path(self.place["queue"]))

    def doctor(self, store: Iterable[Finding]) -> Iterator[Finding]:
        path = shutil.which("setsid")
        remedy = None if path else "apt-get install util-linux"
        yield Finding("setsid", "ok" if path else "fail", path or "not installed", remedy)
        yield from store


class QueueLogs(Reader):
    """What the queue keeps, once a stage has ended."""

    def __init__(self, *wanted: Any, queue: Path) -> None:
        super().__init__(*wanted)
        self._queue = queue

    def read(self, run: RunState, *, rest: bool = False) -> list[tuple[LogFile, list[Line]]]:
        return [
            (LogFile(str(path), stage, state.attempt, None, stamped=False, several=False), lines)
            for stage, state in run.stages.items()
            if (path := self._queue / f"{run.run_id}-{stage}-{state.attempt}" / "log").exists()
            if (lines := [Line(0.0, b"the queue: " + text) for text in path.read_bytes().splitlines(True)])
        ]


class Queue:
    def __init__(self, store: Store, folder: Path, holder: str) -> None:
        self._store, self._folder, self._holder = store, folder, holder

    def capacity(self) -> Slots:
        return Slots(cpus=2, gpus=0)

    def check(self, plan: Plan) -> None:
        """It takes any."""

    def start(self, plan: Plan, scratch: Path) -> Job:
        folder = self._folder / f"{plan.run_id}-{plan.stage}-{plan.attempt}"
        return Job(self._store, plan, folder.absolute(), self._holder)


class Job(ThreadedHandle):
    """The stage's process ships its own logs, and leaves in the store how it ended."""

    def __init__(self, store: Store, plan: Plan, folder: Path, holder: str) -> None:
        super().__init__(store, plan)
        folder.mkdir(parents=True)
        (folder / "plan.json").write_text(plan.to_json())
        argv, env = stage_command(plan, folder)
        env = {**os.environ, **env, environment.DRIVER: holder}  # how orphans are found
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(["setsid", *argv], env=env, stdout=log, stderr=log)
        self._thread.start()

    def terminate(self) -> None:
        super().terminate()
        process.send([self._process.pid], signal.SIGTERM)

    def kill(self) -> None:
        super().kill()
        process.send([-self._process.pid], signal.SIGKILL)

    def _work(self) -> Ended:
        code = self._process.wait()
        outcome = read_outcome(self._store, f"{self._plan.attempt_key}/outcome.json")
        if outcome is not None:
            return ended_by(outcome)
        if self._stopping:
            return Ended("cancelled", "killed", exit_code=code)
        return Ended("failed", f"ended with {code}", kind="infrastructure", exit_code=code)
