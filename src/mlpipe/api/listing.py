"""The runs of a store, chosen and sorted by what they were asked for and what came of them.

The index alone tells names and states. Only what an expression asks for beyond these is read of each run:
run.json for its metrics, pipeline.yaml for keys of the pipeline, records for the last step of a training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from mlpipe._core.errors import MlpipeError, SubmitError
from mlpipe._core.serial import leaves
from mlpipe._core.where import Where, parse
from mlpipe.api.metrics import column, metrics
from mlpipe.store import runs as stored
from mlpipe.store.open import default_url, open_store
from mlpipe.store.runs import RunState, RunSummary

if TYPE_CHECKING:
    from mlpipe.api.run import Run
    from mlpipe.store.base import Store

_TIMES = ("created", "updated")
OF_INDEX = ("run", "state", *_TIMES)
OF_RUN = ("pipeline", "backend", "seconds", "user", "host", "git_commit", "message")
OF_RECORDS = ("step", "loss", "grad_norm", "tokens_per_second", "mfu_ratio")
_NUM_READERS = 8
_Read = TypeVar("_Read")
_TOLD_SECONDS = 3.0  # between two words on how far the reading is


@dataclass(frozen=True)
class Listed:
    """A run, and what it has of the fields that were asked for (None: nothing)."""

    summary: RunSummary
    values: dict[str, Any] = field(default_factory=dict)


def runs(store: str | None = None, *, where: str | None = None, sort: str | None = None) -> list[Run]:
    """The runs of a store, oldest first. `where`: only those of which it holds, such as
    `"state == done and train.lr < 1e-3"`; `sort`: by a field, `"-val_loss"` from above; runs without it come
    last. Raises SubmitError (input) for an expression that cannot be understood, or a field that no run
    has."""
    from mlpipe.api.run import Run

    there = open_store(default_url(store))
    return [Run.of(there, listed.summary.run_id) for listed in select(there, where, sort)]


def select(
    store: Store, where: str | None, sort: str | None, note: Callable[[str], None] = lambda text: None
) -> list[Listed]:
    """See `runs`. `note`: told how far the reading is, where it takes long."""
    holds = parse(where, _TIMES) if where is not None else Where((), lambda lookup: True)
    by = (sort or "").removeprefix("-")
    shown = tuple(dict.fromkeys([*holds.fields, *filter(None, [by])]))
    summaries = stored.list_runs(store)
    if not shown:
        return [Listed(summary) for summary in summaries]
    known = _Known()

    def look(summary: RunSummary) -> Listed | None:
        facts = _Facts(store, summary, known)
        return Listed(summary, {name: facts(name) for name in shown}) if holds.holds(facts) else None

    chosen = [one for one in read_each(summaries, look, note) if one is not None]
    known.check()
    if not by:
        return chosen
    have = [one for one in chosen if not _is_absent(one.values[by])]
    have.sort(key=lambda one: _order(one.values[by]), reverse=(sort or "").startswith("-"))
    return have + [one for one in chosen if _is_absent(one.values[by])]


def read_each(
    summaries: list[RunSummary], look: Callable[[RunSummary], _Read], note: Callable[[str], None]
) -> Iterator[_Read]:
    """What `look` gives of each. Several at a time: each is a few round trips to a store. `note`: see
    `select`."""
    with ThreadPoolExecutor(_NUM_READERS) as pool:
        told = time.monotonic()
        try:
            for number, one in enumerate(pool.map(look, summaries)):
                if time.monotonic() - told > _TOLD_SECONDS:
                    told = time.monotonic()
                    note(f"read {number} of {len(summaries)} runs")
                yield one
        finally:
            pool.shutdown(cancel_futures=True)


def _is_absent(value: Any) -> bool:
    """NaN, which is less than nothing and nothing is less than, cannot be sorted."""
    return value is None or value != value


def _order(value: Any) -> tuple[int, Any]:
    """Numbers before texts."""
    return (0, value) if isinstance(value, int | float) else (1, str(value))


class _Known:
    """Which of the fields that were asked for some run had, and which keys there are."""

    def __init__(self) -> None:
        self.seen: dict[str, bool] = {}
        self.keys: set[str] = {*OF_INDEX, *OF_RUN, *OF_RECORDS}

    def check(self) -> None:
        """Raises SubmitError (input) for a field that no run has, which is a slip."""
        for name, was_seen in self.seen.items():
            if not was_seen and name not in self.keys:
                from difflib import get_close_matches

                close = get_close_matches(name, sorted(self.keys), n=1, cutoff=0.5)
                hint = f"did you mean {close[0]}? " if close else ""
                raise SubmitError(
                    f"no run has a field {name!r}",
                    hint=f"{hint}There are keys of pipelines like train.steps, metrics like val_loss, and "
                    f"{', '.join((*OF_INDEX, *OF_RUN, *OF_RECORDS))}",
                    kind="input",
                )


class _Facts:
    """The fields of one run, each read when it is asked for."""

    def __init__(self, store: Store, summary: RunSummary, known: _Known) -> None:
        self._store, self._summary, self._known = store, summary, known

    def __call__(self, name: str) -> Any:
        value = self._value(name)
        self._known.seen[name] = self._known.seen.get(name, False) or value is not None
        return value

    def _value(self, name: str) -> Any:
        if name in OF_INDEX:
            return self._summary.run_id if name == "run" else getattr(self._summary, name)
        run = self._run
        if run is None:
            return None
        if name == "seconds":
            return run.updated - run.created
        if name in OF_RUN:
            return getattr(run, name) if hasattr(run, name) else run.meta.get(name)
        measured = self._outcomes.get(name)
        if measured is not None:
            return measured
        if name in OF_RECORDS or name.startswith("val_"):
            return self._last.get(name)
        return find(self._spec, name)

    @cached_property
    def _run(self) -> RunState | None:
        try:
            return stored.read_run(self._store, self._summary.run_id)
        except MlpipeError:  # only claimed, or of another version
            return None

    @cached_property
    def _outcomes(self) -> dict[str, Any]:
        """Metrics of evaluations, of several the last one's."""
        outcomes: dict[str, Any] = {}
        for stage in self._run.stages.values() if self._run is not None else ():
            told = (stage.outcome or {}).get("metrics")
            if isinstance(told, dict):
                outcomes |= {**told, **{column(name): value for name, value in told.items()}}
        self._known.keys |= outcomes.keys()
        return outcomes

    @cached_property
    def _last(self) -> dict[str, Any]:
        """Of the last step, and of the last validation."""
        last: dict[str, Any] = {}
        try:
            if self._run is not None:
                for row in metrics(self._store, self._run, self._run.stages):
                    last |= row
        except MlpipeError:
            return {}
        self._known.keys |= last.keys()
        return last

    @cached_property
    def _spec(self) -> dict[str, Any]:
        from mlpipe.submit.planning import load_stored

        try:
            run = self._run
            assert run is not None
            pipeline = load_stored(self._store, run.run_id, [str(one) for one in run.meta.get("set", [])])
        except MlpipeError:
            return {}
        keys = leaves(pipeline.model_dump(mode="json", by_alias=True, exclude_none=True))
        self._known.keys |= {short(key) for key in keys}
        return keys


def short(key: str) -> str:
    """As `--set` takes it, where the stage is called by its kind: `train.steps`."""
    parts = key.split(".")
    if parts[0] == "stages":
        parts = parts[1:]
        if len(parts) > 2 and parts[0] == parts[1]:
            parts = parts[1:]
    return ".".join(parts)


def find(keys: dict[str, Any], name: str) -> Any:
    """The value of the key that `name` means: the whole path, or some of its parts in their order, the last
    one among them (`train.lr` is `stages.train.train.optimizer.lr`); of several the shortest. None where
    there is none. Raises SubmitError (input) where several are as short."""
    if name in keys:
        return keys[name]
    wanted = name.split(".")
    meant = [key for key in keys if _means(wanted, key.split("."))]
    fewest = min((key.count(".") for key in meant), default=0)
    shortest = [key for key in meant if key.count(".") == fewest]
    if len(shortest) > 1:
        raise SubmitError(
            f"{name!r} may be {' or '.join(shortest)}", hint="write more of its path", kind="input"
        )
    return keys[shortest[0]] if shortest else None


def _means(wanted: list[str], path: list[str]) -> bool:
    if wanted[-1] != path[-1]:
        return False
    rest = iter(path)
    return all(part in rest for part in wanted)
