"""When a training is profiled: at the step that the plan names, and when somebody asks while it runs.

While nobody does, a step costs one comparison, and rank 0 one look at a file. That somebody has asked travels
with the numbers that the ranks add up at each step anyway; what, only then.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from mlpipe._core import environment
from mlpipe._core.errors import MlpipeError
from mlpipe._core.serial import from_json
from mlpipe.plan.work import ProfilePlan
from mlpipe.store import profiles
from mlpipe.store.profiles import Profile, ProfileRequest
from mlpipe.train.profile_watch import PROFILE_FILE
from mlpipe.train.session import Session

if TYPE_CHECKING:
    from mlpipe.train.profiler import Profiled, Profiler

_log = logging.getLogger(__name__)
_NEVER = -1
_MESSAGE_BYTES = 4096


class Profiling:
    """Of one rank. The ranks call `before` and `after` alike."""

    def __init__(self, session: Session, plan: ProfilePlan | None) -> None:
        self._session = session
        self._plan = plan
        scratch = os.environ.get(environment.SCRATCH)
        self._file = Path(scratch) / PROFILE_FILE if scratch and session.rank == 0 else None
        self._begin = plan.at if plan is not None else _NEVER
        self._end = _NEVER
        self._is_asked = False
        self._profiler: Profiler | None = None

    def asked(self) -> bool:
        """On rank 0: whether somebody has asked, and none is under way."""
        return self._file is not None and self._end == _NEVER and self._file.exists()

    def agreed(self, step: int) -> None:
        """All ranks know that somebody has asked: from the step behind `step` on."""
        self._is_asked, self._begin = True, step + 1

    def before(self, step: int, loop: Profiled) -> None:
        """Of each step."""
        if step == self._begin:
            self._start(step, loop)
        if self._profiler is not None:
            self._profiler.step_begins(step)

    def after(self, step: int) -> None:
        """Of each step."""
        if self._profiler is not None:
            self._profiler.step_ends()
        if self._end != _NEVER and step >= self._end:  # replicas that join go on from a later step
            self.finish()

    def finish(self) -> None:
        """What was profiled is stored; a training that ends is profiled no further."""
        profiler, self._profiler, self._end = self._profiler, None, _NEVER
        if profiler is not None:
            self._session.watchdog.beat("writing a profile", profiler.profile.first_step)
            profiler.finish()

    def _start(self, step: int, loop: Profiled) -> None:
        session, attempt_key = self._session, self._session.plan.attempt_key
        self.finish()
        plan = self._plan
        planned = ProfileRequest(f"step-{step}", plan.steps, memory=plan.memory) if plan else None
        request = self._heard() if self._is_asked else planned
        self._is_asked, self._begin = False, plan.at if plan is not None and plan.at > step else _NEVER
        if request is None:
            return
        ranks = tuple(request.ranks_of(session.world.size))
        last = min(step + request.steps - 1, loop.plan.steps)
        profile = Profile(request.id, step, last - step + 1, ranks, request.memory, time.time())
        self._end = last
        try:
            if session.rank == 0:
                profiles.write_profile(session.store, attempt_key, profile)
            if session.rank in ranks:
                from mlpipe.train.profiler import Profiler

                self._profiler = Profiler(session, loop, profile)
        except (MlpipeError, RuntimeError) as error:  # no reason to end a training
            _log.warning("step %d is not profiled: %s", step, error)

    def _heard(self) -> ProfileRequest | None:
        """From rank 0, whose file it was."""
        message = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)
        if self._file is not None:
            text = self._file.read_bytes()
            self._file.unlink()
            if len(text) <= _MESSAGE_BYTES:
                message[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        dist.broadcast(message, 0)
        text = bytes(message.tolist()).rstrip(b"\0")
        return from_json(ProfileRequest, text) if text else None
