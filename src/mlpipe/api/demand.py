"""The GPU-hours that the runs of a store wanted, read from what each left there: run.json says which stages
ran, the pipeline which GPUs they asked for, and the events of each attempt when it got them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mlpipe._core.errors import MlpipeError
from mlpipe._core.records import Launched, Submitted
from mlpipe.api.listing import read_each
from mlpipe.observe.demand import Use
from mlpipe.observe.records import decode_lines, read_records
from mlpipe.plan.build import stage_resources
from mlpipe.plan.references import stage_named
from mlpipe.spec.model import Resources
from mlpipe.store import leases
from mlpipe.store import runs as stored
from mlpipe.store.base import Store
from mlpipe.store.outcome import read_outcome
from mlpipe.store.runs import RUN_ENDED, RunState, RunSummary
from mlpipe.submit.planning import load_stored

UNNAMED = "GPU"  # of a stage that describes its GPUs and gives them no name


@dataclass(frozen=True)
class Demand:
    """`unread`: runs that could not be read, and are not in `uses`."""

    uses: tuple[Use, ...]
    num_runs: int
    unread: tuple[str, ...]


def demand(store: Store, since: float, now: float, note: Callable[[str], None] = lambda text: None) -> Demand:
    """Of runs that were under way after `since`; Unix seconds. What still runs counts up to `now`, or, where
    its driver is gone, up to then. `note`: told how far the reading is, where it takes long."""
    chosen = [
        summary
        for summary in stored.list_runs(store)
        if summary.state != "claimed" and (summary.state not in RUN_ENDED or summary.updated >= since)
    ]

    def look(summary: RunSummary) -> list[Use] | None:
        try:
            return list(_uses(store, stored.read_run(store, summary.run_id), now))
        except (MlpipeError, ValueError):  # damaged, of another version, or deleted meanwhile
            return None

    read = list(read_each(chosen, look, note))
    unread = tuple(run.run_id for run, uses in zip(chosen, read, strict=True) if uses is None)
    return Demand(tuple(use for uses in read for use in uses or ()), len(chosen), unread)


def _uses(store: Store, run: RunState, now: float) -> Iterator[Use]:
    pipeline = load_stored(store, run.run_id, [str(one) for one in run.meta.get("set", [])])
    until = min(run.updated if run.state in RUN_ENDED else leases.undriven_since(run) or now, now)
    for name, state in run.stages.items():
        stage = stage_named(pipeline, name)
        resources = stage_resources(pipeline, stage)
        if resources is None or not resources.gpus_per_node:
            continue
        before = until  # no attempt ends after the next one was asked for
        for number in range(state.attempt, 0, -1):
            key = f"runs/{run.run_id}/stages/{name}/attempt-{number}"
            asked, got, ended, is_over = _times(store, key)
            if number == state.attempt and state.state != "pending":  # else it is to be resumed
                if asked is None:  # nobody told when it was launched, either
                    asked = got = state.started
                ended = ended if is_over else state.ended
            if asked is None:
                continue
            ended = before if ended is None else min(ended, before)
            if got is None:  # a training that was never launched waited to its end
                got = ended if stage.kind.runs == "workers" and state.state != "done" else asked
            if ended > got:
                yield Use(resources.gpu or UNNAMED, _num_gpus(resources), asked, ended - got)
            before = asked


def _num_gpus(resources: Resources) -> int:
    """Of an elastic training those that it may have at most: how long which were there, nobody has summed."""
    fewest_most = resources.replicas
    nodes = resources.gang_nodes if fewest_most is None else fewest_most[1]
    return nodes * resources.gpus_per_node


def _times(store: Store, key: str) -> tuple[float | None, float | None, float | None, bool]:
    """When an attempt was asked for, when it was launched first, and the last that is known of it; Unix
    seconds. None: nobody wrote it. Whether that was its end, which its driver may hear of much later."""
    data, _ = store.read_log(f"{key}/events.jsonl")
    events = decode_lines(data.split(b"\n"))
    asked = next((event.time for event in events if isinstance(event, Submitted)), None)
    got = next((event.time for event in events if isinstance(event, Launched)), None)
    if asked is not None and got is not None:
        asked = min(asked, got)  # a task of a sweep's array begins before its driver comes
    outcome = read_outcome(store, f"{key}/outcome.json")
    if outcome is not None and outcome.time:
        return asked, got, outcome.time, True
    times = [event.time for event in events]
    if records := read_records(store, key, 0, max_steps=1):  # its launcher was killed
        times.append(records[-1].time)
    return asked, got, max(times, default=None), False
