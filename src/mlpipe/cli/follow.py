"""Tells a person what a run does: a line a transition, what a stage waits for, and one live line (one every
ten seconds when standard error is no terminal). Reads run.json and the records in the store, nothing else."""

from __future__ import annotations

import shutil
import time
from typing import TYPE_CHECKING

import click

from mlpipe._core.records import Start
from mlpipe.cli.outcome import describe
from mlpipe.cli.session import Session
from mlpipe.observe.progress import Progress, live_line, start_line
from mlpipe.observe.records import Follower

if TYPE_CHECKING:
    from mlpipe.store.base import Store
    from mlpipe.store.runs import RunState

_PIPED_SECONDS = 10.0


class Watcher:
    """Call `watch(state)` as often as you like; it reads the store at most once or twice a second. `only`:
    of that stage alone."""

    def __init__(self, session: Session, store: Store, state: RunState, only: str | None = None) -> None:
        self._session = session
        self._store = store
        self._only = only
        self._seen = {name: (stage.state, "") for name, stage in state.stages.items()}
        self._width = max((len(name) for name in state.stages), default=0)
        self._read_seconds = 0.5 if store.local_path("runs") is not None else 2.0
        self._tails: dict[str, tuple[Follower, Progress]] = {}
        self._read_at = self._printed_at = 0.0
        self._line_open = False

    def watch(self, state: RunState) -> None:
        if self._session.quiet:
            return
        self._read(state)
        for name, stage in state.stages.items():
            if self._only not in (None, name):
                continue
            former, self._seen[name] = self._seen[name], (stage.state, stage.message)
            # one that runs tells what it waits for, and when that changes
            if stage.state != former[0] or (
                stage.state == "running" and stage.message not in ("", former[1])
            ):
                self._say(name, describe(stage))

    def close(self) -> None:
        """Leave the live line behind."""
        if self._line_open:
            click.echo(err=True)
            self._line_open = False

    def note(self, text: str) -> None:
        if self._line_open:
            click.echo("\r\x1b[K", nl=False, err=True)
            self._line_open = False
        self._session.note(text)

    def _say(self, name: str, text: str) -> None:
        self.note(f"{name.ljust(self._width)}  {text}")

    def _read(self, state: RunState) -> None:
        now = time.monotonic()
        if now - self._read_at < self._read_seconds:
            return
        self._read_at = now
        line = ""
        for name, stage in state.stages.items():
            if stage.state != "running" or self._only not in (None, name):
                continue
            key = state.attempt_key(name)
            tail, progress = self._tails.setdefault(key, (Follower(self._store, key), Progress()))
            for record in tail.poll():
                progress.add(record)
                if isinstance(record, Start):
                    for text in (start_line(record), *record.notes):
                        self._say(name, text)
            if progress.summary()["last_step_time"] is not None:
                line = self._line(name, progress)
        if line:
            self._show(line, now)

    def _line(self, name: str, progress: Progress) -> str:
        width = shutil.get_terminal_size().columns - self._width - 3
        return f"{name.ljust(self._width)}  {live_line(progress.summary(), width=max(width, 40))}"

    def _show(self, line: str, now: float) -> None:
        if self._session.live():
            click.echo(f"\r\x1b[K{line}", nl=False, err=True, color=True)
            self._line_open = True
        elif now - self._printed_at >= _PIPED_SECONDS:
            self._printed_at = now
            self._session.note(line)
