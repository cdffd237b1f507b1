"""One rank of `benchmarks.instrument`: mlpipe's own worker and loop, with a clock around every part of the
instrument. The clocks' own cost is counted as the instrument's."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from mlpipe.kinds.train import worker as stage
from mlpipe.plan.work import TrainPlan
from mlpipe.train import prepare, recording, worker
from mlpipe.train.outcome import Outcome
from mlpipe.train.session import Session

_WARM_UP_STEPS = 5


class Clock:
    """Seconds inside the methods given to `around`; the outermost counts."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls = 0
        self._inside = False

    def around(self, owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return function(*args, **kwargs)
            began, self._inside = time.perf_counter(), True
            try:
                return function(*args, **kwargs)
            finally:
                self._inside = False
                self.calls += 1
                self.seconds += time.perf_counter() - began

        setattr(owner, name, timed)


def train(session: Session, plan: TrainPlan, progress: list[int]) -> Outcome:
    """Instead of the trainer's."""
    asked = json.loads(os.environ["BENCHMARK"])
    clock = Clock()
    # before the waits are hooked into the model: they are looked up by name at each call
    from mlpipe.train.parallel.waits import Waits

    for name in ("begin", "end", "take"):
        clock.around(Waits, name)
    clock.around(recording, "peak_memory_bytes")
    clock.around(session.recorder, "write")
    ours = prepare.prepare(session, plan, progress, prepare.make_callbacks(session, plan))
    for _ in range(_WARM_UP_STEPS):
        ours.step()
    clock.seconds, clock.calls = 0.0, 0
    began = time.perf_counter()
    for _ in range(asked["steps"]):
        ours.step()
    spent = time.perf_counter() - began
    if session.rank == 0:
        figures = {
            "instrument_seconds": clock.seconds / asked["steps"],
            "calls": clock.calls / asked["steps"],
            "step_seconds": spent / asked["steps"],
        }
        (Path(asked["folder"]) / "answer.json").write_text(json.dumps(figures))
    ours.checkpointer.finish()
    return Outcome("done", ours.position.step, session.rank, time=time.time())


if __name__ == "__main__":
    stage.train = train
    code = worker.main()
    sys.stdout.flush()
    os._exit(code)
