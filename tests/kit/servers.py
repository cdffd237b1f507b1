"""Real S3 servers on this machine: MinIO and versitygw, built from Go modules, one process a test session.

    PYTHONPATH=tests python -m kit.servers build

builds them into ~/.cache/mlpipe/servers (or $MLPIPE_CACHE/servers), once; it needs Go.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import urllib3

# the last source of MinIO there will be (archived upstream), and a second dialect to test against
MODULES = {
    "minio": ("github.com/minio/minio", "v0.0.0-20260212201848-7aac2a2c5b7c"),
    "versitygw": ("github.com/versity/versitygw/cmd/versitygw", "v1.8.0"),
}
ACCESS_KEY = "mlpipe-test"
SECRET_KEY = "mlpipe-test-secret"
REGION = "us-east-1"
_STUCK_SECONDS = 300.0  # without a tick of CPU time; how long a build takes is the machine's matter
_READY_SECONDS = 300
_PORTS = range(20_000, 32_000)
_NUM_STARTS = 3  # another process may take a free port before the server binds it


class ServerMissingError(Exception):
    """Says what to install or run."""


@dataclass(frozen=True)
class S3Server:
    """A running one. `endpoint`: http://127.0.0.1:port. `data`: its folder on disk."""

    name: str
    endpoint: str
    pid: int
    data: Path

    @property
    def host_port(self) -> tuple[str, int]:
        host, _, port = self.endpoint.removeprefix("http://").partition(":")
        return host, int(port)

    def environment(self, endpoint: str | None = None) -> dict[str, str]:
        """What mlpipe reads; `endpoint` to go through a proxy."""
        return {
            "AWS_ENDPOINT_URL_S3": endpoint or self.endpoint,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": REGION,
        }

    def make_bucket(self, bucket: str) -> None:
        from minio import Minio

        address = self.endpoint.removeprefix("http://")
        Minio(address, access_key=ACCESS_KEY, secret_key=SECRET_KEY, secure=False).make_bucket(bucket)

    def add_policy(self, name: str, document: dict[str, Any]) -> None:
        """MinIO only: a policy that users and tokens may be given by its name."""
        self._admin().policy_add(name, policy=document)

    def add_user(self, name: str, document: dict[str, Any]) -> dict[str, str]:
        """MinIO only: a user of that policy alone; `environment` with its keys."""
        secret_key = f"{name}-secret"
        admin = self._admin()
        admin.user_add(name, secret_key)
        self.add_policy(name, document)
        admin.attach_policy([name], user=name)
        return {**self.environment(), "AWS_ACCESS_KEY_ID": name, "AWS_SECRET_ACCESS_KEY": secret_key}

    def _admin(self) -> Any:
        from minio.credentials.providers import StaticProvider
        from minio.minioadmin import MinioAdmin

        address = self.endpoint.removeprefix("http://")
        return MinioAdmin(
            endpoint=address, credentials=StaticProvider(ACCESS_KEY, SECRET_KEY), region=REGION, secure=False
        )


def cache() -> Path:
    return Path(os.environ.get("MLPIPE_CACHE") or Path.home() / ".cache" / "mlpipe") / "servers"


def binary_path(name: str) -> Path:
    return cache() / f"{name}-{MODULES[name][1]}"


def binary(name: str) -> Path:
    """Raises ServerMissingError when it was not built."""
    path = binary_path(name)
    if not path.exists():
        raise ServerMissingError(f"{name} is not built: install Go, then run `make servers`")
    return path


def build(name: str) -> Path:
    """Builds the server unless it is there."""
    module, version = MODULES[name]
    path = binary_path(name)

    def make(folder: Path) -> None:
        go(["go", "install", "-ldflags", "-s -w", f"{module}@{version}"], folder)
        (folder / name).rename(folder / path.name)

    return built(path, make)


def built(path: Path, make: Callable[[Path], None]) -> Path:
    """`path`, a file or a folder: made by `make` under the same name in the folder that it is given, unless
    it is there already. Two builders wait for each other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                make(Path(folder))
                os.replace(Path(folder) / path.name, path)
    return path


def go(command: list[str], folder: Path) -> str:
    """Runs a go command in `folder` (where binaries go, too), behind everything else on the machine; its
    output. Raises ServerMissingError when there is no Go, or it fails."""
    if shutil.which("go") is None:
        raise ServerMissingError(
            "go is not on PATH: it builds the test servers. Install Go (Debian: golang-go)"
        )
    process = subprocess.Popen(
        ["nice", "-n", "10", *command],
        env={**os.environ, "GOBIN": str(folder), "CGO_ENABLED": "0", "GOFLAGS": "-trimpath -buildvcs=false"},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )
    spent = -1.0
    try:
        while True:
            try:
                output, errors = process.communicate(timeout=_STUCK_SECONDS)
                break
            except subprocess.TimeoutExpired:
                before, spent = spent, _cpu_ticks(process.pid)
                if spent <= before:
                    words = (
                        f"{' '.join(command)} did nothing for {_STUCK_SECONDS:.0f} s: is the network there?"
                    )
                    raise ServerMissingError(words) from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(300)
    if process.returncode:
        raise ServerMissingError(f"{' '.join(command)} failed:\n{errors[-2000:]}")
    return output


def _cpu_ticks(session: int) -> int:
    """That the processes of a session have used, with those that ended (proc(5): utime to cstime)."""
    total = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                total += sum(map(int, fields[11:15]))
    return total


@contextlib.contextmanager
def s3_server(name: str, folder: Path, **variables: str) -> Iterator[S3Server]:
    """Starts `name` ("minio" or "versitygw") on a free port of 127.0.0.1 with its data in `folder` and these
    environment variables, waits until it answers, stops it in the end. Raises ServerMissingError when it
    is not built."""
    program = binary(name)
    data = folder / "data"
    data.mkdir(parents=True)
    log = folder / "server.log"
    for _ in range(_NUM_STARTS):
        address = f"127.0.0.1:{free_port()}"
        command, environment = command_of(name, program, address, data)
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                env={**os.environ, **environment, **variables},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=die_with_parent,
            )
        try:
            if wait_until_ready(name, address, process):
                yield S3Server(name, f"http://{address}", process.pid, data)
                return
        finally:
            end(process)
    raise RuntimeError(f"{name} did not start; its log ends:\n{log.read_text()[-2000:]}")


def end(process: subprocess.Popen[Any]) -> None:
    """SIGTERM, and SIGKILL when it has not ended 10 s later."""
    process.terminate()
    try:
        process.wait(300)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(300)


def command_of(name: str, program: Path, address: str, data: Path) -> tuple[list[str], dict[str, str]]:
    """Arguments, and what to add to the environment."""
    if name == "minio":
        command = [str(program), "server", "--quiet", "--address", address, str(data)]
        return command, {
            "MINIO_ROOT_USER": ACCESS_KEY,
            "MINIO_ROOT_PASSWORD": SECRET_KEY,
            "MINIO_BROWSER": "off",
            "MINIO_UPDATE": "off",
            "MINIO_REGION": REGION,
        }
    command = [str(program), "--quiet", "--keep-alive", "--port", address, "--region", REGION]
    command += ["posix", str(data)]
    return command, {"ROOT_ACCESS_KEY": ACCESS_KEY, "ROOT_SECRET_KEY": SECRET_KEY}


def wait_until_ready(name: str, address: str, process: subprocess.Popen[bytes]) -> bool:
    url = f"http://{address}/minio/health/ready" if name == "minio" else f"http://{address}/"
    deadline = time.monotonic() + _READY_SECONDS
    with urllib3.PoolManager(retries=False, timeout=2.0) as pool:
        while time.monotonic() < deadline and process.poll() is None:
            try:
                if pool.request("GET", url).status < 500:
                    return True
            except urllib3.exceptions.HTTPError:
                pass  # not listening yet
            time.sleep(0.05)
    return False


def free_port() -> int:
    """One that nobody takes before a server binds it: below those that the kernel gives to connections and to
    whoever asks for any, and no other test process is given it as long as this one lives."""
    while True:
        port = random.choice(_PORTS)
        try:
            fcntl.lockf(_ports_given(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return port


@functools.cache
def _ports_given() -> IO[bytes]:
    """Byte N is locked by the process that was given port N; closing the file would end all its locks."""
    return (Path(tempfile.gettempdir()) / f"mlpipe-test-ports-{os.getuid()}").open("ab")


def die_with_parent() -> None:
    """For `preexec_fn`: no server outlives a killed test session (Linux)."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def main(arguments: list[str]) -> int:
    if arguments != ["build"]:
        print(__doc__)
        return 2
    for name in MODULES:
        print(f"{name}: ", end="", flush=True)
        try:
            print(build(name))
        except ServerMissingError as error:
            print(error)
            return 4
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
