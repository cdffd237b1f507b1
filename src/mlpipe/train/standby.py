"""`python -m mlpipe.train.standby LOCK`: imports torch, and stands by for launchers of this machine, which
begin as its forks. Their torchrun is a fork of the launcher: torch is imported once for all three, and once
for all trials of `mlpipe tune`. Who starts it, and asks on standard input: `submit/standby.py`.

It holds no device and no connection. With a LOCK, an open file, it first measures this machine
(`measure.py`) in a fork of its own, which says the figures on standard output; the next launcher ends that.

    we hear    a line of JSON: argv, env, folder, output        then a byte: begin
    we say     p and the launcher's pid, as it is ready         c and its exit code, as it has ended
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from functools import partial

from mlpipe.train import forked, without_dynamo
from mlpipe.train.as_program import run_as_program
from mlpipe.train.stop import die_with_parent

_IDLE_SECONDS = 900.0  # for a launcher to be asked for


def serve(lock: str) -> int:
    started_in = dict(os.environ)
    without_dynamo.install()
    from mlpipe.train import measure

    child = None
    if lock:
        child = _fork(measure.main)
        os.close(int(lock))
    os.dup2(2, 1)  # whoever reads the figures waits for their end
    for module in ("torch.distributed.run", "mlpipe.train.torchrun", "mlpipe.train.launcher"):
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # so that collections in a fork do not write to, and so copy, what it shares
    forked.remember(started_in)
    server = socket.socket(fileno=0)
    server.settimeout(_IDLE_SECONDS)
    while line := _line(server):
        asked = json.loads(line)
        if child is not None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        child = _fork(partial(_launch, server, **asked))
        ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # its pid is not given to another yet
        assert ended is not None
        code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        server.sendall(struct.pack("!ci", b"c", code))
    return 0


def _line(server: socket.socket) -> bytes:
    """Empty where nobody asks any more."""
    line = b""
    while not line.endswith(b"\n"):
        try:
            more = server.recv(65_536)
        except TimeoutError:
            return b""
        if not more:
            return b""
        line += more
    return line


def _fork(program: Callable[[], object]) -> int:
    server = os.getpid()
    pid = os.fork()
    if pid == 0:
        die_with_parent(server)
        run_as_program(program)
    return pid


def _launch(server: socket.socket, argv: Sequence[str], env: dict[str, str], folder: str, output: str) -> int:
    die_with_parent(os.getppid(), signal.SIGTERM)  # then a launcher saves
    os.setsid()
    os.chdir(folder)
    out = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    server.sendall(struct.pack("!ci", b"p", os.getpid()))
    if not server.recv(1):  # nobody waits any more
        return 1
    server.detach()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    importlib.invalidate_caches()
    forked.take(argv, env)
    from mlpipe.train import launcher

    return launcher.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1]))
