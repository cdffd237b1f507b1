"""One rank of `benchmarks.checkpoint`: mlpipe's own worker, whose training is replaced by windows of steps in
which one of the sides saves. There is one model and one loop: all sides save the same tensors under the same
steps."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.tensor import DTensor

from benchmarks import as_worker
from benchmarks.measure import Figures, rounds
from mlpipe.plan.work import TrainPlan
from mlpipe.train import loop, prepare, resuming
from mlpipe.train.checkpoint import Saved
from mlpipe.train.outcome import Outcome
from mlpipe.train.session import Session

_QUIET_STEPS = 2  # before and after a save
_PAUSE_SECONDS = 0.25  # between steps beside a first save: a process that starts gets the cores


class Mlpipe:
    """The loop's own save. Its stall is what the checkpointer itself records: inside the call that saves, and
    before the next update."""

    def __init__(self, made: loop.Loop) -> None:
        self.loop = made
        self.stall_seconds = 0.0
        self.ended = False
        report = made.checkpointer.on_saved

        def on_saved(saved: Saved) -> None:
            self.stall_seconds, self.ended = saved.stall_seconds, True
            report(saved)
            if saved.error:
                raise saved.error

        made.checkpointer.on_saved = on_saved

    def save(self) -> None:
        self.ended = False
        self.loop.save()

    def done(self) -> bool:  # the loop polls after each step
        return self.ended

    def clean(self) -> None:
        """Retention has removed the save before."""


class Dcp:
    """`async_save` of the same tensors; its stall is the time in that call. To its favour the state dict is
    there already. A process group of its own, as the training thread uses the default one meanwhile."""

    def __init__(self, made: loop.Loop, folder: Path, **settings: Any) -> None:
        self.state = state_dict(made)
        self.folder = folder
        self.settings = {"process_group": dist.new_group(backend="gloo"), **settings}
        self.stall_seconds = 0.0
        self.future: Future[Any] = Future()

    def save(self) -> None:
        began = time.perf_counter()
        self.future = dcp.async_save(self.state, checkpoint_id=self.folder, **self.settings)
        self.stall_seconds = time.perf_counter() - began

    def done(self) -> bool:
        return self.future.done()

    def clean(self) -> None:
        self.future.result()
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(self.folder)
        dist.barrier()


def state_dict(made: loop.Loop) -> dict[str, torch.Tensor]:
    """The tensors of mlpipe's checkpoint as DCP wants them: sharded ones as DTensors."""
    sharded = {
        item.name: item.parameter.data
        for item in made.model.shards
        if item.parameter is not None and isinstance(item.parameter.data, DTensor)
    }
    found: dict[str, torch.Tensor] = {}
    for item in resuming.stored(made.model, made.update):
        like = sharded.get(
            item.name.removeprefix("optim.").removesuffix(".exp_avg").removesuffix(".exp_avg_sq")
        )
        if like is None:
            found[item.name] = item.local
        else:
            found[item.name] = DTensor.from_local(
                item.local, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
            )
    return found


def train(session: Session, plan: TrainPlan, progress: list[int]) -> Outcome:
    """Instead of the trainer's."""
    asked = json.loads(os.environ["BENCHMARK"])
    folder = Path(asked["folder"])
    made = prepare.prepare(session, plan, progress, prepare.make_callbacks(session, plan))
    made.step()  # makes the moments
    shared_memory = DefaultStager(StagingOptions(False, True, False, False))  # reused by every save
    sides: dict[str, Mlpipe | Dcp] = {
        "mlpipe": Mlpipe(made),
        "DCP default": Dcp(made, folder / "dcp"),
        "DCP default again": Dcp(made, folder / "again"),
        "DCP process, shared memory": Dcp(
            made, folder / "tuned", async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            async_stager=shared_memory,
        ),
    }  # fmt: skip
    size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in sides["DCP default"].state.values())
    saves = {name: window(side, made, size_bytes / 2**30) for name, side in sides.items()}
    for save in saves.values():  # the first save of each makes its buffers and processes: not counted
        save(_PAUSE_SECONDS)
    found = rounds(saves, asked["rounds"])
    if session.rank == 0:
        answer = {"rounds": found, "gib": size_bytes / 2**30}
        (folder / "answer.json").write_text(json.dumps(answer))
    shared_memory.close()
    for child in multiprocessing.active_children():
        child.terminate()
    return Outcome("done", made.position.step, session.rank, time=time.time())


def window(side: Mlpipe | Dcp, made: loop.Loop, gib: float) -> Callable[..., Figures]:
    def quiet() -> list[float]:
        found = []
        for _ in range(_QUIET_STEPS):
            began = time.perf_counter()
            made.step()
            everyone(True)
            found.append(time.perf_counter() - began)
        return found

    def run(pause: float = 0.0) -> Figures:
        dist.barrier()
        usual = quiet()
        began = time.perf_counter()
        side.save()
        num_steps, ended = 0, False
        while not ended:
            made.step()
            time.sleep(pause)
            ended = everyone(side.done())
            num_steps += 1
        spent = time.perf_counter() - began
        side.clean()
        usual += quiet()
        extra = spent - num_steps * statistics.median(usual)
        # the slower rank holds up the other: the larger figure counts
        worst = torch.tensor([side.stall_seconds, extra, spent], dtype=torch.float64)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        names = ("stall_seconds_per_gib", "extra_seconds_per_gib", "save_seconds_per_gib")
        return {name: value / gib for name, value in zip(names, worst.tolist(), strict=True)}

    return run


def everyone(true: bool) -> bool:
    flag = torch.tensor([float(true)])
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)


if __name__ == "__main__":
    as_worker.run(train)
