"""A stage is a process on this machine."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlpipe._core import environment
from mlpipe._core.errors import KINDS_BY_CODE, SubmitError
from mlpipe._core.units import format_bytes
from mlpipe.plan.hardware import machine_memory_bytes
from mlpipe.plan.plan import Plan
from mlpipe.plan.pods import host_bytes
from mlpipe.spec import placeholders
from mlpipe.store.base import Store
from mlpipe.store.outcome import read_outcome
from mlpipe.submit import process
from mlpipe.submit.command_gang import GangHere, commit, variables
from mlpipe.submit.executor import Ended, Slots
from mlpipe.submit.handle import ThreadedHandle, ended_by
from mlpipe.submit.here import stage_command
from mlpipe.submit.standby import Standbys

_LAST_LINES = 15  # of a failed command's log, shown with the failure


def gpu_ids() -> list[str]:
    """What CUDA_VISIBLE_DEVICES may name here: its own value if set, else numbers of the driver's devices,
    counted from 0 as CUDA does: in a container that has but /dev/nvidia3 that is 0."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name.strip() and name.strip() != "-1"]
    return [str(index) for index, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]


class ProcessExecutor:
    """Starts stages in `folder`, the directory in which the run was asked for, under the driver's lease
    `driver`."""

    def __init__(self, store: Store, *, driver: str, folder: str) -> None:
        self._store = store
        self._driver = driver
        self._folder = folder
        self._gpus = gpu_ids()
        self._taken: list[tuple[ThreadedHandle, list[str]]] = []
        self.standbys: Standbys | None = None  # of which launchers may begin as forks

    def capacity(self) -> Slots:
        return Slots(cpus=len(os.sched_getaffinity(0)), gpus=len(self._gpus))

    def check(self, plan: Plan) -> None:
        check_fits(plan, len(self._gpus))

    def start(self, plan: Plan, scratch: Path) -> ThreadedHandle:
        if plan.kind.runs == "command" and (nodes := plan.launch.num_nodes) > 1:
            rendezvous = f"localhost:{_free_port()}"
            parts = [
                self.start_node(plan, scratch / str(index), index, variables(index, nodes, rendezvous))
                for index in range(nodes)
            ]
            return GangHere(self._store, plan, parts, scratch, self._driver)
        argv, env = command_line(plan, scratch)
        argv = resolve(argv)
        gpus = self._take_gpus(plan)
        if gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        (scratch / "output").mkdir()
        (scratch / "plan.json").write_text(plan.to_json())
        env[environment.DRIVER] = self._driver
        command = Command(argv, env, self._folder, self.standbys)
        handle = StageProcess(self._store, plan, scratch, command, self._driver)
        self._taken.append((handle, gpus))
        return handle

    def start_node(self, plan: Plan, scratch: Path, index: int, env: Mapping[str, str]) -> StageProcess:
        """Of a command on several nodes the process on one, which commits nothing."""
        argv, own = command_line(plan, scratch)
        (scratch / "output").mkdir(parents=True)
        env = {**own, **env, environment.DRIVER: self._driver}
        command = Command(resolve(argv), env, self._folder)
        return StageProcess(self._store, plan, scratch, command, self._driver, node=index)

    def _take_gpus(self, plan: Plan) -> list[str]:
        if plan.launch.device != "cuda":
            return []
        self._taken = [(handle, gpus) for handle, gpus in self._taken if handle.poll() is None]
        taken = {gpu for _, gpus in self._taken for gpu in gpus}
        replicas = plan.launch.replicas
        number = plan.launch.nproc_per_node * (replicas.most if replicas is not None else 1)
        return [gpu for gpu in self._gpus if gpu not in taken][:number]


def check_fits(plan: Plan, num_gpus: int) -> None:
    """Refuse, before anything starts, what one machine cannot do. Raises SubmitError (input)."""
    launch, key = plan.launch, f"stages.{plan.stage}.resources"
    if launch.num_nodes > 1 and plan.kind.runs == "workers":
        raise SubmitError(
            f"asks for {launch.num_nodes} nodes, but the local backend is this one machine",
            where=f"stage {plan.stage!r}",
            hint=f"run it with --set {key}.nodes=1, or of groups with one of them",
            kind="input",
        )
    asked = launch.nproc_per_node * (launch.replicas.fewest if launch.replicas is not None else 1)
    if launch.device == "cuda" and asked > num_gpus:
        raise SubmitError(
            f"asks for {asked} GPUs, this machine shows {num_gpus}",
            where=f"stage {plan.stage!r}",
            hint=f"run it with --set {key}.gpus_per_node={num_gpus}"
            + ("" if num_gpus else " (then it trains on the CPU)"),
            kind="input",
        )
    if (needed := host_bytes(plan.work, launch)) and needed > (there := machine_memory_bytes()):
        raise SubmitError(
            f"what waits on the host, and the workers beside it, need {format_bytes(needed)} of memory, this "
            f"machine has {format_bytes(there)}",
            where=f"stage {plan.stage!r}",
            hint=f"run it with --set stages.{plan.stage}.train.offload=null, or on a machine with more",
            kind="input",
        )


def command_line(plan: Plan, scratch: Path) -> tuple[list[str], dict[str, str]]:
    """argv and the environment that is added to ours: what `--dry-run` prints, where `{{stages.NAME.output}}`
    stands until that one is made, and `start` starts."""
    argv, env = stage_command(plan, scratch)
    if plan.kind.runs != "command":
        return argv, env
    folder = str(scratch / "output")
    argv, env = placeholders.fill([list(plan.work.argv), env], {"output": folder})
    return argv, {**env, environment.OUTPUT: folder}


def resolve(argv: Sequence[str]) -> list[str]:
    """argv[0] is looked for beside the running Python first, then in PATH: a virtual environment's tools are
    found without activating it, and are the ones of the mlpipe that runs."""
    search = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    program = shutil.which(argv[0], path=search)
    if program is None:
        raise SubmitError(
            f"no program {argv[0]!r} in PATH or beside {sys.executable}",
            hint="install it, or write its path",
            kind="input",
        )
    return [program, *argv[1:]]


@dataclass(frozen=True)
class Command:
    """`env`: added to ours. `folder`: where it runs. `standbys`: of which it may begin as a fork."""

    argv: Sequence[str]
    env: Mapping[str, str]
    folder: str
    standbys: Standbys | None = None


class StageProcess(ThreadedHandle):
    """A command, or the launcher of a stage that runs in workers."""

    def __init__(
        self,
        store: Store,
        plan: Plan,
        scratch: Path,
        command: Command,
        driver: str,
        *,
        node: int | None = None,
    ) -> None:
        """`node`: of a command on several; what they make is then for others to commit."""
        super().__init__(store, plan)
        self._scratch, self._node = scratch, node
        self._driver = driver
        self._log = scratch / "output.log"
        # An orphaned launcher saves; an orphaned command has nothing that anybody would read.
        self._is_command = plan.kind.runs == "command"
        death = signal.SIGKILL if self._is_command else signal.SIGTERM
        argv, folder, env = command.argv, command.folder, {**os.environ, **command.env}
        standby = command.standbys and command.standbys.find(argv, env)
        begun = standby and standby.begin(argv, env=env, folder=folder, output=self._log)
        self._process = begun or process.spawn(
            argv, env=env, folder=folder, output=self._log, death_signal=death
        )
        self._thread.start()

    def terminate(self) -> None:
        super().terminate()
        if self._process.poll() is None:
            if self._is_command:
                process.send([-self._process.pid], signal.SIGTERM)  # the whole process group
            else:
                process.send([self._process.pid], signal.SIGTERM)  # the launcher tells its workers

    def kill(self) -> None:
        super().kill()
        self._kill_members()

    def _kill_members(self) -> None:
        left = process.members(self._driver, self._plan.stage, node=self._node)
        process.send(left, signal.SIGKILL)

    def _work(self) -> Ended:
        name = f"rank-{self._node or 0}" if self._is_command else "launcher"
        exit_code = self._ship_log(f"{self._plan.attempt_key}/logs/{name}.log")
        # Whatever the stage started and left behind ends with it.
        self._kill_members()
        if self._is_command:
            return self._end_of_command(exit_code)
        return self._end_of_launcher(exit_code)

    def _ship_log(self, key: str) -> int:
        """Copy the growing log file into the store until the process has ended; its exit code."""
        writer = self._store.open_log(key)
        try:
            with self._log.open("rb") as log:
                while True:
                    exit_code = self._process.poll()
                    while chunk := log.read(1 << 20):
                        writer.write(chunk)
                    if exit_code is not None:
                        return exit_code
                    time.sleep(0.05)
        finally:
            writer.close()

    def _end_of_command(self, exit_code: int) -> Ended:
        if self._stopping:
            return Ended("cancelled", "stopped before it was done", exit_code=exit_code)
        if exit_code != 0:
            message = f"{_how(exit_code)}{self._last_lines()}"
            return Ended("failed", message, kind="failed", exit_code=exit_code)
        if self._node is not None:
            return Ended("done", exit_code=0)
        return commit(self._store, self._plan, self._scratch / "output")

    def _last_lines(self) -> str:
        tail = self._log.read_bytes()[-8192:].decode(errors="replace").splitlines()[-_LAST_LINES:]
        return "; its last lines:" + "".join(f"\n  | {line}" for line in tail) if tail else ", silently"

    def _end_of_launcher(self, exit_code: int) -> Ended:
        outcome = read_outcome(self._store, f"{self._plan.attempt_key}/outcome.json")
        if outcome is not None:
            return ended_by(outcome)
        if self._stopping:
            return Ended("cancelled", "stopped at once", exit_code=exit_code)
        kind = "infrastructure" if exit_code < 0 else KINDS_BY_CODE.get(exit_code, "bug")
        message = f"the launcher {_how(exit_code)}{self._last_lines()}"
        return Ended("failed", message, kind=kind, exit_code=exit_code)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return int(listener.getsockname()[1])


def _how(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    name = signal.Signals(-exit_code).name
    return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
