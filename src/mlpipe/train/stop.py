"""How a worker learns that it should stop, and whether that means "save first" or "leave now".

- The launcher asks for a graceful stop by making the file `stop` in the scratch folder; the loop looks at
  it at each step boundary and the ranks agree there.
- torchrun sends SIGTERM in two cases that look the same: it was told to stop itself (save), or a peer of
  ours died and it clears the field for a restart (leave: the next collective would never end). Peers of
  this node are told alive or dead by their pids.
- A second SIGTERM means at once.

Python runs signal handlers only between byte codes of the main thread, which may sit in a collective for
ever. So a thread reads the wakeup pipe and can end the process from there.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from pathlib import Path

from mlpipe.train import debugger
from mlpipe.train.rank_process import RankProcess

STOP_FILE = "stop"
_POLL_SECONDS = 0.2
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int, death_signal: signal.Signals = signal.SIGKILL) -> None:
    """`death_signal` when `parent_pid`, our parent, dies; the end if it is dead already. Without it, workers
    outlive a killed torchrun and go on computing for nobody."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, death_signal)
    if os.getppid() != parent_pid:
        os._exit(1)  # it died before we could ask to die with it


class Stop:
    """Must be made in the main thread."""

    def __init__(self, scratch: Path, process: RankProcess) -> None:
        self.scratch = scratch
        self._file = scratch / STOP_FILE
        self._terminated = threading.Event()
        self.begun = threading.Event()  # there is something that a checkpoint has not
        self._peers = [
            _pid_file(scratch, process.restart, peer)
            for peer in range(process.local_world_size)
            if peer != process.local_rank
        ]
        own = _pid_file(scratch, process.restart, process.local_rank)
        own.write_text(f"{os.getpid()} {process.rank}")
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda signum, frame: None)
        # Ctrl-C is the driver's to interpret.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        threading.Thread(target=self._listen, args=(read_end,), name="signals", daemon=True).start()

    def requested(self) -> bool:
        return self._terminated.is_set() or self._file.exists()

    def leave_until_begun(self) -> None:
        """Until `begun` is set a stop means "leave now": there is nothing to save, and a peer that is gone, a
        download or a compiler would be waited for."""

        def watch() -> None:
            while not self.begun.wait(_POLL_SECONDS):
                if self.requested():
                    _leave_at_once()

        threading.Thread(target=watch, name="before the work began", daemon=True).start()

    def _listen(self, read_end: int) -> None:
        while data := os.read(read_end, 64):
            for signum in data:
                if signum != signal.SIGTERM:
                    continue
                if self._terminated.is_set() or self._a_peer_died():
                    _leave_at_once()
                self._terminated.set()
                threading.Thread(target=self._leave_with_peers, name="peers", daemon=True).start()

    def _leave_with_peers(self) -> None:
        while not self._a_peer_died():
            time.sleep(_POLL_SECONDS)
        _leave_at_once()

    def _a_peer_died(self) -> bool:
        return any(_died(path) for path in self._peers)


def _leave_at_once() -> None:
    try:
        debugger.give_back()
    finally:
        os._exit(128 + signal.SIGTERM)


def _died(pid_file: Path) -> bool:
    """A peer that has not yet written its pid is starting, not dead; one that has ended well removed it."""
    return _state(pid_file) in ("Z", "X")


def _state(pid_file: Path) -> str:
    """Of the process, as proc(5) names it: Z or X dead (X also: gone), T stopped; "" if it is not known."""
    try:
        return state_of(int(pid_file.read_text().split()[0]))
    except FileNotFoundError:
        return "X" if pid_file.exists() else ""
    except (OSError, LookupError, ValueError):
        return ""


def state_of(pid: int) -> str:
    """Of a process, as proc(5) names it. Raises FileNotFoundError for one that is gone."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def any_alive(scratch: Path) -> bool:
    """Whether a worker of this node that has come as far as its Stop still runs."""
    return not all(_died(path) for path in scratch.glob("pid-*"))


def ranks(scratch: Path, *, stopped: bool = False) -> dict[int, int]:
    """Ranks of this node that have come as far as their Stop, and their pids; `stopped`: only those that a
    signal or a debugger has stopped."""
    pids = {}
    for path in scratch.glob("pid-*"):
        with contextlib.suppress(OSError, ValueError):  # it ends, or is about to write
            if not stopped or _state(path) in ("T", "t"):
                pid, rank = map(int, path.read_text().split())
                pids[rank] = pid
    return pids


def leave(scratch: Path, *, local_rank: int, restart: int) -> None:
    """To be called by a worker that ends as it should, so that its peers do not take it for dead."""
    _pid_file(scratch, restart, local_rank).unlink(missing_ok=True)


def _pid_file(scratch: Path, restart: int, local_rank: int) -> Path:
    """Holds `<pid> <global rank>`."""
    return scratch / f"pid-{restart}-{local_rank}"
