"""`python -m benchmarks.peers.rates PART`: tokens per second of mlpipe and its peers on the same work.

Every side is started once, by torchrun (mlpipe by its launcher), and stays; the sides take turns of a few
steps in the order A B C C B A while all others sleep in a read. Parts: `same`, the same settings for all, at
two sizes and precisions; `newcomer`, what each gives without settings; `compiled`, bf16 and torch.compile as
each recommends, until a fixed validation loss.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import launch, measure
from benchmarks.peers import results, sides
from benchmarks.peers.starts import cpu_seconds, descendants
from benchmarks.peers.work import Work
from mlpipe.plan.hardware import detect_hardware

_START_SECONDS, _STEPS_SECONDS = 300, 400
# Steps of a turn that do not count: the machine takes memory back from who sleeps, which costs a side that
# keeps its memory a tenth of its first step, and one that asks for it anew in each step nothing. No training
# sleeps.
WAKE_STEPS = 1
# Validation losses for `compiled`, fixed before any of its runs: it starts at 9.1, and after 36 steps in fp32
# ("same") every side of the smaller model was at 7.02. The default rounds take 54 steps.
TARGETS = {"7.4M": 7.5, "21M": 7.5}


@dataclass
class Side:
    """A running side: its process, a connection to each rank."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    ranks: dict[int, Any] = field(default_factory=dict)

    def ask(self, **command: Any) -> list[dict[str, Any]]:
        """To all ranks; their answers."""
        for connection in self.ranks.values():
            connection.write(json.dumps(command) + "\n")
            connection.flush()
        answers = []
        for connection in self.ranks.values():
            line = ""
            with contextlib.suppress(ConnectionError):
                line = connection.readline()
            if not line:
                raise RuntimeError(f"{self.name} ended: {self.log.read_text(errors='replace')[-3000:]}")
            answers.append(json.loads(line))
        return answers

    def steps(self, count: int) -> tuple[float, float]:
        """Wall seconds, and CPU seconds of the whole tree of processes, launchers included."""
        cpu, wall = cpu_seconds(descendants(self.process.pid)), time.perf_counter()
        self.ask(do="steps", count=count)
        wall = time.perf_counter() - wall
        return wall, cpu_seconds(descendants(self.process.pid)) - cpu

    def loss(self) -> float:
        losses = [answer["loss"] for answer in self.ask(do="validate")]
        return sum(losses) / len(losses)


@contextlib.contextmanager
def running(folder: Path, works: dict[str, tuple[str, Work]], **overrides: Any) -> Iterator[dict[str, Side]]:
    """All sides, by name; `works`: (script or "mlpipe", its work). They end with the block."""

    def command(script: str, work: Work, mine: Path) -> list[str]:
        if script == "mlpipe":
            plan = sides.mlpipe_plan(work, mine, **overrides)
            return sides.launcher(plan, mine, "benchmarks.peers.mlpipe_worker")
        return sides.torchrun(script)

    with started(folder, works, command, num_ranks=2) as found:
        yield found


@contextlib.contextmanager
def started(
    folder: Path,
    works: dict[str, tuple[str, Work]],
    command: Callable[[str, Work, Path], list[str]],
    num_ranks: int,
) -> Iterator[dict[str, Side]]:
    """As `running`; `command(script, work, folder)` starts a side."""
    path = folder / "socket"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(64)
    found: dict[str, Side] = {}
    try:
        for name, (script, work) in works.items():
            mine = folder / name.replace(" ", "-")
            mine.mkdir()
            argv = command(script, work, mine)
            found[name] = Side(name, sides.start(argv, work, mine / "out.log"), mine / "out.log")
            _connect(listener, found[name], num_ranks)
        yield found
    finally:
        for side in found.values():
            for connection in side.ranks.values():
                connection.close()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(side.process.pid, signal.SIGKILL)
            side.process.wait(30)
        listener.close()
        path.unlink(missing_ok=True)  # a SIGTERM may come while it is done


def _connect(listener: socket.socket, side: Side, num_ranks: int) -> None:
    """Waits for all ranks of the side that was just started."""
    deadline = time.monotonic() + _START_SECONDS
    listener.settimeout(1.0)
    while len(side.ranks) < num_ranks:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            if side.process.poll() is None and time.monotonic() < deadline:
                continue
            words = "\n".join(p.read_text(errors="replace")[-3000:] for p in side.log.parent.rglob("*.log"))
            raise RuntimeError(f"{side.name} did not start: {words}") from None
        connection.settimeout(_STEPS_SECONDS)
        stream = connection.makefile("rw")
        hello = json.loads(stream.readline())
        side.ranks[hello["rank"]] = stream


def in_turns(found: dict[str, Side], *, rounds: int, steps: int, tokens_per_step: int) -> list[measure.Round]:
    def block(side: Side) -> measure.Figures:
        side.steps(WAKE_STEPS)
        wall, cpu = side.steps(steps)
        tokens = steps * tokens_per_step
        return {"rate": tokens / wall, "cpu_rate": tokens / max(cpu, 0.01), "seconds": wall / steps}

    return measure.rounds({name: lambda side=side: block(side) for name, side in found.items()}, rounds)


def works_of(base: Work, settings: str, only: list[str]) -> dict[str, tuple[str, Work]]:
    named = {results.OURS: "mlpipe", **{sides.NAMES[script]: script for script in only}}
    named[results.CONTROL] = "raw_ddp"
    fields = {**base.__dict__, "settings": settings}
    return {name: (script, Work(**{**fields, "side": name})) for name, script in named.items()}


def same(folder: Path, base: Work, work: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    works = works_of(base, "same", arguments.peers)
    if arguments.quick:
        del works[results.CONTROL]  # a third start, of what has started
    with running(folder, works, strategy="ddp", precision=base.precision) as found:
        losses = {name: [round(side.loss(), 4)] for name, side in found.items()}
        for side in found.values():
            side.steps(arguments.warm_up)
        blocks = in_turns(
            found, rounds=arguments.rounds, steps=arguments.steps, tokens_per_step=2 * base.batch * 256
        )
        for name, side in found.items():
            losses[name].append(round(side.loss(), 4))
    print(f"{work}: validation loss at the start and the end: {losses}", flush=True)
    rows = [
        *results.against_best(work, "tokens a second", "tok/s", blocks, "rate", goal=1.0),
        *results.against_best(work, "tokens a CPU second", "tok/s", blocks, "cpu_rate", goal=None),
    ]
    return [{**row, "validation_losses": losses} for row in rows[:1]] + rows[1:]


def newcomer(folder: Path, base: Work, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The best of all, at equal losses after the same tokens; 1.5 times it where mlpipe chooses bf16."""
    low = detect_hardware(None).native_bf16 is not None
    with running(folder, works_of(base, "default", arguments.peers), precision="auto") as found:
        for side in found.values():
            side.steps(arguments.warm_up)
        blocks = in_turns(
            found, rounds=arguments.rounds, steps=arguments.steps, tokens_per_step=2 * base.batch * 256
        )
        losses = {name: round(side.loss(), 4) for name, side in found.items()}
    print(f"newcomer: validation loss after the same tokens: {losses}", flush=True)
    rows = results.against_best(
        "newcomer, 7.4M", "tokens a second, no settings", "tok/s", blocks, "rate", goal=1.5 if low else 1.0
    )
    more = {"validation_losses": losses, "precision": "bf16" if low else "fp32"}
    return [{**rows[0], **more}, *rows[1:]]


def compiled(folder: Path, base: Work, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds to the loss, see `results.to_loss`. A side is validated before its first step and after its
    blocks of each round; between two of these the steps are interpolated."""
    works = works_of(base, "tuned", arguments.peers)
    target = arguments.target_loss or TARGETS[arguments.model]
    with running(folder, works, precision="bf16", compile="model") as found:
        curves, compile_seconds = {}, {}
        for name, side in found.items():
            began = time.perf_counter()  # to validate is compiled, too
            curves[name] = [(0, side.loss())]
            side.steps(2)
            compile_seconds[name] = round(time.perf_counter() - began, 2)
        print(f"compiled: a validation and two steps took {compile_seconds} at first", flush=True)
        for side in found.values():
            side.steps(arguments.warm_up)
        done = 2 + arguments.warm_up
        blocks = []
        for _ in range(arguments.rounds):
            blocks += in_turns(found, rounds=1, steps=arguments.steps, tokens_per_step=2 * base.batch * 256)
            done += 2 * (WAKE_STEPS + arguments.steps)
            for name, side in found.items():
                curves[name].append((done, side.loss()))
    needed = {name: steps_to(curve, target) for name, curve in curves.items()}
    last = {name: round(curve[-1][1], 4) for name, curve in curves.items()}
    print(f"compiled: validation loss {target} after {needed} steps; after {done} it is {last}", flush=True)
    work = f"bf16 and compile, {arguments.model}"
    rows = results.to_loss(work, blocks, needed, target, done)
    more = {"steps_needed": needed, "validation_losses": last, "first_seconds": compile_seconds}
    rate = results.against_best(work, "tokens a second", "tok/s", blocks, "rate", goal=None)
    return [{**rows[0], **more}, *rows[1:], *rate]


def steps_to(curve: list[tuple[int, float]], target: float) -> float | None:
    """The first point of the curve at or below `target`, None where there is none."""
    for (before, high), (after, low) in pairwise(curve):
        if low <= target:
            return before + (after - before) * (high - target) / (high - low)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("same", "newcomer", "compiled"))
    parser.add_argument("--quick", action="store_true", help="one short round of a tiny model: does it run?")
    parser.add_argument("--model", choices=("7.4M", "21M"), default="7.4M", help="of `same` and `compiled`")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="of `same`")
    parser.add_argument("--peers", nargs="*", default=list(sides.SCRIPTS), choices=list(sides.SCRIPTS))
    parser.add_argument("--target-loss", type=float, help="of `compiled`; default: fixed for each model")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2, help="steps in a block")
    parser.add_argument("--warm-up", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4, help="samples of a rank and step")
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    arguments = parser.parse_args()
    model = sides.WIDE if arguments.model == "21M" else sides.GPT
    if arguments.quick:
        model = sides.GPT | {"dim": 64, "num_layers": 1, "vocab_size": 512}
        arguments.rounds, arguments.steps, arguments.warm_up = 2, 1, 1
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(1))  # and so ends what it started
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokens = launch.corpus(folder, vocab_size=model["vocab_size"])
        base = Work(
            side="", settings="", precision="fp32", model=model, tokens=str(tokens), batch=arguments.batch,
            seed=0, lr=1e-3, grad_clip=1.0, socket=str(folder / "socket"),
        )  # fmt: skip
        if arguments.part == "same":
            base = Work(**{**base.__dict__, "precision": arguments.precision})
            work = f"{arguments.model} {arguments.precision}"
            rows = same(folder, base, work, arguments)
        elif arguments.part == "newcomer":
            rows = newcomer(folder, base, arguments)
        else:
            rows = compiled(folder, Work(**{**base.__dict__, "precision": "bf16"}), arguments)
    measure.tell(
        "peers", rows, arguments.results, rounds=arguments.rounds, steps_per_block=arguments.steps,
        batch_per_rank=arguments.batch, load_before=load_before,
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
