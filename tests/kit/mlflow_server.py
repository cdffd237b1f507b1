"""MLflow's real server on this machine, out of its own package in an environment of its own.

    PYTHONPATH=tests python -m kit.mlflow_server build

installs it into ~/.cache/mlpipe/servers, once.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import urllib3
from kit.servers import ServerMissingError, built, cache, die_with_parent, end, free_port

REQUIREMENTS = Path(__file__).parents[2] / "requirements" / "mlflow.txt"
_INSTALL_SECONDS = 900
_READY_SECONDS = 300


def environment() -> Path:
    """The environment with the server; made unless it is there. Raises ServerMissingError."""
    digest = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:12]

    def make(folder: Path) -> None:
        uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
        if uv is None:
            raise ServerMissingError("uv is not here: `make .venv/.dev` installs it")
        target = folder / f"mlflow-{digest}"
        for command in (
            ["venv", "--quiet", "--relocatable", "--python", sys.executable, str(target)],
            [
                "pip",
                "install",
                "--quiet",
                "--python",
                str(target),
                "--require-hashes",
                "-r",
                str(REQUIREMENTS),
            ],
        ):
            done = subprocess.run([uv, *command], capture_output=True, text=True, timeout=_INSTALL_SECONDS)
            if done.returncode:
                raise ServerMissingError(f"uv {command[0]} failed:\n{done.stderr[-2000:]}")

    return built(cache() / f"mlflow-{digest}", make)


@contextlib.contextmanager
def mlflow_server(folder: Path, port: int | None = None) -> Iterator[str]:
    """A server over SQLite in `folder`, which takes artifacts, on 127.0.0.1; its URL. It ends with the block.
    Raises ServerMissingError."""
    python = environment() / "bin" / "python"
    folder.mkdir(parents=True, exist_ok=True)
    address = f"127.0.0.1:{port or free_port()}"
    command = [
        str(python),
        "-m",
        "mlflow",
        "server",
        "--host",
        "127.0.0.1",
        "--port",
        address.partition(":")[2],
    ]
    command += ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--workers", "1"]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true", "PYTHONDONTWRITEBYTECODE": ""}
    quiet["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"  # else eight processes beside, for evaluations
    with (folder / "server.log").open("ab") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **quiet},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=die_with_parent,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + _READY_SECONDS
        with urllib3.PoolManager(retries=False, timeout=5.0) as pool:
            while not _answers(pool, f"http://{address}/health"):
                if process.poll() is not None or time.monotonic() > deadline:
                    words = (folder / "server.log").read_text(errors="replace")[-2000:]
                    raise RuntimeError(f"MLflow did not start:\n{words}")
                time.sleep(0.1)
        yield f"http://{address}"
    finally:
        with contextlib.suppress(ProcessLookupError):  # its workers are children
            os.killpg(process.pid, signal.SIGKILL)
        end(process)


def _answers(pool: urllib3.PoolManager, url: str) -> bool:
    try:
        return pool.request("GET", url).status == 200
    except urllib3.exceptions.HTTPError:
        return False


if __name__ == "__main__":
    try:
        print("mlflow: ", environment())
    except ServerMissingError as error:
        print(error)
        sys.exit(4)
