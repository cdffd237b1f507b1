"""A real Slurm on one machine: slurmctld, three slurmd, munge, up in a second.

    PYTHONPATH=tests python -m kit.slurm [COMMAND]    # a shell, or the command, beside a fresh cluster

It lives in namespaces of its own (`slurm_inside.py`): nothing outlives the process that made it. It needs
root, Linux and Debian's packages of Slurm. What it is not: there are no cgroups, the nodes share this
machine's files, and the GPUs are null devices.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO

from kit.command_runs import until
from kit.servers import ServerMissingError

_PROGRAMS = {
    **{name: name for name in ("slurmctld", "slurmd")},
    **dict.fromkeys(("sbatch", "srun", "squeue"), "slurm-client"),
    "munged": "munge",
    "unshare": "util-linux",
    "ip": "iproute2",
}
_NAMESPACES = ("--net", "--mount", "--uts", "--pid")


class Slurm:
    """A running one, made by `slurm`. `folder`: its configuration and logs; `told`: what its first process
    reads."""

    def __init__(self, folder: Path, pid: int, told: IO[str]) -> None:
        self.folder, self._pid, self._told = folder, pid, told
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}

    def argv(self, argv: Sequence[object], folder: Path | str = ".") -> list[str]:
        """The command, as in `folder` on the login node."""
        enter = ["nsenter", "--target", str(self._pid), *_NAMESPACES, "--"]
        return [*enter, "env", f"--chdir={Path(folder).absolute()}", *map(str, argv)]

    def run(self, *argv: object) -> str:
        """One of Slurm's commands; what it prints."""
        done = subprocess.run(
            self.argv(argv),
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, f"{argv}: {done.stderr}"
        return done.stdout

    def until(self, what: str, *argv: object, says: str, seconds: float = 120) -> None:
        """Until the command prints that."""
        until(lambda: says in self.run(*argv), what, seconds, self._explain)

    def _explain(self) -> str:
        logs = [path.read_text()[-2000:] for path in sorted(self.folder.glob("*.log"))]
        return self.run("sinfo", "-N", "-l") + "".join(logs)

    def kill_node(self, name: str) -> None:
        """As a machine that loses its power: its slurmd and all below it."""
        for pid in self._inside(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def start_node(self, name: str) -> None:
        """One that was killed, until jobs may have it again."""
        # else it may be "completing" for minutes, until Slurm asks again for the end of what it had
        self.run("scontrol", "update", f"nodename={name}", "state=down", "reason=lost")
        self._told.write(f"{name}\n")
        self._told.flush()
        until(partial(self._is_back, name), f"{name} back", 300, self._explain)

    def _is_back(self, name: str) -> bool:
        # Of all nodes: asked for one alone (`--nodes`), slurmctld tells of cores what it last told of all.
        lines = self.run("sinfo", "--noheader", "--Node", "--format=%N %T").splitlines()
        return {state for node, state in map(str.split, lines) if node == name} == {"idle"}

    def slow_down(self, name: str, rate: str) -> None:
        """What the node sends, such as `1mbit`."""
        (pid, *_) = self._inside(name)
        shaped = ["root", "tbf", "rate", rate, "burst", "16kb", "latency", "400ms"]
        argv = ["nsenter", "--target", str(pid), "--net", "tc", "qdisc", "replace", "dev", "eth0", *shaped]
        subprocess.run(argv, check=True, timeout=60)

    def nodes_of(self, job: object) -> list[str]:
        names = self.run("squeue", "--noheader", "--jobs", job, "--format=%N").strip()
        return self.run("scontrol", "show", "hostnames", names).split()

    def _inside(self, name: str) -> list[int]:
        """Processes with the host name of the node, as seen from here."""
        mine = (self.folder / f"{name}.uts").read_text()
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(path / "ns" / "uts") == mine:
                    found.append(int(path.name))
        return found


def check_machine() -> None:
    """Raises ServerMissingError."""
    missing = sorted({package for name, package in _PROGRAMS.items() if shutil.which(name) is None})
    if missing:
        raise ServerMissingError(
            "no Slurm here: apt-get install --no-install-recommends slurm-wlm-basic-plugins "
            + " ".join(missing)
        )
    if os.geteuid() != 0:
        raise ServerMissingError("a Slurm of one's own needs root, for namespaces")


@contextlib.contextmanager
def slurm(folder: Path, nodes: int = 3) -> Iterator[Slurm]:
    """Raises ServerMissingError with what to install."""
    check_machine()
    inside = Path(__file__).with_name("slurm_inside.py")
    argv = ["unshare", *_NAMESPACES, "--fork", "--mount-proc", "--kill-child"]
    process = subprocess.Popen(
        [*argv, sys.executable, str(inside), str(folder), str(nodes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        if process.stdout.readline().strip() != "up":
            words = process.stderr.read()
            if "unshare" in words:
                raise ServerMissingError(f"namespaces are not allowed here: {words.strip()}")
            raise AssertionError(f"Slurm did not start: {words}")
        child = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0]
        yield Slurm(folder, int(child), process.stdin)
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made, slurm(Path(made)) as one:
        command = sys.argv[1:] or [os.environ.get("SHELL", "bash")]
        sys.exit(subprocess.run(one.argv(command), env={**os.environ, **one.environment}).returncode)
