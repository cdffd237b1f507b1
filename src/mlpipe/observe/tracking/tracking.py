"""A tracker behind a bounded queue and a thread of its own: a step only puts its record into a list.

A tracker that is away is tried again until the training ends, by the one policy of retries; meanwhile records
wait, and when too many do, new ones are dropped and counted. What a process that was killed left untold is
read from the training's own records by the one that goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from mlpipe._core.errors import MlpipeError, StoreError
from mlpipe._core.records import End, Record, Start, Step, Tracked
from mlpipe._core.retry import FIRST_PAUSE_SECONDS, AwayError, Tries
from mlpipe.observe.tracking.tracker import Tracker

_log = logging.getLogger(__name__)
T = TypeVar("T")
FLUSH_SECONDS = 2.0
MAX_WAITING = 10_000  # records: some 10 MB, a quarter of an hour of quick steps
_BATCH = 100
_UNTIL_WARNED_SECONDS = 10.0
_LATER_SECONDS = 2.0  # the first pause of each further round
# At the end the training waits for so long for all trackers together; less for one that is away, and on a
# signal to stop.
END_SECONDS, HASTY_SECONDS = 20.0, 5.0


class Ending:
    """Of a training, for all its trackers: they tell the rest side by side."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.outcome = ""
        self.began = 0.0

    def begin(self, outcome: str) -> None:
        """The first one counts."""
        if not self.event.is_set():
            self.outcome, self.began = outcome, time.monotonic()
            self.event.set()


class Tracking:
    """A callback of rank 0. `history(first, last)`: records of earlier processes of these steps. `write`:
    takes a record, `beat()` is called while the end waits; both in the training's own thread. `ending`: the
    trackers of a training share one."""

    def __init__(
        self,
        tracker: Tracker,
        history: Callable[[int, int], Sequence[Record]],
        write: Callable[[Record], object],
        beat: Callable[[], None],
        ending: Ending | None = None,
    ) -> None:
        self._tracker = tracker
        self._history = history
        self._write = write
        self._beat = beat
        self._waiting: deque[Record] = deque()  # appended to by one thread, taken from by the other
        self._news: deque[Record] = deque()  # for the store
        self._ending = ending or Ending()
        self._has_begun = False
        self._is_away = self._has_warned = self._is_off = False
        self.num_dropped = 0
        self._thread: threading.Thread | None = None

    def on_start(self, start: Start) -> None:
        """Begins in the background."""
        name = f"tracker {self._tracker.name}"
        self._thread = threading.Thread(target=self._run, args=(start,), name=name, daemon=True)
        self._thread.start()

    def on_step(self, record: Record) -> None:
        """To be told soon; never waits."""
        if self._news:
            self._write(self._news.popleft())
        if self._is_off:
            return
        if len(self._waiting) >= MAX_WAITING:
            self.num_dropped += 1
        else:
            self._waiting.append(record)

    on_validation = on_checkpoint = on_step

    def on_end(self, end: End) -> None:
        """Waits until all is told, for a while."""
        if self._thread is None:
            return
        self._ending.begin(end.outcome or "failed")
        hasty = self._is_away or self._ending.outcome == "saved"
        deadline = self._ending.began + (HASTY_SECONDS if hasty else END_SECONDS)
        while self._thread.is_alive() and time.monotonic() < deadline:
            self._beat()
            self._thread.join(0.2)
        while self._news:
            self._write(self._news.popleft())
        if self._thread.is_alive():
            _log.warning(
                "%s at %s has not heard of %d records, the end among them; mlpipe has them all",
                self._tracker.name, self._tracker.where, len(self._waiting) + self.num_dropped + 1,
            )  # fmt: skip
        elif self.num_dropped:
            _log.warning("%s was away for so long that %d records were dropped; mlpipe has them all",
                self._tracker.name, self.num_dropped)  # fmt: skip

    def _run(self, start: Start) -> None:
        self._unless_refused(lambda: self._follow(start))
        if self._has_begun:  # also one that refused what it was told: its run ends as well
            self._ending.event.wait()
            self._unless_refused(lambda: self._patiently(lambda: self._tracker.end(self._ending.outcome)))

    def _follow(self, start: Start) -> None:
        self._begin(start)
        while not self._ending.event.wait(FLUSH_SECONDS):
            self._tell(self._waiting, self._whole_steps())
        self._tell(self._waiting, len(self._waiting))

    def _unless_refused(self, call: Callable[[], None]) -> None:
        try:
            call()
        except MlpipeError as error:
            self._give_up(str(error))
        except Exception as error:  # of a tracker's own package, or ours: no reason to end a training
            self._give_up(f"{type(error).__name__}: {error}")

    def _begin(self, start: Start) -> None:
        known = self._patiently(lambda: self._tracker.begin(start))
        self._has_begun = True
        self._news.append(Tracked(tracker=self._tracker.name, url=self._tracker.url))
        if (at := start.start_step or 0) > known:
            missing = self._patiently(lambda: self._history(known + 1, at))
            self._tell(deque(missing), len(missing))

    def _whole_steps(self) -> int:
        """How many wait, but for the last step and what follows it. After a kill only the last step that was
        told is known: its validation must have been told with it."""
        for count in range(len(self._waiting) - 1, -1, -1):
            if isinstance(self._waiting[count], Step):
                return count
        return 0

    def _tell(self, records: deque[Record], count: int) -> None:
        """The first ones, in batches that end where a step's do."""
        while count:
            batch: list[Record] = []
            while count and (len(batch) < _BATCH or not isinstance(records[0], Step)):
                batch.append(records.popleft())
                count -= 1
            self._patiently(partial(self._tracker.log, batch))

    def _patiently(self, call: Callable[[], T]) -> T:
        """Until it is through: nobody waits for this thread for ever, and it ends with its process."""
        while True:
            first = _LATER_SECONDS if self._has_warned else FIRST_PAUSE_SECONDS
            tries = Tries(_UNTIL_WARNED_SECONDS, first_pause_seconds=first)
            while True:
                try:
                    answer = call()
                    self._is_away = False
                    return answer
                except (AwayError, StoreError) as error:
                    error = error if isinstance(error, AwayError) else AwayError(error.message, applied=False)
                    self._is_away = True
                    if tries.again(error):
                        continue
                    if not self._has_warned:
                        self._has_warned = True
                        _log.warning(
                            "%s at %s is away (%s); the training goes on without it, and it is tried again",
                            self._tracker.name, self._tracker.where, error,
                        )  # fmt: skip
                    break

    def _give_up(self, why: str) -> None:
        if self._is_off:  # it was said
            return
        self._is_off = True
        self._waiting.clear()
        _log.warning("%s is off; the training goes on without it: %s", self._tracker.name, why)
