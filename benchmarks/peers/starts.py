"""`python -m benchmarks.peers.starts PART`: seconds that mlpipe and a raw torchrun script need to be at work.

`first`: from the command to the end of the first optimizer step. `restart`: from a worker's death (SIGKILL of
rank 1) to the end of the next step, each from its own checkpoint; loading it is reported apart. Every sample
is a new run of the real command; nobody is modified, what is timed stands in the log of the raw script and in
mlpipe's records.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import launch, measure
from benchmarks.peers import sides
from benchmarks.peers.work import Work

_DEADLINE_SECONDS = 120.0
_POLL_SECONDS = 0.02
_KILL_AT_STEP, _SAVE_EVERY = 7, 5
Lines = Callable[[], list[dict[str, Any]]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("first", "restart"))
    parser.add_argument("--quick", action="store_true", help="one round: does it run?")
    parser.add_argument("--rounds", type=int, default=4, help="a restart takes three times a start")
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    arguments = parser.parse_args()
    num_rounds = 1 if arguments.quick else arguments.rounds
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(1))  # and so ends what it started
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = sides.GPT | {"vocab_size": 512} if arguments.quick else sides.GPT
        tokens = launch.corpus(folder, vocab_size=model["vocab_size"])
        work = Work(
            side="raw", settings="same", precision="fp32", model=model, tokens=str(tokens), batch=4, seed=0,
            lr=1e-3, grad_clip=1.0,
        )  # fmt: skip
        rows = (first if arguments.part == "first" else restart)(folder, work, num_rounds)
    measure.tell("peers", rows, arguments.results, rounds=num_rounds, load_before=load_before)
    return 0


def first(folder: Path, work: Work, num_rounds: int) -> list[dict[str, Any]]:
    pipeline = folder / "pipeline.yaml"
    pipeline.write_text(PIPELINE.format(tokens=work.tokens, args=json.dumps(work.model)))

    def raw() -> measure.Figures:
        with fresh(folder) as here:
            mine = replace(work, log=str(here / "steps.jsonl"))
            return timed(sides.torchrun("raw_ddp"), mine, here, lines_of(here, "steps.jsonl"))

    def mlpipe_run() -> measure.Figures:
        with fresh(folder) as here:
            argv = [
                str(Path(sys.executable).with_name("mlpipe")),
                "run",
                str(pipeline),
                "--store",
                str(here / "store"),
            ]
            return timed(argv, work, here, lines_of(here, "store/**/rank-0.jsonl"))

    def mlpipe_launcher() -> measure.Figures:
        with fresh(folder) as here:
            argv = sides.launcher(sides.mlpipe_plan(work, here, strategy="ddp"), here)
            return timed(argv, work, here, lines_of(here, "store/**/rank-0.jsonl"))

    raw(), mlpipe_run()  # byte code and pages of the disk, for both
    found = measure.rounds(
        {
            "mlpipe run": mlpipe_run,
            "mlpipe, launcher alone": mlpipe_launcher,
            "raw DDP": raw,
            "raw DDP again": raw,
        },
        num_rounds,
    )

    row = partial(_row, "first optimizer step", found)
    return [
        row("seconds from the shell", "mlpipe run", "seconds", 1.0),
        row("seconds from the launcher's start", "mlpipe, launcher alone", "seconds", 1.0),
        row("control: seconds", "raw DDP again", "seconds", None),
        row("CPU seconds from the shell", "mlpipe run", "cpu_seconds", None),
    ]


def _row(
    work: str, found: list[dict[str, measure.Figures]], name: str, ours: str, key: str, goal: float | None
) -> dict[str, Any]:
    return measure.figure(
        work, name, "s", found, key, ours=ours, peer="raw DDP", goal=goal, higher_is_better=False
    )


def restart(folder: Path, work: Work, num_rounds: int) -> list[dict[str, Any]]:
    def raw() -> measure.Figures:
        with fresh(folder) as here:
            saved = here / "checkpoint.pt"
            mine = replace(work, log=str(here / "steps.jsonl"), checkpoint=str(saved), save_every=_SAVE_EVERY)
            argv = sides.torchrun("raw_ddp", "--standalone", "--max-restarts", "3")
            return killed(argv, mine, here, lines_of(here, "steps.jsonl"), saved.exists)

    def mlpipe() -> measure.Figures:
        with fresh(folder) as here:
            plan = sides.mlpipe_plan(work, here, strategy="ddp", checkpoint__every=f"{_SAVE_EVERY} steps")
            plan = replace(plan, launch=plan.launch._replace(max_restarts=3))
            read = lines_of(here, "store/**/rank-0.jsonl")
            return killed(
                sides.launcher(plan, here), work, here, read,
                lambda: any(line["kind"] == "checkpoint" for line in read()),
            )  # fmt: skip

    found = measure.rounds({"mlpipe": mlpipe, "raw DDP": raw, "raw DDP again": raw}, num_rounds)

    row = partial(_row, "restart after SIGKILL", found)
    return [
        row("seconds to the next step", "mlpipe", "seconds", 1.0),
        row("of these, loading the checkpoint", "mlpipe", "load_seconds", None),
        row("control: seconds to the next step", "raw DDP again", "seconds", None),
    ]


PIPELINE = """\
version: 1
name: first-step
stages:
  - name: train
    train:
      model: {{entry: "benchmarks.peers.gpt:build_model", seq_len: 256, args: {args}}}
      data: {{tokens: {tokens}, batch_size: 8}}
      optimizer: {{lr: 1e-3, schedule: constant, warmup_steps: 0, weight_decay: 0}}
      steps: 1000000
      strategy: ddp
      precision: fp32
      checkpoint: {{every: 1000000 steps}}
    resources: {{workers_per_node: 2}}
"""


@contextlib.contextmanager
def fresh(folder: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as name:
        yield Path(name)


def lines_of(folder: Path, pattern: str) -> Lines:
    def read() -> list[dict[str, Any]]:
        found = []
        for path in folder.glob(pattern):
            whole, _, _ = path.read_text().rpartition("\n")  # the last line may be half written
            found += [json.loads(line) for line in whole.splitlines()]
        return found

    return read


def steps_in(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if line.get("kind", "step") == "step"]


@contextlib.contextmanager
def running(argv: list[str], work: Work, here: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = sides.start(argv, work, here / "out.log")
    try:
        yield process
    finally:
        for pid in reversed(descendants(process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(30)


def wait_for(process: subprocess.Popen[bytes], here: Path, what: str, find: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while not (found := find()):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"no {what}: {(here / 'out.log').read_text(errors='replace')[-3000:]}")
        time.sleep(_POLL_SECONDS)
    return found


def timed(argv: list[str], work: Work, here: Path, read: Lines) -> measure.Figures:
    began = time.time()
    with running(argv, work, here) as process:
        done = wait_for(process, here, "first step", lambda: steps_in(read()))[0]
        return {"seconds": done["time"] - began, "cpu_seconds": cpu_seconds(descendants(process.pid))}


def killed(
    argv: list[str], work: Work, here: Path, read: Lines, is_saved: Callable[[], bool]
) -> measure.Figures:
    with running(argv, work, here) as process:

        def is_due() -> bool:
            steps = steps_in(read())
            return bool(steps) and steps[-1]["step"] >= _KILL_AT_STEP and is_saved()

        wait_for(process, here, f"step {_KILL_AT_STEP} and a checkpoint", is_due)
        victim = rank_1(process.pid)
        died = time.time()
        os.kill(victim, signal.SIGKILL)

        def after() -> list[dict[str, Any]]:
            return [s for s in steps_in(read()) if s.get("restart") or s.get("restore_seconds")]

        done = wait_for(process, here, "step after the restart", after)[0]
        if done["step"] <= _SAVE_EVERY:
            raise RuntimeError(f"went on at step {done['step']}, not behind the checkpoint")
        loads = [line["restore_seconds"] for line in read() if line.get("restore_seconds")]
        return {"seconds": done["time"] - died, "load_seconds": loads[-1]}


def descendants(root: int) -> list[int]:
    """`root` and below, parents first."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def rank_1(root: int) -> int:
    for pid in descendants(root):
        with contextlib.suppress(OSError):
            environment = b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
            if b"\0RANK=1\0" in environment or Path(f"/proc/{pid}/comm").read_text() == "rank 1\n":
                return pid
    raise RuntimeError("there is no rank 1")


def cpu_seconds(pids: list[int]) -> float:
    """Of those that are alive."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main())
