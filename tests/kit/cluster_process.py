"""Processes of the test cluster, the namespaces they live in, and waits that say what they wait for.

Every process asks the kernel to be killed with the thread that started it (PDEATHSIG): start them from a
thread that lives as long as they should.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TypeVar

from kit.command_runs import until
from kit.processes import children
from kit.servers import die_with_parent

T = TypeVar("T")
_STOP_SECONDS = 10
_HOLDER_SECONDS = 20
_CLONE_NEWNET = 0x40000000
# for processes in the cluster's network, where no proxy of the machine is to be reached
NO_PROXY = {"NO_PROXY": "*", "no_proxy": "*"}
# A quarter of an API server's CPU time as it starts is Go's collector, which memory spares, up to a limit.
_GO = {"GOGC": "400", "GOMEMLIMIT": "1GiB"}


class ClusterError(Exception):
    """What did not happen, with the end of the log of whatever should have done it."""


class Process:
    """One daemon with its log. `pid` is the daemon's own, also where a forking `prefix` stands before it."""

    def __init__(
        self, name: str, command: Sequence[object], log: Path, *, env: Mapping[str, str] | None = None
    ) -> None:
        self.name, self.log = name, log
        self._command = [str(word) for word in command]
        self._env = {**os.environ, **NO_PROXY, **_GO, **(env or {})}
        self._popen: subprocess.Popen[bytes] | None = None

    def start(self) -> Process:
        with self.log.open("ab") as output:
            self._popen = subprocess.Popen(
                self._command,
                env=self._env,
                cwd=self.log.parent,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the shell in front
                preexec_fn=die_with_parent,
            )
        return self

    @property
    def pid(self) -> int:
        assert self._popen is not None
        below = children(self._popen.pid) if self._command[1].startswith("--pid=") else []
        return below[0] if below else self._popen.pid

    @property
    def running(self) -> bool:
        return self._popen is not None and self._popen.poll() is None

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        if self._popen is None:
            return
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, how)
        try:
            self._popen.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._popen.wait(_STOP_SECONDS)

    def tail(self, num_bytes: int = 2000) -> str:
        text = self.log.read_bytes()[-num_bytes:].decode(errors="replace") if self.log.exists() else ""
        return f"{self.name}{'' if self.running else ' (ended)'}, {self.log}:\n{text}"


def wait_until(
    what: str,
    check: Callable[[], T | None],
    seconds: float,
    watched: Iterable[Process] = (),
    explain: Callable[[], str] | None = None,
) -> T:
    """The first true answer of `check`. Raises ClusterError as soon as one of the `watched` ended, and as
    `until` does with what `explain`, or they, last said."""
    watched = list(watched)

    def answer() -> T | None:
        found = check()
        if not found and (ended := [process for process in watched if not process.running]):
            raise ClusterError(f"while waiting for {what}: {ended[0].tail()}")
        return found

    return until(answer, what, seconds, explain or (lambda: "\n".join(one.tail() for one in watched)))


class Namespaces:
    """New network, mount and process namespaces, held by a shell that is their init: with it, everything in
    them dies, containers that have left their parents included. `script`: run in them as root before anything
    else."""

    def __init__(self, script: str) -> None:
        command = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        # the shell's wait also reaps the orphans
        held = f"{script}\necho ready\nsleep infinity & wait"
        self._popen = subprocess.Popen(
            [*command, "--propagation", "private", "sh", "-euc", held],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        assert self._popen.stdout is not None
        said = _read_until_ready(self._popen.stdout)
        if not said.endswith("ready\n"):
            self.close()
            raise ClusterError(f"namespaces of their own could not be made (root is needed):\n{said}")
        self.pid = children(self._popen.pid)[0]

    def network(self, command: Sequence[object]) -> list[str]:
        """The command, in the network namespace only; its process id is the started one's."""
        return ["nsenter", f"--net=/proc/{self.pid}/ns/net", "--", *map(str, command)]

    def all(self, command: Sequence[object]) -> list[str]:
        """The command, as a child in all three."""
        return [
            "nsenter",
            f"--pid=/proc/{self.pid}/ns/pid",
            f"--mount=/proc/{self.pid}/ns/mnt",
            *self.network(command)[1:],
        ]

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """The calling thread, and threads and processes started from it meanwhile, in the network
        namespace."""
        own = f"/proc/{threading.get_native_id()}/ns/net"
        with open(own, "rb", 0) as outer, open(f"/proc/{self.pid}/ns/net", "rb", 0) as inner:
            _setns(inner)
            try:
                yield
            finally:
                _setns(outer)

    def close(self) -> None:
        self._popen.kill()  # unshare's --kill-child takes the init along
        self._popen.wait(_STOP_SECONDS)


def _read_until_ready(pipe: IO[bytes]) -> str:
    said = b""
    deadline = time.monotonic() + _HOLDER_SECONDS
    while (
        not said.endswith(b"ready\n")
        and select.select([pipe], [], [], max(0, deadline - time.monotonic()))[0]
    ):
        chunk = os.read(pipe.fileno(), 4096)
        if not chunk:
            break
        said += chunk
    return said.decode(errors="replace")


def _setns(namespace: IO[bytes]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace.fileno(), _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
