"""Processes beside a rank that read its samples, and what is said when one of them ends or stands still.

They are forks of the rank: the data set is there at once, nothing is imported again, and its memory is
shared until somebody writes to it. An answer comes as one file in memory that both map, so that no sample is
copied on its way, and /dev/shm may be small. torch's DataLoader does not know at which sample a process was
killed, cannot grow, and raises from a signal handler, in the middle of whatever the rank is doing.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import mmap
import multiprocessing
import os
import pickle
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection, reduction, util
from typing import Any

import torch

from mlpipe._core.errors import MlpipeError, TrainError
from mlpipe.plan.entry import package_of
from mlpipe.plan.work import TrainPlan
from mlpipe.train.data import microbatch
from mlpipe.train.stop import die_with_parent

_PR_SET_NAME = 15
_ALIGNMENT = 64
_END_SECONDS = 5.0
_NONE = -1
_NO_MORE = "no more"


class DataWorkers:
    """`serve(job)` in processes, each of which does its jobs in the order in which it is given them.
    `patience_seconds`: how long an answer is waited for since the worker began its last sample: one that is
    slow but moves is no hang. `beat` is called meanwhile. `packages`: of the user,
    in whose code the line of a failure is looked for."""

    def __init__(
        self,
        serve: Callable[[Any], Any],
        *,
        patience_seconds: float,
        beat: Callable[[], None],
        packages: frozenset[str],
    ) -> None:
        self.serve = serve
        self.patience_seconds = patience_seconds
        self.beat = beat
        self.packages = packages
        self.workers: list[_Worker] = []
        # before multiprocessing itself would end them, by a signal that they do not hear
        util.Finalize(self, _end, args=(self.workers,), exitpriority=0)

    def __len__(self) -> int:
        return len(self.workers)

    def grow(self, number: int) -> None:
        """To `number` processes. A signal that comes as one begins is delivered when it has forgotten the
        rank's handlers."""
        while len(self.workers) < number:
            context = multiprocessing.get_context("fork")
            own, theirs = context.Pipe()
            sample = context.RawArray(ctypes.c_int64, [_NONE])
            process = context.Process(
                target=_work,
                args=(len(self.workers), self.serve, sample, theirs, os.getpid(), self.packages),
                daemon=True,
            )
            before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
            try:
                with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
                    process.start()  # Python 3.12 warns of threads, which a fork does not have
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
            self.workers.append(_Worker(len(self.workers), process, own, sample))

    def ask(self, worker: int, job: Any) -> None:
        """Returns at once."""
        one = self.workers[worker]
        try:
            one.connection.send(job)
        except OSError:
            raise one.ended() from None
        one.num_asked += 1

    def answer(self, worker: int) -> Any:
        """To the first job of that worker which is not answered yet. Raises TrainError: what the job raised,
        how the process ended, or that it stands still."""
        one, began = self.workers[worker], time.monotonic()
        sample = one.sample[0]
        while not connection.wait([one.connection], min(1.0, self.patience_seconds / 4)):
            self.beat()  # we know more of what it waits for than the watchdog
            now = time.monotonic()
            if one.sample[0] != sample:
                sample, began = one.sample[0], now
            if now - began > self.patience_seconds:
                raise one.stands_still(now - began)
        try:
            kind, sent = one.connection.recv()
            answer = _unpack(sent, reduction.recv_handle(one.connection)) if kind == "done" else sent
        except (EOFError, OSError):
            raise one.ended() from None
        one.num_asked -= 1
        if kind == "failed":
            raise answer.as_error()
        return answer

    def least_asked(self) -> int:
        """The worker with the fewest jobs before it."""
        return min(range(len(self.workers)), key=lambda number: self.workers[number].num_asked)

    def close(self) -> None:
        """Ends all of them."""
        _end(self.workers)


def data_workers(plan: TrainPlan, beat: Callable[[], None]) -> Callable[[Callable[[Any], Any]], DataWorkers]:
    """Makes them for a `serve`, as the plan asks for."""
    return partial(
        DataWorkers,
        patience_seconds=plan.hang_timeout_seconds,
        beat=beat,
        packages=frozenset(package_of(one.entry) for one in plan.data.functions),
    )


@dataclass
class _Worker:
    """`sample[0]`: number of the sample that it reads, in memory of both."""

    number: int
    process: Any
    connection: connection.Connection
    sample: Any
    num_asked: int = 0

    def ended(self) -> TrainError:
        """It has closed its end of the pipe, or is about to be gone."""
        self.process.join(_END_SECONDS)
        code = self.process.exitcode
        how, hint = "ended without a word", "the rank's log may have more"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
            if -code == signal.SIGKILL:
                hint = "perhaps by the kernel, for memory: use fewer data.workers, or smaller samples"
        elif code:
            how = f"ended with code {code}"
        return TrainError(
            f"data worker {self.number} (process {self.process.pid}) {how}{self._place()}",
            where="data.workers",
            hint=hint,
            kind="infrastructure",
        )

    def stands_still(self, seconds: float) -> TrainError:
        """Its stack goes to the rank's log."""
        os.kill(self.process.pid, signal.SIGUSR1)
        self.process.join(0.2)  # until faulthandler has written
        error = TrainError(
            f"data worker {self.number} (process {self.process.pid}) gave nothing for {seconds:.0f} s"
            f"{self._place()}",
            where="data.workers",
            hint="its stack is in the rank's log; raise hang_timeout if reading a step is just slow",
        )
        error.fatal, error.cause = True, "hang"  # type: ignore[attr-defined]
        return error

    def _place(self) -> str:
        return f" at sample {self.sample[0]}" if self.sample[0] != _NONE else ""


def _end(workers: list[_Worker]) -> None:
    for one in workers:
        with contextlib.suppress(OSError):
            one.connection.send(_NO_MORE)
    deadline = time.monotonic() + _END_SECONDS
    for one in workers:
        one.process.join(max(0.0, deadline - time.monotonic()))
        one.process.kill()
        one.process.join(_END_SECONDS)
        one.connection.close()
    workers.clear()


@dataclass
class _Failure:
    """What went wrong in a worker, for the rank. `place`: file:line of the user's."""

    worker: int
    sample: int
    error: Exception
    text: str
    place: str | None

    def as_error(self) -> TrainError:
        error = self.error
        at = f" at sample {self.sample}" if self.sample != _NONE else ""
        if isinstance(error, MlpipeError):
            made = TrainError(error.message, where=error.where, hint=error.hint, kind=error.kind)
        else:
            made = TrainError(
                f"data worker {self.worker} failed{at}: {type(error).__name__}: {error}",
                where=self.place,
                hint="its traceback is in the rank's log",
            )
        made.original = error  # type: ignore[attr-defined]
        made.add_note(self.text)
        return made


def _work(
    number: int,
    serve: Callable[[Any], Any],
    sample: Any,
    jobs: connection.Connection,
    parent: int,
    packages: frozenset[str],
) -> None:
    """In the fork. The rank decides when it ends, also on a signal to all of its session: by closing the
    pipe, or by its own end."""
    die_with_parent(parent)
    signal.set_wakeup_fd(-1)
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    ctypes.CDLL(None).prctl(_PR_SET_NAME, f"data {number}".encode())
    torch.set_num_threads(1)  # those of the rank's OpenMP are not here
    microbatch.reading = sample
    while True:
        try:
            job = jobs.recv()
        except EOFError:
            return
        if job == _NO_MORE:
            return
        try:
            sent, file = _pack(serve(job))
        except Exception as error:
            text = traceback.format_exc()
            jobs.send(("failed", _Failure(number, sample[0], _plain(error), text, _place(error, packages))))
            continue
        jobs.send(("done", sent))
        reduction.send_handle(jobs, file, parent)
        os.close(file)


def _plain(error: Exception) -> Exception:
    """Of a kind that can be sent."""
    try:
        return pickle.loads(pickle.dumps(error))  # noqa: S301  # our own
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


def _place(error: Exception, packages: frozenset[str]) -> str | None:
    lines = [
        f"{frame.f_code.co_filename}:{line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").partition(".")[0] in packages
    ]
    return lines[-1] if lines else None


class _Pickler(pickle.Pickler):
    """All but tensors, for which it writes down where they will lie. Of one that comes twice once."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: dict[int, tuple[torch.Tensor, tuple[int, torch.dtype, tuple[int, ...]]]] = {}
        self.end = 0

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return None
        if id(value) not in self.tensors:
            place = (self.end, value.dtype, tuple(value.shape))
            self.tensors[id(value)] = (value, place)
            self.end += -(-value.nbytes // _ALIGNMENT) * _ALIGNMENT
        return self.tensors[id(value)][1]


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, memory: mmap.mmap) -> None:
        super().__init__(io.BytesIO(data))
        self.memory = memory
        self.tensors: dict[int, torch.Tensor] = {}

    def persistent_load(self, place: Any) -> torch.Tensor:
        offset, dtype, shape = place
        if not torch.Size(shape).numel():
            return torch.empty(shape, dtype=dtype)
        if offset not in self.tensors:
            self.tensors[offset] = _lying_at(self.memory, offset, dtype, shape)
        return self.tensors[offset]


def _lying_at(memory: mmap.mmap, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=offset).view(dtype).view(shape)


def _pack(value: Any) -> tuple[bytes, int]:
    """The pickle, and the file (memfd_create(2)) in which its tensors lie."""
    written = io.BytesIO()
    pickler = _Pickler(written)
    pickler.dump(value)
    file = os.memfd_create("samples", os.MFD_CLOEXEC)
    os.ftruncate(file, max(1, pickler.end))
    memory = mmap.mmap(file, max(1, pickler.end))
    for tensor, (offset, dtype, shape) in pickler.tensors.values():
        if tensor.numel():
            _lying_at(memory, offset, dtype, shape).copy_(tensor.detach())
    return written.getvalue(), file


def _unpack(data: bytes, file: int) -> Any:
    """The tensors hold the memory as long as they live."""
    try:
        memory = mmap.mmap(file, 0)
    finally:
        os.close(file)
    return _Unpickler(data, memory).load()
