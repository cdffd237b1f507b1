"""Where a run stands: run.json, changed by conditional PUT; and the index, so that listing needs LIST only.

    index/<run-id>/000000-claimed   somebody is about to
    runs/<run-id>/pipeline.yaml     claims the id (never changed once there is run.json)
    runs/<run-id>/run.json          RunState
    runs/<run-id>/cancel            why, once somebody asked for it
    index/<run-id>/<seq>-<state>    one small key per transition of the run

States only move forward, but for `reopen` (a resume). Between a change of run.json and its index key a
process may die: run.json is the truth, and the next change or lease writes the key.
"""

from __future__ import annotations

import os
import random
import re
import socket
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from mlpipe._core.errors import DamagedError, StoreError
from mlpipe._core.ids import is_name
from mlpipe._core.serial import Sparse, from_json, to_json
from mlpipe.store.base import Store

if TYPE_CHECKING:
    from mlpipe._core.records import Record

SCHEMA_VERSION = 1
WAITS_FOR_STAGES = "waits for its other stages to be asked for"  # the message of a run that needs no driver
_CLAIM_SECONDS = 30.0  # between pipeline.yaml and run.json: who takes longer is gone
_NUM_TRIES = 40
_META: dict[str, type] = {  # of RunState, what is read without another look
    "set": list, "stages": list, "over": list, "allowed": dict, "init_from": dict,
    "trials": dict, "metric": dict, "batch": dict, "rungs": dict, "promoted": dict,
}  # fmt: skip
_INDEX_KEY = re.compile(r"index/([^/]+)/([0-9]{6,})-([a-z]+)")

RunStatus = Literal["pending", "running", "done", "failed", "cancelled"]
StageStatus = Literal["pending", "running", "done", "failed", "cancelled", "skipped"]
RUN_ENDED: tuple[RunStatus, ...] = ("done", "failed", "cancelled")
_RUN_ORDER = {"pending": 0, "running": 1, "done": 2, "failed": 2, "cancelled": 2}
_STAGE_ORDER = {**_RUN_ORDER, "skipped": 2}


@dataclass(frozen=True)
class Lease:
    """Who drives the run. `expires`: Unix seconds; the holder renews it long before. `namespace`, `started`:
    see `ProcessId`. `pod`, `pod_uid`: of a driver in a pod, "" of others. `deletes`: its holder drives
    nothing, but deletes checkpoints of the run."""

    holder: str
    host: str
    pid: int
    expires: float
    namespace: str = ""
    started: int = 0
    pod: str = ""
    pod_uid: str = ""
    deletes: Sparse[bool] = False


@dataclass(frozen=True)
class StageState:
    """`attempt`: the number of the latest one, 0 before the first. Times in Unix seconds."""

    state: StageStatus = "pending"
    attempt: int = 0
    message: str = ""
    started: float | None = None
    ended: float | None = None
    exit_code: int | None = None
    outcome: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RunState:
    """`seq` grows with each transition of `state`. Times in Unix seconds. `stages`: in the order of the
    pipeline's file."""

    schema_version: int
    run_id: str
    pipeline: str
    backend: str
    state: RunStatus
    created: float
    updated: float
    spec_digest: str
    seq: int
    stages: dict[str, StageState]
    driver: Lease | None
    message: str
    meta: dict[str, Any]

    @property
    def place(self) -> dict[str, Any]:
        """How its backend is reached; empty for one that is this machine."""
        return dict(self.meta.get(self.backend) or {})

    @property
    def is_under_way(self) -> bool:
        """Whether a stage runs."""
        return any(stage.state == "running" for stage in self.stages.values())

    @property
    def is_sweep(self) -> bool:
        """Whether its stages are trials, see `store/sweeps.py`."""
        return isinstance(self.meta.get("trials"), dict)

    def attempt_key(self, stage: str) -> str:
        """Under which the stage's latest attempt has its plan, records and logs."""
        return f"runs/{self.run_id}/stages/{stage}/attempt-{self.stages[stage].attempt}"


@dataclass(frozen=True)
class RunSummary:
    """What the index alone tells. `created`, `updated`: Unix seconds, by the store's clock."""

    run_id: str
    state: str
    seq: int
    created: float
    updated: float


def check_new_id(run_id: str) -> None:
    """Raises StoreError (input) for what a run cannot be called."""
    if not is_name(run_id):
        raise StoreError(f"{run_id!r} is not a run id", hint="use a-z, 0-9, '.', '_' and '-'", kind="input")


def create_run(
    store: Store,
    run_id: str,
    pipeline_yaml: str,
    spec_digest: str,
    stages: list[str],
    backend: str,
    meta: dict[str, Any],
) -> None:
    """Claims `run_id` and writes the run as pending. `meta["pipeline"]`, if given, is the pipeline's name.
    What a client that died left half claimed is taken over. Raises StoreError (input) when the id is
    taken."""
    check_new_id(run_id)
    text = pipeline_yaml.encode()
    taken = StoreError(
        f"run {run_id} exists already",
        where=store.url,
        hint=f"resume it (mlpipe resume {run_id}) or choose another id",
        kind="input",
    )
    if store.exists(_run_key(run_id)):
        raise taken
    store.put_if_absent(_claim_key(run_id), b"")
    if not store.put_if_absent(_pipeline_key(run_id), text) and store.get(_pipeline_key(run_id)) != text:
        deadline = time.monotonic() + _CLAIM_SECONDS
        while time.monotonic() < deadline:
            if store.exists(_run_key(run_id)):
                raise taken
            time.sleep(0.1)
        store.put(_pipeline_key(run_id), text)
    now = time.time()
    state = RunState(
        schema_version=SCHEMA_VERSION,
        run_id=run_id,
        pipeline=str(meta.get("pipeline", "")),
        backend=backend,
        state="pending",
        created=now,
        updated=now,
        spec_digest=spec_digest,
        seq=1,
        stages={name: StageState() for name in stages},
        driver=None,
        message="",
        meta={**meta, "stages": stages},  # whose order JSON objects, written by sorted keys, do not keep
    )
    if not store.put_if_absent(_run_key(run_id), to_json(state).encode()):
        raise taken
    if not store.exists(_pipeline_key(run_id)) or store.get(_pipeline_key(run_id)) != text:
        store.put(
            _pipeline_key(run_id), text
        )  # of one who took over in vain, or cleared the claim, meanwhile
    write_index_key(store, state)


def clear_claim(store: Store, run_id: str) -> bool:
    """Frees an id that was claimed and has no run; False if there is no such claim."""
    if not is_name(run_id) or store.exists(_run_key(run_id)):
        return False
    if not (store.exists(_pipeline_key(run_id)) or store.exists(_claim_key(run_id))):
        return False
    store.delete([_pipeline_key(run_id), _claim_key(run_id)])
    return True


def read_run(store: Store, run_id: str, *, known: bool = False) -> RunState:
    """Raises StoreError (input) when there is no such run; with `known`, which says that there was one, it
    is the store that lost it (infrastructure)."""
    return _read(store, run_id, known=known)[0]


def sweep_of_trial(store: Store, run_id: str) -> RunState | None:
    """The sweep of which a trial has this id, begun or not; None where there is none."""
    sweep_id, _, name = run_id.rpartition("-")
    if not sweep_id or not store.exists(_run_key(sweep_id)):
        return None
    sweep = read_run(store, sweep_id)
    return sweep if sweep.is_sweep and name in sweep.stages else None


def read_pipeline(store: Store, run_id: str) -> str:
    """The pipeline's YAML as it was asked for."""
    return store.get(_pipeline_key(run_id)).decode()


def list_runs(store: Store) -> list[RunSummary]:
    """All runs, oldest first, from one LIST of the index."""
    summaries: dict[str, RunSummary] = {}
    for info in store.list("index"):
        match = _INDEX_KEY.fullmatch(info.key)
        if match is None or not is_name(match[1]):
            continue
        run_id, seq, state = match[1], int(match[2]), match[3]
        old = summaries.get(run_id)
        created = min(old.created, info.modified) if old else info.modified
        if old is None or seq >= old.seq:
            summaries[run_id] = RunSummary(run_id, state, seq, created, info.modified)
    return sorted(summaries.values(), key=lambda run: (run.created, run.run_id))


def update_run(store: Store, run_id: str, change: Callable[[RunState], RunState]) -> RunState:
    """Reads, changes, writes on condition that nobody wrote in between; again if somebody did. `change` is
    called once per try and must be pure. Raises StoreError when a state would move backward."""
    return _update(store, run_id, change, _check_forward)


def reopen(
    store: Store,
    run_id: str,
    stages: Collection[str] | None = None,
    *,
    again: Collection[str] = (),
    forget_cancel: bool = True,
    seen: RunState | None = None,
) -> RunState:
    """For a resume: the run runs again, its stages that are not done (or `stages` of them) wait again,
    keeping their attempt's number, and a request to cancel is forgotten. So do those of `again`, which may be
    done. Raises StoreError (input) when the run is done and nothing is to be done again, or is no more as it
    was `seen`: somebody else resumed it."""

    def change(run: RunState) -> RunState:
        if seen is not None and run.seq != seen.seq:
            raise StoreError(f"run {run_id} was resumed meanwhile", where=store.url, kind="input")
        if run.state == "done" and not again:
            raise StoreError(f"run {run_id} is done", where=store.url, kind="input")
        waiting = {
            name: StageState(attempt=stage.attempt)
            for name, stage in run.stages.items()
            if name in again or (stage.state != "done" and (stages is None or name in stages))
        }
        return replace(run, state="running", stages={**run.stages, **waiting}, message="")

    if seen is not None:
        change(read_run(store, run_id))  # a request to cancel what somebody else resumed stays
    if forget_cancel:
        store.delete([_cancel_key(run_id)])
    return _update(store, run_id, change, lambda old, new: None)


def append_event(store: Store, attempt_key: str, event: Record) -> None:
    """A line in an attempt's events.jsonl (`_core.records`); its writers take turns."""
    from mlpipe._core.record_lines import encode  # who only lists runs has no need of it

    log = store.open_log(f"{attempt_key}/events.jsonl")
    log.write(encode(event))
    log.close()


def request_cancel(store: Store, run_id: str, why: str) -> None:
    """Leaves word for the driver; the first one counts. Raises StoreError (input) for an unknown run."""
    read_run(store, run_id)
    store.put_if_absent(_cancel_key(run_id), why.encode() or b"asked to")


def cancel_requested(store: Store, run_id: str) -> str | None:
    """Why, or None."""
    if not store.exists(_cancel_key(run_id)):
        return None
    return store.get(_cancel_key(run_id)).decode(errors="replace")


# how it is kept


def _run_key(run_id: str) -> str:
    return f"runs/{run_id}/run.json"


def _pipeline_key(run_id: str) -> str:
    return f"runs/{run_id}/pipeline.yaml"


def _claim_key(run_id: str) -> str:
    return f"index/{run_id}/000000-claimed"


def _cancel_key(run_id: str) -> str:
    return f"runs/{run_id}/cancel"


def write_index_key(store: Store, run: RunState) -> None:
    """The content tells writers apart, so that a lost reply is not mistaken for another's key."""
    content = f"{time.time()} {socket.gethostname()} {os.getpid()}\n".encode()
    store.put_if_absent(f"index/{run.run_id}/{run.seq:06d}-{run.state}", content)


def _read(store: Store, run_id: str, *, known: bool = False) -> tuple[RunState, str]:
    if not is_name(run_id):
        raise StoreError(f"{run_id!r} is not a run id", hint="mlpipe list shows them", kind="input")
    key = _run_key(run_id)
    try:
        data, etag = store.get_with_etag(key)
    except StoreError as error:
        if error.kind != "input":
            raise
        if known:
            raise StoreError(
                f"run {run_id} is gone: somebody deleted its run.json, or the store",
                where=store.url,
                hint="what had been saved of it is lost, unless the store keeps versions or backups",
            ) from None
        message, hint = f"there is no run {run_id}", "mlpipe list shows the runs"
        if store.exists(_pipeline_key(run_id)):
            message = f"run {run_id} was claimed and not begun: its client died, or is just about to"
            hint = f"submit it again, or free its id: mlpipe cancel {run_id}"
        elif (sweep := sweep_of_trial(store, run_id)) is not None:
            message = f"{run_id} is a trial of sweep {sweep.run_id} that has not begun"
            hint = f"what it waits for: mlpipe status {run_id}"
        raise StoreError(message, where=store.url, hint=hint, kind="input") from None
    try:
        run = from_json(RunState, data)
        _check_sound(run, run_id)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"not a run's state: {error}", where=f"{store.url}/{key}") from error
    if run.schema_version != SCHEMA_VERSION:
        raise DamagedError(
            f"run {run_id} was written by another version of mlpipe (schema {run.schema_version})",
            where=f"{store.url}/{key}",
            kind="input",
        )
    names = run.meta.get("stages")
    if isinstance(names, list):
        ordered = {name: run.stages[name] for name in map(str, names) if name in run.stages}
        run = replace(run, stages={**ordered, **run.stages})
    return run, etag


def _check_sound(run: RunState, run_id: str) -> None:
    """Others may write into the store. Raises ValueError for what no driver has written."""
    if run.run_id != run_id:
        raise ValueError(f"it is that of {run.run_id!r}")
    for name, stage in run.stages.items():
        if not is_name(name) or stage.attempt < 0:
            raise ValueError(f"stage {name!r}, attempt {stage.attempt}")
        metrics = stage.outcome.get("metrics") or {}
        if not isinstance(metrics, dict) or any(
            isinstance(value, (str, list, dict)) for value in metrics.values()
        ):
            raise ValueError(f"metrics of stage {name} are not numbers")
    for name, kind in _META.items():
        if not isinstance(run.meta.get(name, kind()), kind):
            raise ValueError(f"meta.{name} is not a {kind.__name__}")
    if not all(isinstance(text, str) for name in ("set", "over") for text in run.meta.get(name, ())):
        raise ValueError("meta.set or meta.over has more than texts")
    if not all(isinstance(values, dict) for values in run.meta.get("trials", {}).values()):
        raise ValueError("meta.trials has more than values by key")
    if (promoted := run.meta.get("promoted")) and not {"model", "version"} <= promoted.keys():
        raise ValueError("meta.promoted names no version of a model")


def _update(
    store: Store,
    run_id: str,
    change: Callable[[RunState], RunState],
    check: Callable[[RunState, RunState], None],
) -> RunState:
    for attempt in range(_NUM_TRIES):
        old, etag = _read(store, run_id, known=True)
        new = change(old)
        if new == old:
            return old
        check(old, new)
        moved = new.state != old.state
        # when a run ended stays, whoever holds it for a moment afterwards
        only_held = old.state in RUN_ENDED and replace(new, driver=old.driver) == old
        updated = old.updated if only_held else time.time()
        new = replace(new, updated=updated, seq=old.seq + 1 if moved else old.seq)
        if store.put_if_match(_run_key(run_id), to_json(new).encode(), etag):
            if moved:
                write_index_key(store, new)
            return new
        time.sleep(random.uniform(0, 0.01 * min(attempt + 1, 20)))
    raise StoreError(f"run.json changed {_NUM_TRIES} times under us", where=f"{store.url}/{_run_key(run_id)}")


def _check_forward(old: RunState, new: RunState) -> None:
    backward = []
    if old.state != new.state and _RUN_ORDER[new.state] <= _RUN_ORDER[old.state]:
        backward.append(f"the run from {old.state} to {new.state}")
    for name, stage in new.stages.items():
        before = old.stages[name].state if name in old.stages else "pending"
        if before != stage.state and _STAGE_ORDER[stage.state] <= _STAGE_ORDER[before]:
            backward.append(f"stage {name} from {before} to {stage.state}")
    if backward:
        raise StoreError(f"states only move forward: {', '.join(backward)}", where=old.run_id, kind="bug")
