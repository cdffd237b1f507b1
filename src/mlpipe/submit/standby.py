"""Processes that have imported torch (`train/standby.py`), and of which launchers on this machine begin as
forks: of a run, the one that has measured the machine; of trials, one for each environment."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from mlpipe._core import environment
from mlpipe._core.processes import start_time
from mlpipe.submit.process import dies_with_us

_BEGIN_SECONDS = 60.0  # until it has imported torch, and forked
_ARGUMENTS_BYTES = 2_000  # room for those of a fork, where ps looks
_SAYS = struct.Struct("!ci")  # p: a pid, c: an exit code
_LAUNCHER = ["-P", "-m", "mlpipe.train.launcher"]


class Begun:
    """A launcher. Like a subprocess.Popen, as far as anybody asks one."""

    def __init__(self, pid: int, server: socket.socket) -> None:
        self.pid = pid
        self._server = server.dup()  # that of a standby may be closed before
        self._code: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Its exit code. It is that of SIGKILL where the process that it is a fork of is gone, and it, too,
        which was told to save."""
        with self._lock:
            if self._code is None and select.select([self._server], [], [], 0)[0]:
                said = b""
                with contextlib.suppress(OSError):
                    said = self._server.recv(_SAYS.size)
                if len(said) == _SAYS.size:
                    _, self._code = _SAYS.unpack(said)
                elif start_time(self.pid) is None:
                    self._code = -signal.SIGKILL
            return self._code


class Standby:
    """One, started in the environment `env`; it dies with the calling thread. `lock`: it measures this
    machine first, and what it says of it stands in `figures`; this file, released here, is held as long."""

    def __init__(self, env: Mapping[str, str], lock: int | None = None) -> None:
        self._env = dict(env)
        self._server, theirs = socket.socketpair()
        room = " " * _ARGUMENTS_BYTES
        argv = [sys.executable, "-P", "-m", "mlpipe.train.standby", "" if lock is None else str(lock), room]
        with theirs:
            self._process: subprocess.Popen[bytes] = subprocess.Popen(
                dies_with_us(argv, signal.SIGKILL),
                stdin=theirs.fileno(),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=self._env,
                start_new_session=True,
                pass_fds=() if lock is None else (lock,),
            )
        if lock is not None:
            os.close(lock)
        assert self._process.stdout is not None
        self._said = self._process.stdout
        self.figures = b""
        self._has_measured = False
        self._begun: Begun | None = None

    def has_measured(self, seconds: float = 0.0) -> bool:
        """Waits no longer than `seconds`."""
        deadline = time.monotonic() + seconds
        while not self._has_measured:
            if not select.select([self._said], [], [], max(0.0, deadline - time.monotonic()))[0]:
                break
            more = os.read(self._said.fileno(), 65_536)
            self.figures += more
            self._has_measured = not more
        return self._has_measured

    def fits(self, env: Mapping[str, str]) -> bool:
        """Whether one in this environment may begin now: it serves one at a time."""
        if self._process.poll() is not None or not environment.same_at_start(self._env, env):
            return False
        return self._begun is None or self._begun.poll() is not None

    def begin(
        self, argv: Sequence[str], *, env: Mapping[str, str], folder: str, output: Path
    ) -> Begun | None:
        """A launcher, as `process.spawn` would start it; None: it did not begin, and does not later. The one
        before it has ended."""
        asked = {"argv": list(argv), "env": dict(env), "folder": folder, "output": str(output)}
        try:
            self._server.settimeout(_BEGIN_SECONDS)
            self._server.sendall(json.dumps(asked).encode() + b"\n")
            if len(said := self._server.recv(_SAYS.size)) < _SAYS.size:
                raise ConnectionError
            what, pid = _SAYS.unpack(said)
            if what != b"p":  # it has ended before: whoever starts it anew says why
                return None
            self._server.sendall(b"\n")
        except OSError:
            self.close()
            return None
        self._begun = Begun(pid, self._server)
        return self._begun

    def close(self) -> None:
        """Ends it."""
        self._has_measured = True  # or never will have
        self._process.kill()
        self._process.wait()
        self._said.close()
        self._server.close()


class Standbys:
    """For launchers with one environment or another: those that are known, or also, `starts`, new ones."""

    def __init__(self, *known: Standby, starts: bool = False) -> None:
        self._known = list(known)
        self._starts = starts

    def find(self, argv: Sequence[str], env: Mapping[str, str]) -> Standby | None:
        """For this command; None: it is to be started as any other."""
        if list(argv[1:4]) != _LAUNCHER or environment.SUPERVISOR in env:
            return None
        for standby in self._known:
            if standby.fits(env):
                return standby
        if not self._starts:
            return None
        self._known.append(Standby(env))
        return self._known[-1]

    def close(self) -> None:
        for standby in self._known:
            standby.close()
