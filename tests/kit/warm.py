"""Processes that begin as forks of one that has imported what they need.

Importing torch takes two CPU seconds a process and its compiler three more; a test of four ranks paid that
five times. `Popen` is a subprocess.Popen for `python -m MODULE ...` whose process is a fork of a server with
those imports: one server for each of KINDS and number of OpenMP threads (which OpenMP reads as it is loaded),
shared by all test processes of a session, and gone with it. The fork gets arguments, environment, folder,
streams and signals of a new process, in /proc as well. What differs: modules are there already, so what is
about imports or start-up wants a real process; and the parent is the server, which passes the status on.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import inspect
import json
import os
import pkgutil
import random
import runpy
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from kit.shortened import sitecustomize

TESTS = str(Path(__file__).parents[1])
_TRAIN = ("mlpipe.train.loop", "mlpipe.train.models.llama", "mlpipe.train.evaluate")
KINDS = {
    # `mlpipe` itself: no torch
    "cli": tuple(f"mlpipe.{layer}.*" for layer in ("cli", "submit", "observe", "render", "plan", "store")),
    # as `mlpipe.train.torchrun` before it forks its ranks, and what stands above it
    "torchrun": (
        "mlpipe.train.without_dynamo", "mlpipe.train.launcher", "torch.distributed.run", *_TRAIN,
    ),
    # with what it imports for ranks of FSDP before it forks them
    "sharded": (
        "mlpipe.train.without_dynamo", "mlpipe.train.launcher", "torch.distributed.run", *_TRAIN,
        "mlpipe.train.parallel.fully_shard",
    ),
    # ranks of any strategy, and a class of `transformers`: two seconds for each of four
    "ranks": (
        "torch._dynamo", "torch.distributed.fsdp", "transformers.models.llama.modeling_llama", *_TRAIN,
    ),
}  # fmt: skip
_START_SECONDS = 300.0
_PADDING = 16_384  # bytes that /proc/PID/cmdline and environ may show
_PR_SET_NAME = 15


@dataclass(frozen=True)
class _Asked:
    argv: tuple[str, ...]
    env: dict[str, str]
    folder: str
    new_session: bool


class Popen(subprocess.Popen[Any]):
    """For argv `[sys.executable, ("-u",) "-m", MODULE, ...]`, as a fork of the server of that kind."""

    def __init__(self, kind: str, args: Sequence[str], **options: Any) -> None:
        self._kind = kind
        self._server: socket.socket | None = None
        super().__init__(args, **options)

    def _execute_child(self, *given: Any) -> None:
        signature = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]
        call = signature.bind(self, *given).arguments
        assert call["preexec_fn"] is None, "nothing runs between the fork and the module"
        streams = [(call["p2cread"], 0), (call["c2pwrite"], 1), (call["errwrite"], 2)]
        fds = [own if own != -1 else inherited for own, inherited in streams]
        argv = tuple(map(os.fspath, call["args"]))
        env = dict(os.environ if call["env"] is None else call["env"])
        folder = os.path.abspath(call["cwd"] or ".")
        self._server = _connect(self._kind, env)
        body = json.dumps(asdict(_Asked(argv, env, folder, call["start_new_session"]))).encode()
        socket.send_fds(self._server, [struct.pack("!I", len(body))], fds)
        self._server.sendall(body)
        (self.pid,) = struct.unpack("!i", _receive(self._server, 4))
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(call[name] for name in pipes))  # type: ignore[attr-defined]

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        assert self._server is not None
        if wait_flags & os.WNOHANG and not select.select([self._server], [], [], 0)[0]:
            return 0, 0
        try:
            (status,) = struct.unpack("!i", _receive(self._server, 4))
        except ConnectionError:
            status = signal.SIGKILL  # with the server
        self._server.close()
        return self.pid, status

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        lock: threading.Lock = self._waitpid_lock  # type: ignore[attr-defined]
        if self.returncode is None and self._server is not None and lock.acquire(False):
            try:
                if self.returncode is None:
                    pid, status = self._try_wait(os.WNOHANG)
                    if pid:
                        self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                lock.release()
        return self.returncode


def _receive(server: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        if not (more := server.recv(count - len(data))):
            raise ConnectionError("the warm server is gone")
        data += more
    return data


# The server of a kind.


def _session() -> tuple[int, Path]:
    """The process that all test processes of this session belong to, and the folder of their servers."""
    pid = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return pid, Path(tempfile.gettempdir()) / f"mlpipe-warm-{pid}-{started}"


def _connect(kind: str, env: dict[str, str]) -> socket.socket:
    session, folder = _session()
    threads = env.get("OMP_NUM_THREADS", "") if kind != "cli" else ""
    path = folder / f"{kind}-{threads}"
    folder.mkdir(mode=0o700, exist_ok=True)
    with (folder / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            own = {
                name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "MLPIPE_"))
            }
            # NumPy's OpenBLAS starts its threads as it is imported
            paths = os.pathsep.join(filter(None, (TESTS, os.environ.get("PYTHONPATH"))))
            own |= {"PYTHONPATH": paths, "_PADDING": "x" * _PADDING, "OPENBLAS_NUM_THREADS": "1"}
            if threads:
                own["OMP_NUM_THREADS"] = threads
            with (folder / f"{path.name}.log").open("ab") as log:
                argv = [sys.executable, "-P", "-m", "kit.warm", kind, str(path), str(session), "x" * _PADDING]
                server = subprocess.Popen(
                    argv, env=own, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
            deadline = time.monotonic() + _START_SECONDS
            while not path.exists():
                if server.poll() is not None or time.monotonic() > deadline:
                    server.kill()
                    raise RuntimeError((folder / f"{path.name}.log").read_text()[-3000:])
                time.sleep(0.02)
            server.returncode = 0  # it outlives this test process, whose warning it need not be
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(path))
    return connection


def serve(kind: str, path: Path, session: int) -> None:
    """Until the process `session` has ended."""
    for name in KINDS[kind]:
        _import(name)
    gc.collect()
    gc.freeze()
    if len(os.listdir("/proc/self/task")) != 1:
        raise RuntimeError(f"a server of {kind} has threads, which a fork would not have")
    listener = socket.socket(socket.AF_UNIX)
    fresh = path.with_suffix(".new")
    listener.bind(str(fresh))
    listener.listen(128)
    ended = os.pidfd_open(session)
    reads, wakes = os.pipe()
    for end in (reads, wakes):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda signum, frame: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    fresh.rename(path)
    running: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        for one in (listener.fileno(), ended, reads):
            selector.register(one, selectors.EVENT_READ)
        while True:
            ready = {key.fd for key, _ in selector.select()}
            if ended in ready:
                break
            if reads in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(reads, 4096)
                _reap(running)
            if listener.fileno() in ready:
                connection, _ = listener.accept()
                with contextlib.suppress(ConnectionError):  # its test process was killed
                    pid = _fork(connection)
                    running[pid] = connection
    path.unlink()
    with contextlib.suppress(OSError):  # the last one
        for left in path.parent.glob("*"):
            if left.suffix == ".log" or left.name == "lock":
                left.unlink()
        path.parent.rmdir()


def _import(name: str) -> None:
    if name == "mlpipe.train.without_dynamo":
        importlib.import_module(name).install()
    elif name.endswith(".*"):
        package = importlib.import_module(name[:-2])
        for found in pkgutil.walk_packages(package.__path__, f"{name[:-2]}."):
            if not found.name.endswith((".__main__", ".child")):  # which are programs
                importlib.import_module(found.name)
    else:
        importlib.import_module(name)


def _reap(running: dict[int, socket.socket]) -> None:
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = found
            with running.pop(pid) as connection, contextlib.suppress(OSError):
                connection.sendall(struct.pack("!i", status))


def _fork(connection: socket.socket) -> int:
    header, fds, _, _ = socket.recv_fds(connection, 4, 3)
    if not header:
        raise ConnectionResetError
    asked = _Asked(**json.loads(_receive(connection, struct.unpack("!I", header)[0])))
    pid = os.fork()
    if pid == 0:
        try:
            become(asked, fds, connection)
        finally:
            os._exit(70)
    for fd in fds:
        os.close(fd)
    return pid


# In the fork.


def become(asked: _Asked, fds: Iterable[int], begun: socket.socket | None = None) -> NoReturn:
    """What the command would do in a new interpreter. `begun` is told the pid when all is set up."""
    _forget_signals()
    os.chdir(asked.folder)
    if asked.new_session:
        os.setsid()
    for own, fd in enumerate(fds):
        os.dup2(fd, own)
    _close_all_but(begun.fileno() if begun else -1)
    os.environ.clear()  # C's strings of the first environment lie where the new one is shown
    os.environ.update(asked.env)
    _show(asked)
    added = asked.env.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [asked.folder, *filter(None, added), *(one for one in sys.path if one != TESTS)]
    importlib.invalidate_caches()
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    at_once = "-u" in asked.argv[:2] or bool(asked.env.get("PYTHONUNBUFFERED"))
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, errors="backslashreplace")  # noqa: SIM115
    sys.stdout.reconfigure(write_through=at_once)
    sys.stderr.reconfigure(line_buffering=True, write_through=at_once)
    sys.argv = list(asked.argv[asked.argv.index("-m") + 1 :])
    subprocess.Popen = _Torchrun  # type: ignore[misc]
    sitecustomize.shorten()
    if begun:
        begun.sendall(struct.pack("!i", os.getpid()))
        begun.close()
    _run()


def _forget_signals() -> None:
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)
    for signum in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _close_all_but(kept: int) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != kept:
            with contextlib.suppress(OSError):
                os.close(int(name))


def _show(asked: _Asked) -> None:
    """As proc(5) says where the kernel looks: fields 48 to 51 of /proc/self/stat."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, b"python")
    places = list(map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:49]))
    variables = (f"{name}={value}" for name, value in asked.env.items())
    for (start, end), words in zip((places[:2], places[2:]), (asked.argv, variables), strict=True):
        text = "\0".join(words).encode()[: end - start - 1]
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def _run() -> NoReturn:
    code: object = 0
    try:
        with warnings.catch_warnings():
            # that a module is imported and run: a new interpreter would import it twice, too
            warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        code = 1
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code or 0)


class _Torchrun(subprocess.Popen[Any]):
    """In a fork, a subprocess.Popen whose torchrun is a fork of it: of the launcher, which has no thread yet.
    All else is a new program."""

    def _execute_child(self, *given: Any) -> None:
        execute = super()._execute_child  # type: ignore[misc]
        call = inspect.signature(execute).bind(*given).arguments
        argv = call["args"]
        if not isinstance(argv, list) or argv[:3] != [sys.executable, "-m", "mlpipe.train.torchrun"]:
            execute(*given)
            return
        if "torch" not in sys.modules or len(os.listdir("/proc/self/task")) > 1:
            execute(*given)
            return
        streams = [(call["p2cread"], 0), (call["c2pwrite"], 1), (call["errwrite"], 2)]
        fds = [own if own != -1 else inherited for own, inherited in streams]
        self.pid = os.fork()
        if self.pid == 0:
            try:
                if call["preexec_fn"]:
                    call["preexec_fn"]()
                env = dict(os.environ if call["env"] is None else call["env"])
                become(_Asked(tuple(argv), env, os.getcwd(), call["start_new_session"]), fds)
            finally:
                os._exit(70)
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(call[name] for name in pipes))  # type: ignore[attr-defined]


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
