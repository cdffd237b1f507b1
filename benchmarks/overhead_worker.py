"""One rank of `benchmarks.overhead`: mlpipe's own worker, started by mlpipe's own launcher, in which the
training of this rank is replaced by blocks of steps of mlpipe's loop and of plain scripts, in turn."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks import as_worker
from benchmarks.measure import Figures, rounds
from benchmarks.plain import PlainScript
from mlpipe.plan.work import TrainPlan
from mlpipe.train import prepare
from mlpipe.train.loss import cross_entropy_sum
from mlpipe.train.outcome import Outcome
from mlpipe.train.session import Session

_WARM_UP_STEPS = 4


def train(session: Session, plan: TrainPlan, progress: list[int]) -> Outcome:
    """Instead of the trainer's."""
    asked = json.loads(os.environ["BENCHMARK"])
    folder = Path(asked["folder"])
    ours = prepare.prepare(session, plan, progress, prepare.make_callbacks(session, plan))
    sides: dict[str, Callable[[], object]] = {
        "mlpipe": ours.step,
        "plain": PlainScript(plan, folder / "plain.log").step,
        "plain, mlpipe's loss": PlainScript(plan, folder / "loss.log", our_loss).step,
        "plain again": PlainScript(plan, folder / "control.log").step,
    }
    for step in sides.values():
        for _ in range(_WARM_UP_STEPS):
            step()
    tokens = asked["steps"] * plan.global_batch * plan.model.seq_len
    launcher = launcher_pid()
    began, before = time.perf_counter(), cpu_seconds(launcher)
    found = rounds(
        {name: block(step, asked["steps"], tokens, session) for name, step in sides.items()}, asked["rounds"]
    )
    # The launcher works (a little) as long as the run lasts: its CPU time is mlpipe's.
    busy = (cpu_seconds(launcher) - before) / (time.perf_counter() - began)
    for one in found:
        figures = one["mlpipe"]
        wall, cpu = tokens / figures["tokens_per_second"], tokens / figures["tokens_per_cpu_second"]
        figures["tokens_per_cpu_second"] = tokens / (cpu + busy * wall)
    if session.rank == 0:
        (folder / "answer.json").write_text(json.dumps({"rounds": found, "launcher_cores": busy}))
    ours.checkpointer.finish()
    return Outcome("done", ours.position.step, session.rank, time=time.time())


def block(step: Callable[[], object], num_steps: int, tokens: int, session: Session) -> Callable[[], Figures]:
    def run() -> Figures:
        session.watchdog.beat("measuring", 1)
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(num_steps):
            step()
        spent = [time.perf_counter() - wall, time.process_time() - cpu]
        slowest, total = torch.tensor(spent), torch.tensor(spent)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        dist.all_reduce(total)
        return {
            "tokens_per_second": tokens / slowest[0].item(),
            "tokens_per_cpu_second": tokens / total[1].item(),
        }

    return run


def our_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    total, count = cross_entropy_sum(logits, targets)
    return total / count


def launcher_pid() -> int:
    """The parent of torchrun, which is our parent."""
    return int(_stat(os.getppid())[1])


def cpu_seconds(pid: int) -> float:
    user, system = _stat(pid)[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on (the name before may hold anything)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


if __name__ == "__main__":
    as_worker.run(train)
