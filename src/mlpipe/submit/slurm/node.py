"""`python -m mlpipe.submit.slurm.node --scratch FOLDER <plan.json`: what srun starts on each node of a job.

Puts the plan where the stage's own process finds it, tells that process who it is, by the variables that a
pod has, and waits for it. Of all nodes' codes srun returns the highest, so those that end a run for good
stand above those that a restart may mend.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from mlpipe._core import environment
from mlpipe._core.addresses import outward_interface
from mlpipe._core.errors import EXIT_CODES, NON_RETRIABLE_CODES, MlpipeError
from mlpipe.plan.plan import Plan
from mlpipe.render.slurm import COORDINATOR, NON_RETRIABLE_BASE, plan_of_task
from mlpipe.store.open import open_store

_PRIVATE = 0o700


def main() -> int:
    """The exit code for srun."""
    parser = argparse.ArgumentParser(prog="mlpipe.submit.slurm.node", description=__doc__)
    parser.add_argument("--scratch", required=True)
    parser.add_argument("--part", default="", help="Of an elastic training: its coordinator, or a number.")
    parser.add_argument("--task", type=int, help="Of an array: which of its plans.")
    arguments = parser.parse_args()
    # in a heterogeneous job Slurm counts the nodes of each component
    number = int(os.environ.get(environment.FIRST_NODE) or "0") + int(os.environ["SLURM_NODEID"])
    folder = Path(f"{arguments.scratch}-{number}")
    # Slurm signals every process of a step that it ends: the stage's own process saves, and is waited for.
    signal.signal(signal.SIGTERM, lambda signum, frame: None)
    try:
        text = sys.stdin.buffer.read()
        if arguments.task is None:
            plan = Plan.from_json(text)
            written = f"{plan.attempt_key}/plan.json"
        else:  # it may begin before the driver of its run does
            plan, owner = plan_of_task(text, arguments.task)
            written = f"runs/{owner}/run.json"
        check_store(plan, os.environ.get("SLURMD_NODENAME", "this node"), written)
        with own_folder(folder):
            return _code(_run(plan, folder, arguments.part))
    except MlpipeError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)  # noqa: T201
        return _code(EXIT_CODES[error.kind])


def check_store(plan: Plan, node: str, key: str) -> None:
    """`key`: of what whoever submitted has written. Raises MlpipeError (input) where the store is a folder of
    the submitter's machine alone."""
    store = open_store(plan.store_url)
    if not store.exists(key):
        raise MlpipeError(
            f"{node} does not find the run in its store",
            where=f"{plan.store_url}/{key}",
            hint="a folder must lie on a file system that all nodes share; or write store: s3://...",
            kind="input",
        )


def variables(plan: Plan, env: Mapping[str, str]) -> dict[str, str]:
    """Of the stage's process: Slurm's `env`, and what a pod of a gang is told."""
    own = {**env, **plan.launch.env, environment.RUN_ID: plan.run_id, environment.STAGE: plan.stage}
    if node := env.get("SLURMD_NODENAME"):
        own[environment.NODE_NAME] = node
    if plan.launch.num_nodes > 1:
        own["JOB_COMPLETION_INDEX"] = env["SLURM_NODEID"]
        if plan.launch.num_spares:
            own[environment.NUM_MACHINES] = env["SLURM_JOB_NUM_NODES"]
        own[environment.GANG_RESTART] = env.get("SLURM_RESTART_COUNT") or "0"
        if "GLOO_SOCKET_IFNAME" not in own and (interface := outward_interface()) is not None:
            own["GLOO_SOCKET_IFNAME"] = interface
    else:
        own.pop(environment.RENDEZVOUS, None)
    return own


@contextlib.contextmanager
def own_folder(folder: Path) -> Iterator[None]:
    """Made anew, for this user alone, and gone afterwards. Raises MlpipeError (infrastructure) for one that
    cannot be, also since it is somebody else's: in /tmp anybody makes what they like."""
    with contextlib.suppress(OSError):  # of this job's start before, on this node
        if folder.lstat().st_uid == os.geteuid():
            shutil.rmtree(folder)
    try:
        folder.mkdir(mode=_PRIVATE, parents=True)
    except OSError as error:
        raise _unusable(folder, error) from None
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _unusable(folder: Path, error: OSError) -> MlpipeError:
    return MlpipeError(
        f"the scratch folder cannot be used: {error.strerror}",
        where=str(error.filename or folder),
        hint="write another one: slurm.scratch",
        kind="infrastructure",
    )


def _run(plan: Plan, folder: Path, part: str) -> int:
    """The exit code of the stage's process."""
    module = "mlpipe.train.coordinate" if part == COORDINATOR else plan.kind.module
    env = variables(plan, os.environ)
    if part.isdecimal():
        env[environment.REPLICA] = part
    try:
        (folder / "plan.json").write_bytes(plan.to_json().encode())
        argv = [sys.executable, "-P", "-m", module]
        argv += ["--plan", str(folder / "plan.json"), "--scratch", str(folder / "scratch")]
        (folder / "scratch").mkdir()
        process = subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL)
        (folder / "pid").write_text(str(process.pid))
    except OSError as error:
        raise _unusable(folder, error) from None
    return process.wait()


def _code(code: int) -> int:
    """A process that a signal ended has the code of its infrastructure."""
    if code < 0:
        return EXIT_CODES["infrastructure"]
    return NON_RETRIABLE_BASE + code if code in NON_RETRIABLE_CODES else code


if __name__ == "__main__":
    sys.exit(main())
