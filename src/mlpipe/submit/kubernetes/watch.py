"""What a thread keeps of a cluster: all objects of one kind with some labels. It lists them, then watches.

A watch ends for many reasons: its time is over, the server restarted, the network dropped it, its version
grew too old (410), the token expired. All have one remedy: to list and watch anew, with the credentials of
that moment. Since it ends every few minutes in any case, a change that it missed is found by then, too; and
where no watch gets through at all, this is a poll.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping

from mlpipe._core.errors import SubmitError
from mlpipe.submit.kubernetes.api import ClusterApi, Object

_PAUSE_SECONDS = 5.0  # between the beginnings of two lists: where no watch gets through


class Watched:
    """Starts at once. `changed` is set whenever there is news. `error`: why the last list failed, None once
    one has succeeded again; what is known meanwhile stays."""

    def __init__(
        self, api: ClusterApi, kind: str, labels: Mapping[str, str], changed: threading.Event
    ) -> None:
        self.error: SubmitError | None = None
        self._api, self._kind, self._labels, self._changed = api, kind, labels, changed
        self._objects: dict[str, Object] | None = None  # replaced, never changed: others read it
        self._closed = threading.Event()
        self._end: Callable[[], None] | None = None
        threading.Thread(target=self._run, name=f"watch {kind}", daemon=True).start()

    def objects(self) -> list[Object] | None:
        """By name; None before the first list."""
        objects = self._objects
        return None if objects is None else [objects[name] for name in sorted(objects)]

    def close(self) -> None:
        """Ends its thread and its connection."""
        self._closed.set()
        self._shutdown()

    def _run(self) -> None:
        while not self._closed.is_set():
            began = time.monotonic()
            try:
                self._follow()
            except SubmitError as error:
                self.error = error
            except Exception as error:
                self.error = SubmitError(f"{type(error).__name__}: {error}", kind="bug")
            self._changed.set()
            self._closed.wait(began + _PAUSE_SECONDS - time.monotonic())

    def _follow(self) -> None:
        listed, version = self._api.snapshot(self._kind, self._labels)
        self._keep({one["metadata"]["name"]: one for one in listed})
        self.error = None
        for what, changed in self._api.watch(self._kind, self._labels, version, self._opened):
            name = changed["metadata"]["name"]
            others = {key: value for key, value in (self._objects or {}).items() if key != name}
            self._keep(others if what == "DELETED" else {**others, name: changed})

    def _opened(self, end: Callable[[], None]) -> None:
        self._end = end
        if self._closed.is_set():  # meanwhile
            self._shutdown()

    def _shutdown(self) -> None:
        if self._end is not None:
            with contextlib.suppress(OSError, RuntimeError, ValueError):  # it has ended already
                self._end()

    def _keep(self, objects: dict[str, Object]) -> None:
        self._objects = objects
        self._changed.set()
