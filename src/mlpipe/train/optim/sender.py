"""A thread that talks to other ranks while this one computes: one thing after the other, in the order in
which it is given them, which is the same on all ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from queue import SimpleQueue
from typing import Any

import torch


class Answer:
    """What `work` will have given."""

    def __init__(self, work: Callable[[], Any], device: torch.device) -> None:
        self._work = work
        self._device = device
        self._done = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None
        self._given = self._heard = None  # on CUDA: when the work may begin, and when it is done
        if device.type == "cuda":
            self._given = torch.cuda.current_stream(device).record_event()

    def run(self, stream: Any) -> None:
        """In the thread."""
        try:
            with torch.no_grad(), nullcontext() if stream is None else torch.cuda.stream(stream):
                if stream is not None:
                    stream.wait_event(self._given)
                self._result = self._work()
                self._heard = None if stream is None else stream.record_event()
        except BaseException as error:
            self._error = error
        self._done.set()

    def wait(self) -> Any:
        """The result, or the error. The collectives in it have deadlines, and the watchdog has one."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        if self._heard is not None:
            torch.cuda.current_stream(self._device).wait_event(self._heard)
        return self._result


class Sender:
    """Ends with the process, whatever it waits for. `device`: of the tensors, which on CUDA are worked on in
    a stream beside the computing one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._queue: SimpleQueue[Answer] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="sender", daemon=True)
        self._thread.start()

    def send(self, work: Callable[[], Any]) -> Answer:
        """Runs `work` when all that was given before is done."""
        answer = Answer(work, self._device)
        self._queue.put(answer)
        return answer

    def _serve(self) -> None:
        stream = None
        if self._device.type == "cuda":
            # the thread's is the first: to leave a stream would make a context there
            torch.cuda.set_device(self._device)
            stream = torch.cuda.Stream(self._device)
        while True:
            self._queue.get().run(stream)
