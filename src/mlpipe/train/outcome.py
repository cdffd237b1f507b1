"""How a worker tells the launcher how it ended: one small JSON file a rank in the scratch folder.

`outcome-<rank>.json` is written at the end; `fatal-<rank>.json` by a failure that a restart would only
repeat (bad input, NaN, a hang): the launcher then ends the run, and a restarted worker leaves at once.
Standard library only: the launcher reads these without torch.
"""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mlpipe._core import environment
from mlpipe._core.errors import ErrorKind, MlpipeError
from mlpipe.train import debugger


@dataclass
class Outcome:
    """`outcome`: "done", "saved" (on a signal, before the last step) or "failed". `cause`, besides `kind`:
    "not_finite", "hang", "out_of_memory" or `store/outcome.py`'s NODE_FAULT, which are told apart from other
    failures. `killed_here`: a signal ended a process of this node."""

    outcome: str
    step: int = 0
    rank: int = 0
    kind: ErrorKind | None = None
    message: str = ""
    where: str | None = None
    hint: str | None = None
    checkpoint: str | None = None
    time: float = 0.0
    details: dict[str, Any] = field(default_factory=dict)
    cause: str | None = None
    killed_here: bool = False


def failed(error: BaseException, *, rank: int, step: int) -> Outcome:
    """What a rank leaves of an exception."""
    left = debugger.was_left(error)
    if isinstance(error, MlpipeError) and not left:
        return Outcome(
            "failed",
            step,
            rank,
            error.kind,
            error.message,
            error.where,
            error.hint,
            time=time.time(),
            cause=getattr(error, "cause", None),
        )
    text = "left in the debugger" if left else f"{type(error).__name__}: {error}".strip()
    place = f"rank {rank}, step {step}"
    return Outcome("failed", step, rank, "failed", text, place, time=time.time())


def hang(rank: int, step: int, words: str, *, waiting: bool = False) -> Outcome:
    """`waiting`: for others, so that one of those is to blame."""
    hint = (
        "the stacks of every rank lie in the attempt's postmortem/ folder; "
        "raise `hang_timeout` if this step is just slow"
    )
    return Outcome(
        "failed",
        step,
        rank,
        "failed",
        f"rank {rank} {words}",
        where=f"rank {rank}",
        hint=hint,
        time=time.time(),
        details={"waiting": True} if waiting else {},
        cause="hang",
    )


def any_hang(scratch: Path) -> bool:
    """Whether a rank has said that it, or another one, hangs."""
    return any(read(path).cause == "hang" for path in fatal_files(scratch))


def write(scratch: Path, outcome: Outcome, *, fatal: bool = False) -> None:
    """Leaves it for the launcher, whole. `fatal`: no restart would help, so the run is over."""
    name = f"{'fatal' if fatal else 'outcome'}-{outcome.rank}.json"
    temporary = scratch / f".{name}.{os.getpid()}"
    temporary.write_text(json.dumps(asdict(outcome)))
    temporary.rename(scratch / name)


def node_name() -> str:
    """Of the machine, as whoever places workers calls it."""
    return os.environ.get(environment.NODE_NAME) or socket.gethostname()


def forget(scratch: Path, rank: int) -> None:
    """What the rank left before a restart."""
    (scratch / f"outcome-{rank}.json").unlink(missing_ok=True)


def read(path: Path) -> Outcome:
    """Of a file that `write` left."""
    return Outcome(**json.loads(path.read_text()))


def fatal_files(scratch: Path) -> list[Path]:
    """What ranks have left that ends the run."""
    return sorted(scratch.glob("fatal-*.json"))
