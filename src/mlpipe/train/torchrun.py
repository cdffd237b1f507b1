"""`python -m mlpipe.train.torchrun ARGUMENTS OF TORCHRUN`: torchrun, whose ranks are forked.

torchrun by itself starts every rank as a new interpreter that imports torch, two CPU seconds each, after its
own import and again at every restart. Here a rank begins as a fork of multiprocessing's fork server, which is
itself a fork of this process, made as it has imported `mlpipe.train.preload` and before it has threads,
connections or a device. All else is torchrun's: arguments, agent, rendezvous, environment, logs, restarts.

On a node other than the first it begins when the first one listens at the rendezvous: torchrun gives up on
a name that does not resolve after a minute, and images are pulled at uneven speed.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NoReturn

from mlpipe.plan.gang_node import GangNode
from mlpipe.train import debugger, without_dynamo
from mlpipe.train.as_program import run_as_program
from mlpipe.train.stop import die_with_parent

RENDEZVOUS_SECONDS = 900.0
_FORK_SECONDS = 60.0
_POLL_SECONDS = 0.1
_PR_SET_NAME = 15


def main(argv: list[str]) -> int:
    without_dynamo.install()
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    from mlpipe.train import preload  # noqa: F401

    gc.freeze()  # so that collections in a rank do not write to, and so copy, what it shares
    _start_fork_server()
    _fork_in(subprocess_handler)
    node = GangNode.from_environment()
    _number_nodes(node.index)
    _count_rounds()
    _name_callers()
    if node.index and not _first_node_listens(node.rendezvous):
        words = f"node 0 did not listen at {node.rendezvous} within {RENDEZVOUS_SECONDS:.0f} s"
        print(f"{words}; is its pod running? `mlpipe status` says why it is not")  # noqa: T201
        return 1
    run.main(argv)
    return 0


def _fork_in(subprocess_handler: ModuleType) -> None:
    """Ranks of torchrun's handlers are forks from now on."""
    handler = subprocess_handler.SubprocessHandler
    close = handler.close

    def close_if_there(self: object, death_sig: signal.Signals | None = None) -> None:
        # The fork server has buried a rank a moment before it says so: poll() is None, its group is gone.
        with contextlib.suppress(ProcessLookupError):
            close(self, death_sig)

    subprocess_handler.Popen, handler.close = Forked, close_if_there  # type: ignore[attr-defined]


def _number_nodes(index: int) -> None:
    """This one has that index. torchrun numbers nodes by their names, of which 10 comes before 2, and ranks
    that exchange most would not be neighbours. What makes a node's description unique begins with it."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous as rendezvous

    node = rendezvous._NodeDesc
    rendezvous.DynamicRendezvousHandler._node_desc_generator._local_id = index << 32
    node.__lt__ = lambda one, other: one.local_id < other.local_id  # type: ignore[assignment,method-assign]


def _count_rounds() -> None:
    """As restarts, which are the same on all nodes then. torchrun counts those of its own node, and not one
    that it owes to another node's: after a rank dies, a node that hears of it before its own rank fails, as
    where one was cut off for long, would be a restart behind, and its ranks wait for the others by another
    name."""
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    start = LocalElasticAgent._start_workers

    def counted(self: Any, group: Any) -> dict[int, Any]:
        left = self._remaining_restarts
        self._remaining_restarts = group.spec.max_restarts - group.spec.rdzv_handler._state_holder.state.round
        try:
            return start(self, group)
        finally:
            self._remaining_restarts = left

    LocalElasticAgent._start_workers = counted  # type: ignore[method-assign]


def _name_callers() -> None:
    """Records of a rendezvous have the name of a function on the stack. inspect.stack() looks for the source
    of every frame, a dozen times: half a CPU second of a start."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous as rendezvous

    rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name


def _start_fork_server() -> None:
    """By a fork, in place of the interpreter that multiprocessing would start, and does if this one dies."""
    torchrun, spawn = os.getpid(), util.spawnv_passfds

    def fork(path: bytes, argv: list[str], fds: list[int]) -> int:
        pid = os.fork()
        if pid == 0:
            try:
                die_with_parent(torchrun)
                util.spawnv_passfds = spawn
                exec(argv[-1])  # of `python -c`, multiprocessing's own
            finally:
                os._exit(1)
        return pid

    multiprocessing.set_forkserver_preload(["mlpipe.train.preload"])
    resource_tracker.ensure_running()
    util.spawnv_passfds = fork  # type: ignore[assignment]
    try:
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = spawn


def _start(process: multiprocessing.process.BaseProcess) -> None:
    """A fork server that was killed a moment ago may still be there, and hears nothing: another one will."""
    deadline = time.monotonic() + _FORK_SECONDS
    while True:
        try:
            return process.start()
        except (EOFError, ConnectionError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


class Forked:
    """What torchrun uses of a subprocess.Popen, for `args`: python -u -m MODULE ARGUMENTS."""

    def __init__(
        self, args: tuple[str, ...], env: dict[str, str], stdout: IO[str], stderr: IO[str], **_: object
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        begun, begins = context.Pipe(duplex=False)
        self._args = args
        self._process = context.Process(target=rank, args=(args, env, stdout.name, stderr.name, begins))
        _start(self._process)
        begins.close()
        if not begun.poll(_FORK_SECONDS):  # until it leads the session to which signals are sent
            self._process.kill()
            raise TimeoutError(f"rank {env['RANK']} did not begin within {_FORK_SECONDS:.0f} s of its fork")
        begun.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(self._args, timeout or 0.0)
        return code


def rank(
    args: tuple[str, ...], env: dict[str, str], stdout: str, stderr: str, begins: Connection
) -> NoReturn:
    """In the fork: what `args` would do as a command."""
    die_with_parent(os.getppid())
    os.setsid()
    begins.close()
    os.environ.update(env)
    multiprocessing.set_start_method(None, force=True)  # open, as in a new interpreter
    _set_title(f"rank {env['RANK']}", args)
    for path, stream in ((stdout, sys.stdout), (stderr, sys.stderr)):
        with open(path, "a") as file:
            os.dup2(file.fileno(), stream.fileno())
    if (lent := debugger.terminal_of(int(env["RANK"]))) is not None:
        print(f"the rest goes to {lent[0]} (--debug-rank)", flush=True)  # noqa: T201
        debugger.take(*lent)
    sys.argv = list(args[args.index("-m") + 1 :])

    def program() -> None:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)

    # The clean-up would wait for threads that wait for ranks that are gone.
    run_as_program(program, clean_up=False)


def _set_title(name: str, args: tuple[str, ...]) -> None:
    """What ps, top and py-spy show instead of torchrun's name and command line, whose memory has the room
    (proc(5): arg_start and arg_end in /proc/self/stat)."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    text = "\0".join(args).encode()[: end - start - 1]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def _first_node_listens(endpoint: str) -> bool:
    host, _, port = endpoint.rpartition(":")
    deadline = time.monotonic() + RENDEZVOUS_SECONDS
    while not _listens(host, int(port)):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _listens(host: str, port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection((host, port), timeout=5.0).close()
        return True
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
