"""`mlpipe profile RUN`: traces steps of a training as it goes, and says what would make it faster."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mlpipe._core.errors import MlpipeError
from mlpipe.cli.session import CliSession, shared

if TYPE_CHECKING:
    from mlpipe._core.records import Record
    from mlpipe.observe.profiles.stored import StoredProfile
    from mlpipe.store.base import Store
    from mlpipe.store.profiles import Profile, ProfileRequest
    from mlpipe.store.runs import RunState

_POLL_SECONDS = 1.0
_MOST_STEPS = 100  # as in store/profiles.py, which --help does not import


def _numbers(_: click.Context, __: click.Parameter, value: str | None) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(part) for part in value.split(",")})) if value else ()
    except ValueError:
        raise click.BadParameter(f"{value!r} is no list of ranks; write it like 0,3") from None


@click.command()
@click.argument("run_id", metavar="RUN")
@click.option(
    "--steps", type=click.IntRange(1, _MOST_STEPS), default=5, show_default=True, help="How many to trace."
)
@click.option("--ranks", callback=_numbers, metavar="0,3", help="Which ranks. Default: the first 8.")
@click.option("--memory", is_flag=True, help="Trace memory, too: on a GPU a snapshot of the allocator.")
@click.option("--stage", metavar="NAME", help="The stage that trains, where several do at the same time.")
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), help="Copy the traces to this folder."
)
@click.option(
    "--timeout", type=click.IntRange(min=1), default=600, show_default=True, help="Seconds to wait for it."
)
@shared
@click.pass_obj
def command(
    session: CliSession,
    run_id: str,
    steps: int,
    ranks: tuple[int, ...],
    memory: bool,
    stage: str | None,
    out: Path | None,
    timeout: int,
) -> None:
    """Trace the next steps of a run that trains, without a restart, and say where their time goes, what would
    make them faster, and by how much at most. Of a run that is over, show its last profile.

    The traces lie in the store beside the records; ui.perfetto.dev and chrome://tracing open them. Of a
    GPU's --memory, pytorch.org/memory_viz opens the snapshot.
    """
    from uuid import uuid4

    from mlpipe.store import runs
    from mlpipe.store.profiles import ProfileRequest

    store = session.store_of(run_id)
    run = runs.read_run(store, run_id)
    if stage is not None and stage not in run.stages:
        raise click.UsageError(f"run {run_id} has no stage {stage!r}; it has {', '.join(run.stages)}")
    name = _training_now(store, run, stage)
    if name is None:
        stored = _last(store, run, stage)
        session.note(f"nothing of {run_id} trains now; this is its last profile")
    else:
        request = ProfileRequest(uuid4().hex[:12], steps, ranks, memory)
        stored = _profiled(session, store, (run_id, name), request, timeout)
    _say(session, store, run, stored, out)


def _training_now(store: Store, run: RunState, stage: str | None) -> str | None:
    """The stage whose workers train; None: none does. Raises MlpipeError (input) for several."""
    from mlpipe.plan.plan import Plan
    from mlpipe.plan.work import TrainPlan

    stages = []
    for name, state in run.stages.items():
        key = f"{run.attempt_key(name)}/plan.json"
        if state.state != "running" or stage not in (None, name) or not store.exists(key):
            continue
        if Plan.from_json(store.get(key)).part(TrainPlan) is not None:
            stages.append(name)
    if len(stages) > 1:
        raise MlpipeError(
            f"several stages train: {', '.join(stages)}", where=run.run_id, hint="add --stage", kind="input"
        )
    return stages[0] if stages else None


def _last(store: Store, run: RunState, stage: str | None) -> StoredProfile:
    from mlpipe.observe.profiles.stored import profiles_of_stage

    for name in reversed(run.stages):
        stored = profiles_of_stage(store, f"runs/{run.run_id}/stages/{name}")
        if stored and stage in (None, name):
            return stored[-1]
    raise MlpipeError(
        f"nothing of {run.run_id} trains now, and it has no profile",
        where=run.run_id,
        hint="profile a run while it trains, or write `profile: {at: 100}` in its stage",
        kind="input",
    )


def _profiled(
    session: CliSession, store: Store, of: tuple[str, str], request: ProfileRequest, timeout: int
) -> StoredProfile:
    """Waits until all ranks have written what they were asked for. `of`: run and stage."""
    from mlpipe.observe.profiles.stored import read_profile
    from mlpipe.observe.records import Follower
    from mlpipe.store import profiles, runs

    run_id, stage = of
    key = runs.read_run(store, run_id).attempt_key(stage)
    _check_ranks(store, key, request.ranks)
    if not profiles.ask(store, key, request):
        raise MlpipeError(
            "somebody asks for a profile already",
            where=run_id,
            hint="wait for it, and ask again",
            kind="input",
        )
    session.note(f"asked {run_id} to profile {request.steps} steps of {stage}")
    deadline, waits_for = time.monotonic() + timeout, "its launcher to hear of it"
    follower, records = Follower(store, key), []
    try:
        while time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            run = runs.read_run(store, run_id)
            is_over = run.stages[stage].state != "running" or run.attempt_key(stage) != key
            records += follower.poll()
            begun = [one for one in profiles.list_profiles(store, key) if one.id == request.id]
            if begun:
                stored = read_profile(store, key, begun[-1])
                if len(stored.ranks) == len(begun[-1].ranks):
                    return stored
                last = begun[-1].first_step + begun[-1].steps - 1
                waits_for = f"steps {begun[-1].first_step} to {last}, and the traces of all ranks"
                if _is_lost(begun[-1], records):
                    raise MlpipeError(
                        f"steps {begun[-1].first_step} to {last} are over, or were broken off by a restart, "
                        "and not all ranks stored a trace",
                        where=run_id,
                        hint="ask again; `mlpipe logs` says what a rank could not store",
                        kind="infrastructure",
                    )
            elif not profiles.is_asked(store, key):
                waits_for = "the next step"
            if is_over:
                raise MlpipeError(
                    f"stage {stage} ended before it was profiled",
                    where=run_id,
                    hint="write `profile: {at: N}` in the stage, with N below its last step",
                    kind="input",
                )
    finally:
        profiles.withdraw(store, key, request.id)
    raise MlpipeError(
        f"waited {timeout} s for {waits_for}",
        where=run_id,
        hint="`mlpipe status` says whether it moves; a slow step needs a longer --timeout",
        kind="infrastructure",
    )


def _check_ranks(store: Store, key: str, ranks: Sequence[int]) -> None:
    """Raises UsageError for those that there are not."""
    from mlpipe.plan.plan import Plan
    from mlpipe.store.profiles import MOST_NAMED_RANKS

    launch = Plan.from_json(store.get(f"{key}/plan.json")).launch
    size = launch.num_nodes * launch.nproc_per_node
    if odd := [rank for rank in ranks if not 0 <= rank < size]:
        raise click.UsageError(f"--ranks: there is no rank {odd[0]}; there are 0 to {size - 1}")
    if len(ranks) > MOST_NAMED_RANKS:
        raise click.UsageError(f"--ranks: {len(ranks)} are named; {MOST_NAMED_RANKS} at most can be")


def _is_lost(profile: Profile, records: Sequence[Record]) -> bool:
    """`records`: rank 0's. It is two steps further, for which all ranks had to have stored theirs; or began
    anew since."""
    from mlpipe._core.records import Start, Step

    last = profile.first_step + profile.steps - 1
    return any(
        one.time > profile.time
        and (isinstance(one, Start) or (isinstance(one, Step) and one.step > last + 1))
        for one in records
    )


def _say(session: CliSession, store: Store, run: RunState, stored: StoredProfile, out: Path | None) -> None:
    from mlpipe._core.serial import to_plain
    from mlpipe.api.profiling import expected_gains, words_of
    from mlpipe.observe.profiles.findings import findings
    from mlpipe.observe.profiles.text import profile_text

    traces = [f"{store.url}/{key}" for key in stored.trace_keys()]
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        traces = []
        for key in stored.trace_keys():
            path = out / key.rpartition("/")[2]
            path.write_bytes(store.get(key))
            traces.append(str(path))
    expected = expected_gains(store, run, stored.attempt_key)
    document = {
        "profile": to_plain(stored.profile),
        "findings": [
            {**to_plain(one), "expected": to_plain(expected.get(one.cause))} for one in findings(stored.ranks)
        ],
        "ranks": [to_plain(one) for one in stored.ranks],
        "traces": traces,
    }
    lines = [profile_text(stored.ranks, words_of(expected, stored)), "", "Traces, for ui.perfetto.dev:"]
    session.result(document, "\n".join([*lines, *(f"  {one}" for one in traces)]))
