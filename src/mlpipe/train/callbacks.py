"""Who is told how a training goes: objects of the user's own, and the trackers.

A hook gets the record that was just written (`_core/records.py`); it runs in the main thread, between two
steps. What it raises never reaches the training: the object that did is told nothing more. One that hangs is
found by the watchdog, which names it.
"""

from __future__ import annotations

import inspect
import logging
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mlpipe._core.records import Record
from mlpipe.plan.entry import Entry
from mlpipe.plan.work import CallbackPlan, TrainPlan
from mlpipe.train.contract import broken
from mlpipe.train.model import load_entry
from mlpipe.train.session import Session

_log = logging.getLogger(__name__)
HOOKS = ("on_start", "on_step", "on_validation", "on_checkpoint", "on_end")


@dataclass(frozen=True)
class Context:
    """Where a callback is: given to it as `context`, if it takes an argument of that name. `plan`: the
    document of plan.json."""

    run_id: str
    stage: str
    attempt: int
    restart: int
    rank: int
    world_size: int
    plan: dict[str, Any]


class Callbacks:
    """`members`: by name. `beat(doing, step)`: of the watchdog. False where there are none, and then nobody
    needs to call: a training without them pays for nothing."""

    def __init__(self, members: Sequence[tuple[str, Any]], beat: Callable[[str, int], None]) -> None:
        self._members = [*members]
        self._beat = beat
        self._step = 0
        self._has_started = False

    def __bool__(self) -> bool:
        return bool(self._members)

    def on_start(self, record: Record) -> None:
        """Before the first step of an attempt or restart: `Start`."""
        self._has_started = True
        self._call("on_start", record)

    def on_step(self, record: Record) -> None:
        """After an update: `Step`, with rates on rank 0."""
        self._call("on_step", record)

    def on_validation(self, record: Record) -> None:
        """After a validation."""
        self._call("on_validation", record)

    def on_checkpoint(self, record: Record) -> None:
        """When a checkpoint is committed, or has failed to be: `Save`."""
        self._call("on_checkpoint", record)

    def on_end(self, record: Record) -> None:
        """When a training that started is over on this rank, also by a failure: `End`."""
        if self._has_started:
            self._call("on_end", record)

    def _call(self, hook: str, record: Record) -> None:
        self._step = getattr(record, "step", None) or self._step
        for member in [*self._members]:
            name, callback = member
            if (call := getattr(callback, hook, None)) is None:
                continue
            self._beat(f"in {hook} of the callback {name}", self._step)
            try:
                call(record)
            except (Exception, SystemExit) as error:
                self._members.remove(member)
                _log.warning(
                    "the callback %s failed in %s and is called no more; the training goes on:\n%s",
                    name,
                    hook,
                    _in_their_frames(error),
                )


def make_callbacks(session: Session, plan: TrainPlan) -> Callbacks:
    """Those of this rank, trackers among them. Raises MlpipeError (input) for one that cannot be made."""
    members: list[tuple[str, Any]] = []
    if plan.track:
        from mlpipe.train.tracking import make_trackers

        members += make_trackers(session, plan.track)
    for one in plan.callbacks:
        if one.ranks == "all" or session.rank == 0:
            members.append((one.entry, _made(session, one)))
    return Callbacks(members, lambda doing, step: session.watchdog.beat(doing, step))


def _made(session: Session, plan: CallbackPlan) -> Any:
    make = load_entry(Entry(plan.entry, plan.args))
    args = dict(plan.args)
    if "context" in inspect.signature(make).parameters and "context" not in args:
        args["context"] = Context(
            run_id=session.plan.run_id,
            stage=session.plan.stage,
            attempt=session.plan.attempt,
            restart=session.process.restart,
            rank=session.rank,
            world_size=session.world.size,
            plan=session.plan.to_plain(),
        )
    try:
        callback = make(**args)
    except (Exception, SystemExit) as error:
        words = f"failed to make the callback: {type(error).__name__}: {error}"
        hint = (
            f"call it as mlpipe does: {plan.entry.rpartition(':')[2]}({', '.join(f'{a}=...' for a in args)})"
        )
        raise broken(plan.entry, words, hint) from error
    if not any(callable(getattr(callback, hook, None)) for hook in HOOKS):
        words = f"a {type(callback).__name__} has none of {', '.join(HOOKS)}"
        raise broken(plan.entry, words, "define one of these methods, each with one argument: the record")
    return callback


def _in_their_frames(error: BaseException) -> str:
    """The traceback from their first frame on: ours say nothing about their mistake."""
    own = error.__traceback__.tb_next if error.__traceback__ is not None else None
    return "".join(traceback.format_exception(type(error), error, own)).rstrip()
