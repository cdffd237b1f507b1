"""How a profile that is asked for in the store reaches the ranks: the launcher of the first node looks for it
beside its work and leaves it in the scratch folder, where rank 0 looks; the trainer asks the store nothing.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from mlpipe._core.errors import MlpipeError
from mlpipe._core.files import write_whole
from mlpipe._core.serial import to_json
from mlpipe.store import profiles
from mlpipe.store.base import Store

_log = logging.getLogger(__name__)
PROFILE_FILE = "profile.json"
_LOOK_SECONDS = 2.0


class ProfileWatch:
    """A thread, so that a store that does not answer keeps nobody waiting."""

    def __init__(self, store: Store, attempt_key: str, scratch: Path) -> None:
        self._store = store
        self._attempt_key = attempt_key
        self._file = scratch / PROFILE_FILE
        self._over = threading.Event()
        threading.Thread(target=self._watch, name="profiles asked for", daemon=True).start()

    def close(self) -> None:
        """Nobody would hear any more."""
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            try:
                if self._file.exists():  # the one before was not begun yet
                    continue
                if (request := profiles.take(self._store, self._attempt_key)) is not None:
                    write_whole(self._file, to_json(request))
            except (MlpipeError, OSError) as error:
                _log.debug("whether a profile is asked for is not known: %s", error)
