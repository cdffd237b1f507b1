"""Tells a person what a run does: a line a transition, what a stage waits for, and one live line (one every
ten seconds where none can be rewritten). Reads run.json and the records in the store, nothing else."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from mlpipe._core.printable import printable
from mlpipe._core.units import format_seconds

if TYPE_CHECKING:
    from mlpipe.observe.progress import Progress
    from mlpipe.observe.records import Follower
    from mlpipe.store.base import Store
    from mlpipe.store.runs import RunState, StageState

_PIPED_SECONDS = 10.0


class Terminal(Protocol):
    """Where a run tells how it goes; `submit.submission.Console` with a line that can be rewritten."""

    quiet: bool

    def note(self, text: str) -> None:
        """A line for a person who watches."""

    def complain(self, text: str) -> None:
        """A line that also a quiet call shows."""

    def live(self) -> bool:
        """Whether a line that rewrites itself is welcome."""

    def write(self, text: str) -> None:
        """As it stands."""


class Lines:
    """A Terminal of plain lines on standard error, as of a program or a notebook. `quiet`: none."""

    def __init__(self, *, quiet: bool) -> None:
        self.quiet = quiet

    def note(self, text: str) -> None:
        if not self.quiet:
            self.complain(text)

    def complain(self, text: str) -> None:
        self.write(f"{printable(text)}\n")

    def live(self) -> bool:
        return False

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError):  # nobody hears it, and a run goes on
            sys.stderr.write(text)
            sys.stderr.flush()


def in_words(stage: StageState, colour: Callable[[str], str] = str) -> str:
    """`done in 4.1s`, `failed after 3.0s: exited with code 1`. `colour`: of the state."""
    text = colour(stage.state)
    if stage.state == "running" and stage.attempt > 1:
        text += f", attempt {stage.attempt}"
    if stage.started is not None and stage.ended is not None:
        took = format_seconds(max(stage.ended - stage.started, 0.0))
        text += f" in {took}" if stage.state == "done" else f" after {took}"
    return f"{text}: {stage.message}" if stage.message else text


class Watcher:
    """Call `watch(state)` as often as you like; it reads the store at most once or twice a second. `only`:
    of that stage alone. `describe`: a stage in words."""

    def __init__(
        self,
        terminal: Terminal,
        store: Store,
        state: RunState,
        only: str | None = None,
        describe: Callable[[StageState], str] = in_words,
    ) -> None:
        self._terminal = terminal
        self._store = store
        self._only = only
        self._describe = describe
        self._seen = {name: (stage.state, "") for name, stage in state.stages.items()}
        self._width = max((len(name) for name in state.stages), default=0)
        self._read_seconds = 0.5 if store.local_path("runs") is not None else 2.0
        self._tails: dict[str, tuple[Follower, Progress]] = {}
        self._read_at = self._printed_at = 0.0
        self._line_open = False

    def watch(self, state: RunState) -> None:
        if self._terminal.quiet:
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
                self._say(name, self._describe(stage))

    def close(self) -> None:
        """Leave the live line behind."""
        if self._line_open:
            self._terminal.write("\n")
            self._line_open = False

    def note(self, text: str) -> None:
        if self._line_open:
            self._terminal.write("\r\x1b[K")
            self._line_open = False
        self._terminal.note(text)

    def _say(self, name: str, text: str) -> None:
        self.note(f"{name.ljust(self._width)}  {text}")

    def _read(self, state: RunState) -> None:
        from mlpipe._core.records import Start
        from mlpipe.observe.progress import Progress, start_line
        from mlpipe.observe.records import Follower

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
        import shutil  # which loads compressors

        from mlpipe.observe.progress import live_line

        width = shutil.get_terminal_size().columns - self._width - 3
        return f"{name.ljust(self._width)}  {live_line(progress.summary(), width=max(width, 40))}"

    def _show(self, line: str, now: float) -> None:
        if self._terminal.live():
            self._terminal.write(f"\r\x1b[K{line}")
            self._line_open = True
        elif now - self._printed_at >= _PIPED_SECONDS:
            self._printed_at = now
            self._terminal.note(line)
