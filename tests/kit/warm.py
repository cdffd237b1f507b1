"""Processes that begin as forks of one that has imported what they need.

Importing torch takes two CPU seconds a process and its compiler three more; a test of four ranks paid that
five times. `Popen` is a subprocess.Popen for `python -m MODULE ...` whose process is a fork of a server with
those imports: one server for each of KINDS and number of OpenMP threads (which OpenMP reads as it is loaded),
shared by all test processes of a session, and gone with it. The fork gets arguments, environment, folder,
streams and signals of a new process, in /proc as well. What differs: modules are there already, so what is
about imports or start-up wants a real process; and the parent is the server, which passes the status on.

Where the environment says KIT_WARM, so do the drivers, launchers and replicas that a fork itself starts; else
only what a launcher starts does.
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
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from kit.shortened import sitecustomize

if TYPE_CHECKING:
    from mlpipe.plan.plan import Plan

TESTS = str(Path(__file__).parents[1])
_TRAIN = (
    "mlpipe.train.loop", "mlpipe.train.models.llama", "mlpipe.train.evaluate", "mlpipe.train.flops",
    "mlpipe.train.node_sums", "mlpipe.train.optim.adamw", "prometheus_client",
    # with sympy, 0.4 CPU seconds: what counts FLOPs of an embedding on the meta device imports it
    "torch.fx.experimental.symbolic_shapes",
)  # fmt: skip
KINDS = {
    # `mlpipe` itself: no torch
    "cli": (
        *(f"mlpipe.{layer}.*" for layer in ("cli", "submit", "observe", "render", "plan", "store")),
        "kubernetes.config", "jinja2",
    ),
    # as `mlpipe.train.torchrun` before it forks its ranks, and what stands above it
    "torchrun": (
        "mlpipe.train.without_dynamo", "mlpipe.train.launcher", "torch.distributed.run", *_TRAIN,
    ),
    # with what it imports for ranks of FSDP before it forks them
    "sharded": (
        "mlpipe.train.without_dynamo", "mlpipe.train.launcher", "torch.distributed.run", *_TRAIN,
        "mlpipe.train.parallel.fully_shard",
    ),
    # ranks of any strategy, a class of `transformers`, and the compiler: three seconds for each of four
    "ranks": (
        "torch._inductor.compile_fx", "torch.distributed.fsdp", "transformers.models.llama.modeling_llama",
        *_TRAIN, "kit.many", "mlpipe.kinds.train.worker", "mlpipe.train.parallel.*",
        "mlpipe.train.schedules.*",
    ),
}  # fmt: skip
_START_SECONDS = 300.0
_PEAK_SECONDS = 0.03  # of each rank's first step, for an MFU that no test believes
_LONGEST_SECONDS = 900.0  # of a test, as in pyproject.toml
_PADDING = 16_384  # bytes that /proc/PID/cmdline and environ may show
_PR_SET_NAME = 15
_CLONE_NEWNET = 0x40000000
_BACKENDS = "torch.distributed.backends"  # group of entry points
# of torchrun, which has the class by a name of its own
_HANDLER = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"


@dataclass(frozen=True)
class _Asked:
    argv: tuple[str, ...]
    env: dict[str, str]
    folder: str
    new_session: bool
    dies_with: tuple[int, int] | None = None  # the process with whose end it gets this signal
    network: str = ""  # the file of the network namespace that it is in


class _Warm(subprocess.Popen[Any]):
    """One that a server began may be waited for and signalled as if it were our child."""

    _server: socket.socket | None = None

    def _begin(self, kind: str, call: dict[str, Any], asked: _Asked) -> None:
        self._server = _connect(kind, asked.env)
        body = json.dumps(asdict(asked)).encode()
        socket.send_fds(self._server, [struct.pack("!I", len(body))], _streams(call))
        self._server.sendall(body)
        (self.pid,) = struct.unpack("!i", _receive(self._server, 4))
        self._begun(call)

    def _begun(self, call: dict[str, Any]) -> None:
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(call[name] for name in pipes))  # type: ignore[attr-defined]

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._server is None:
            own: tuple[int, int] = super()._try_wait(wait_flags)  # type: ignore[misc]
            return own
        if wait_flags & os.WNOHANG and not select.select([self._server], [], [], 0)[0]:
            return 0, 0
        try:
            (status,) = struct.unpack("!i", _receive(self._server, 4))
        except ConnectionError:
            status = signal.SIGKILL  # with the server
        self._server.close()
        return self.pid, status

    def _internal_poll(self, *given: Any, **named: Any) -> int | None:
        if self._server is None:
            own: int | None = super()._internal_poll(*given, **named)  # type: ignore[misc]
            return own
        lock: threading.Lock = self._waitpid_lock  # type: ignore[attr-defined]
        if self.returncode is None and lock.acquire(False):
            try:
                if self.returncode is None:
                    pid, status = self._try_wait(os.WNOHANG)
                    if pid:
                        self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                lock.release()
        return self.returncode


class Popen(_Warm):
    """For argv `[sys.executable, ("-u" or "-P",) "-m", MODULE, ...]`, a fork of the server of that kind."""

    def __init__(
        self,
        kind: str,
        args: Sequence[str],
        *,
        dies_with: tuple[int, int] | None = None,
        network: str = "",
        **options: Any,
    ) -> None:
        """`dies_with`: a pid, and the signal that the new process gets when that one has ended. `network`:
        the file of a network namespace that it, and what it starts, is to be in."""
        self._kind, self._dies_with, self._network = kind, dies_with, network
        super().__init__(args, **options)

    def _execute_child(self, *given: Any) -> None:
        call = call_of(self, *given)
        assert call["preexec_fn"] is None, "nothing runs between the fork and the module"
        asked = _asked(call, call["args"], _env(call), self._dies_with)
        self._begin(self._kind, call, replace(asked, network=self._network or asked.network))


_network = ""  # of this process, where it entered one
_SIGNATURE = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]  # of the real one


def call_of(process: subprocess.Popen[Any], *given: Any) -> dict[str, Any]:
    return dict(_SIGNATURE.bind(process, *given).arguments)


def _env(call: dict[str, Any]) -> dict[str, str]:
    return dict(os.environ if call["env"] is None else call["env"])


def _streams(call: dict[str, Any]) -> list[int]:
    streams = [(call["p2cread"], 0), (call["c2pwrite"], 1), (call["errwrite"], 2)]
    return [own if own != -1 else inherited for own, inherited in streams]


def _asked(
    call: dict[str, Any], argv: Sequence[str], env: dict[str, str], dies_with: tuple[int, int] | None
) -> _Asked:
    folder = os.path.abspath(call["cwd"] or ".")
    argv = tuple(map(os.fspath, argv))
    return _Asked(argv, env, folder, call["start_new_session"], dies_with, _network)


def programs(folder: Path, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """An environment in which a shell's `mlpipe VERB ...`, `python SCRIPT.py ...` and `python -m MODULE` are
    forks, and all that they start: by programs in `folder` that ask for them. Python knows torch and
    `transformers` for a script, for a module what `mlpipe` imports. A signal to such a program reaches no
    fork. `base`: in place of this process's own, without OMP_* and MLPIPE_*."""
    folder.mkdir()
    for name in ("mlpipe", "python"):
        path = folder / name
        path.write_text(
            f"#!{sys.executable} -IS\nimport sys\nsys.path.insert(0, {TESTS!r})\n"
            f"from kit import warm\nsys.exit(warm.program({name!r}, sys.argv[1:]))\n"
        )
        path.chmod(0o755)
    if base is None:
        own = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "MLPIPE_"))}
        base = own | {"MLPIPE_CALIBRATE": "off"}
    paths = [str(folder), str(Path(sys.executable).parent), base["PATH"]]
    return {**base, "PATH": os.pathsep.join(paths), "KIT_SESSION": str(_session()[0]), "KIT_WARM": "1"}


def program(name: str, arguments: list[str]) -> int:
    """The exit code of one of `programs`."""
    if name == "mlpipe":
        kind, argv, env = "cli", ["mlpipe.cli", *arguments], dict(os.environ)
    elif "-m" in arguments[:2]:  # behind -P, as mlpipe starts its own
        kind, argv, env = "cli", arguments[arguments.index("-m") + 1 :], dict(os.environ)
    else:
        kind, argv = "ranks", [arguments[0].removesuffix(".py"), *arguments[1:]]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
    options = ["-P"] if arguments[:1] == ["-P"] else []
    process = Popen(kind, [sys.executable, *options, "-m", *argv], env=env)
    try:
        return process.wait(_LONGEST_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        raise


def _receive(server: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        if not (more := server.recv(count - len(data))):
            raise ConnectionError("the warm server is gone")
        data += more
    return data


# The server of a kind.

_SERVED: list[tuple[int, Path, dict[str, str]]] = []  # in a server and its forks: what it was started with


def _session() -> tuple[int, Path, dict[str, str]]:
    """The process that all test processes of this session belong to, the folder of their servers, and the
    environment of these."""
    if _SERVED:
        return _SERVED[0]
    own = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    pid = int(os.environ.get("KIT_SESSION", own))
    started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return pid, Path(tempfile.gettempdir()) / f"mlpipe-warm-{pid}-{started}", dict(os.environ)


def _connect(kind: str, env: dict[str, str]) -> socket.socket:
    session, folder, base = _session()
    threads = env.get("OMP_NUM_THREADS", "") if kind != "cli" else ""
    path = folder / f"{kind}-{threads}"
    folder.mkdir(mode=0o700, exist_ok=True)
    with (folder / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            foreign = ("OMP_", "MLPIPE_", "KIT_")
            own = {name: value for name, value in base.items() if not name.startswith(foreign)}
            # NumPy's OpenBLAS starts its threads as it is imported
            paths = os.pathsep.join(filter(None, (TESTS, base.get("PYTHONPATH"))))
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
    _SERVED.append((session, path.parent, dict(os.environ)))
    for name in KINDS[kind]:
        _import(name)
    if "mlpipe.train.flops" in sys.modules:
        vars(sys.modules["mlpipe.train.flops"])["PEAK_SECONDS"] = _PEAK_SECONDS
    _spare_forks()
    if kind == "ranks":
        _share_loop()
    gc.collect()
    gc.freeze()
    if not has_one_thread():
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
    parents: dict[int, tuple[int, int]] = {}  # pidfd: of whom it dies with, that one's pid and its signal
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
            for parent in [one for one, (pid, _) in parents.items() if one in ready or pid not in running]:
                pid, signum = parents.pop(parent)
                selector.unregister(parent)
                os.close(parent)
                if pid in running:
                    os.kill(pid, signum)
            if listener.fileno() in ready:
                connection, _ = listener.accept()
                with contextlib.suppress(ConnectionError):  # its test process was killed
                    asked, fds = _hear(connection)
                    pid = _fork(asked, fds, connection)
                    running[pid] = connection
                    if asked.dies_with:
                        try:
                            parent = os.pidfd_open(asked.dies_with[0])
                        except ProcessLookupError:
                            os.kill(pid, asked.dies_with[1])
                        else:
                            parents[parent] = (pid, asked.dies_with[1])
                            selector.register(parent, selectors.EVENT_READ)
    path.unlink()
    with contextlib.suppress(OSError):  # the last one
        for left in path.parent.glob("*"):
            if left.suffix == ".log" or left.name == "lock":
                left.unlink()
        path.parent.rmdir()


def has_one_thread() -> bool:
    """Else what a fork of it has may be held by a thread that it has not."""
    return len(os.listdir("/proc/self/task")) == 1


def _keep_at_end() -> None:
    """What is registered now is not given back at the end of this process."""
    for one in weakref.finalize._registry.values():  # type: ignore[attr-defined]
        one.atexit = False


def _spare_forks() -> None:
    """What would take 50 ms of each: at the end of one torch's 190 libraries give back all that they have
    registered, and with each first process group 170 packages are asked for backends of torch."""
    _keep_at_end()
    if "torch" not in sys.modules:
        return
    entry_points = metadata.entry_points
    backends = entry_points(group=_BACKENDS)
    vars(metadata)["entry_points"] = lambda **asked: (
        backends if asked == {"group": _BACKENDS} else entry_points(**asked)
    )


def _share_loop() -> None:
    """All process groups of a rank have one of gloo's threads that look for work 100 times a second: what the
    hooks of a model's parameters hold is not let go when the next of many trainings begins."""
    c10d: Any = sys.modules["torch.distributed.distributed_c10d"]
    devices: list[Any] = []

    class Sharing(c10d.ProcessGroupGloo):  # type: ignore[misc]
        def __init__(self, store: Any, rank: int, size: int, timeout: Any, **others: Any) -> None:
            assert not any(others.values()), f"no rank of a test is told {others}"
            interface = os.environ.get("GLOO_SOCKET_IFNAME")
            if not devices:
                one = self.create_device(interface=interface) if interface else self.create_default_device()
                devices.append(one)
            options = self._Options()
            options._devices, options._timeout = devices, timeout
            super().__init__(store, rank, size, options)

    c10d.ProcessGroupGloo = Sharing


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


def _hear(connection: socket.socket) -> tuple[_Asked, list[int]]:
    header, fds, _, _ = socket.recv_fds(connection, 4, 3)
    if not header:
        raise ConnectionResetError
    return _Asked(**json.loads(_receive(connection, struct.unpack("!I", header)[0]))), fds


def _fork(asked: _Asked, fds: list[int], connection: socket.socket) -> int:
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


def _enter(network: str) -> None:
    global _network
    libc = ctypes.CDLL(None, use_errno=True)
    with open(network, "rb", 0) as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {network}")
    _network = network


def become(asked: _Asked, fds: Iterable[int], begun: socket.socket | None = None) -> NoReturn:
    """What the command would do in a new interpreter. `begun` is told the pid when all is set up."""
    _forget_signals()
    os.chdir(asked.folder)
    if asked.network:
        _enter(asked.network)
    if asked.new_session:
        os.setsid()
    for own, fd in enumerate(fds):
        os.dup2(fd, own)
    _close_all_but(begun.fileno() if begun else -1)
    os.environ.clear()  # C's strings of the first environment lie where the new one is shown
    os.environ.update(asked.env)
    _show(asked)
    added = asked.env.get("PYTHONPATH", "").split(os.pathsep)
    folder = [] if "-P" in asked.argv[:2] else [asked.folder]
    sys.path[:] = [*folder, *filter(None, added), *(one for one in sys.path if one != TESTS)]
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
    subprocess.Popen = Inside  # type: ignore[misc]
    if handler := sys.modules.get(_HANDLER):
        vars(handler)["Popen"] = Inside
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


_MODULE = [sys.executable, "-P", "-m"]  # as mlpipe starts its own
_OF_LAUNCHER = ("mlpipe.train.torchrun", "mlpipe.train.preflight")


class Inside(_Warm):
    """What a subprocess.Popen is in a fork. All that is not named here is a new program."""

    def _execute_child(self, *given: Any) -> None:
        call = call_of(self, *given)
        argv = call["args"]
        if isinstance(argv, tuple):  # torchrun's
            argv = list(argv)
        if isinstance(argv, list) and argv[:3] == _MODULE and argv[3] in _OF_LAUNCHER:
            if "torch" in sys.modules and has_one_thread():
                self._fork(call)
                return
        elif isinstance(argv, list) and "KIT_WARM" in os.environ and (begins := _kind_of(argv, _env(call))):
            kind, argv, env, dies_with = begins
            self._begin(kind, call, _asked(call, argv, env, dies_with))
            return
        super()._execute_child(*given)  # type: ignore[misc]

    def _fork(self, call: dict[str, Any]) -> None:
        """Of this process, which has one thread; at its end nothing is given back that is this one's."""
        self.pid = os.fork()
        if self.pid == 0:
            try:
                if call["preexec_fn"]:
                    call["preexec_fn"]()
                _keep_at_end()
                become(_asked(call, call["args"], _env(call), None), _streams(call))
            finally:
                os._exit(70)
        self._begun(call)


def _kind_of(
    argv: list[str], env: dict[str, str]
) -> tuple[str, list[str], dict[str, str], tuple[int, int] | None] | None:
    """Of a driver, of a benchmark's own process or a rank that torch's torchrun starts of it, or of what runs
    a stage by its plan, started by a driver's child.py, by the supervisor of replicas or on a rented machine:
    the kind of its server, its argv and environment, whom it dies with."""
    if argv[:4] == [*_MODULE, "mlpipe.cli"]:
        return "cli", argv, env, None
    if "-m" in argv[1:3] and argv[argv.index("-m") + 1].startswith("benchmarks."):
        # torch's DistributedDataParallel imports the compiler
        return "ranks", argv, env, (os.getpid(), int(signal.SIGKILL))
    dies_with = None
    if argv[1:3] == ["-I", "-S"] and argv[3].endswith("mlpipe/submit/child.py"):
        dies_with, argv = (int(argv[4]), int(argv[5])), argv[6:]
    elif "MLPIPE_SUPERVISOR" in env:
        dies_with = (int(env.pop("MLPIPE_SUPERVISOR")), int(signal.SIGKILL))
    elif "CONTAINER_ID" not in env:
        return None
    if argv[:3] != _MODULE or not argv[3].startswith("mlpipe.train."):
        return None
    from mlpipe.plan.plan import Plan

    kind, env = of_plan(Plan.from_json(Path(argv[argv.index("--plan") + 1]).read_bytes()), env)
    return kind, argv, env, dies_with


def of_plan(plan: Plan, env: dict[str, str]) -> tuple[str, dict[str, str]]:
    """The kind of server of its launcher, and `env` with the threads with which its ranks will compute."""
    threads = str(max(1, len(os.sched_getaffinity(0)) // plan.launch.nproc_per_node))
    own = plan.launch.env.get("OMP_NUM_THREADS", env.get("OMP_NUM_THREADS", threads))
    kind = "sharded" if plan.work.training.mesh.dp_shard > 1 else "torchrun"
    return kind, env | {"OMP_NUM_THREADS": own}


if __name__ == "__main__":
    from kit import warm  # by the name by which its forks import it

    warm.serve(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
