"""`mlpipe sweep SPEC`: the runs of a sweep, and which of them is the best."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from mlpipe._core.errors import EXIT_CODES, MlpipeError, StoreError
from mlpipe._core.printable import as_argument
from mlpipe.cli.backend_options import BackendChoice, WithBackendOptions
from mlpipe.cli.session import CliSession, overrides, shared
from mlpipe.submit import backends
from mlpipe.submit.submission import Submission

if TYPE_CHECKING:
    from mlpipe.store.base import Store
    from mlpipe.store.runs import RunState, StageStatus
    from mlpipe.submit.backend import Backend

_PIPED_SECONDS = 10.0


@click.command(cls=WithBackendOptions, chosen_by="to", verb="submit")
@click.argument("spec", type=click.Path(), required=False)
@click.option(
    "--to", type=BackendChoice(), default=backends.DEFAULT, show_default=True, help="Where its trials run."
)
@overrides
@click.option(
    "--sweep-id",
    metavar="ID",
    help="Name of the sweep; one that exists goes on. Default: pipeline, time and chance.",
)
@click.option(
    "--follow",
    metavar="TRIAL",
    help="Only follow this trial of --sweep-id, which another process drives, and exit as the trial does.",
)
@click.option(
    "--driver-ended", is_flag=True, help="With --follow: nobody drives the sweep any more; wait for nobody."
)
@click.option("--resume", "sweep", metavar="ID", help="Go on with this sweep, instead of a new one.")
@click.option(
    "--promote-best",
    "promote",
    metavar="NAME[@ALIAS]",
    help="Register the best trial's model at the end, instead of what `sweep.promote` says.",
)
@shared
@click.pass_obj
def command(
    session: CliSession,
    spec: str | None,
    to: str,
    options: dict[str, Any],
    overrides: tuple[str, ...],
    sweep_id: str | None,
    follow: str | None,
    driver_ended: bool,
    sweep: str | None,
    promote: str | None,
) -> int:
    """Run a pipeline once for each of the values that its `sweep` names, and say which was the best.

    Each trial is a run with an id of its own, SWEEP-000 and so on, for all other verbs; `status`, `report`,
    `cancel` and `resume` take the sweep's id as well. Ctrl-C saves and stops all trials, a second one at
    once; with --resume trials that ended are not repeated. A trial that fails stops no other. Exits 0 when a
    trial is done and has its metric, 3 or 4 when none has, 5 when it was cancelled, 130 after Ctrl-C.
    """
    if driver_ended and follow is None:
        raise click.UsageError("--driver-ended is of --follow")
    if follow is not None:
        if sweep_id is None or spec or sweep or promote or overrides or _is_given("to"):
            raise click.UsageError("--follow is of --sweep-id alone: it starts nothing")
        from mlpipe.cli.sweep_follow import follow_trial

        return follow_trial(session, session.open_store(), sweep_id, follow, waits=not driver_ended)
    if (spec is None) == (sweep is None):
        raise click.UsageError("name a pipeline file or a sweep with --resume, not both")
    if sweep is not None:
        if overrides or sweep_id or _is_given("to"):
            raise click.UsageError("--set, --sweep-id and --to are for a new sweep")
        return drive(session, session.store_of(sweep), sweep, promote)
    from mlpipe.spec.load import read_pipeline

    assert spec is not None
    text, pipeline = read_pipeline(spec, overrides=overrides)
    backend = backends.load(to).of_submission(pipeline, options)
    url = session.full_store_url(pipeline.store)
    submission = Submission(spec, text, overrides, pipeline, url, os.getcwd(), run_id=sweep_id)
    store = session.open_store(pipeline.store)
    return drive(session, store, claim(session, store, backend, submission), promote)


def _is_given(option: str) -> bool:
    source = click.get_current_context().get_parameter_source(option)
    return source is click.core.ParameterSource.COMMANDLINE


def claim(session: CliSession, store: Store, backend: Backend, submission: Submission) -> str:
    """The id of a new sweep, or of the one that has the submission's; a word about what will run."""
    from mlpipe.submit.adopt import is_there

    sweep_id = submission.run_id
    if sweep_id is not None and is_there(store, sweep_id, submission.pipeline):
        session.note(f"sweep {sweep_id} in {store.url} is there: it goes on")
        return sweep_id
    return create(session, store, backend, submission)


def create(session: CliSession, store: Store, backend: Backend, submission: Submission) -> str:
    """The id of a new sweep, and a word about what will run."""
    from mlpipe.spec.trials import num_trials
    from mlpipe.store.sweeps import short_names
    from mlpipe.submit.delegate import Delegate
    from mlpipe.submit.sweeps.create import create as create_sweep
    from mlpipe.submit.sweeps.create import sweep_of

    sweep = sweep_of(submission)
    if isinstance(backend, Delegate):
        raise click.UsageError(
            f"a sweep is not handed to {backend.name}: have a build do it (mlpipe render "
            f"{as_argument(submission.spec)} --for {backend.name}), or name the backend of its trials"
        )
    sweep_id = create_sweep(store, backend, submission, session)

    over = ", ".join(short_names(list(sweep.over)).values())
    number = num_trials(sweep)
    session.note(
        f"sweep {sweep_id} in {store.url}: {number} trial{'s' if number > 1 else ''} ({sweep.method} over "
        f"{over}), {sweep.max_parallel} at a time"
    )
    return sweep_id


def drive(
    session: CliSession, store: Store, sweep_id: str, promote: str | None = None, *, trust_store: bool = False
) -> int:
    """Until the sweep has ended; the exit code."""
    from mlpipe.cli.foreground import signals
    from mlpipe.store import runs
    from mlpipe.submit.executor import StopRequest
    from mlpipe.submit.sweeps.controller import drive_sweep
    from mlpipe.submit.sweeps.promote import promote_best

    if not runs.read_run(store, sweep_id).is_sweep:
        raise StoreError(f"{sweep_id} is a run, not a sweep", hint=f"mlpipe resume {sweep_id}", kind="input")
    stop, watcher = StopRequest(), _Watcher(session, store)
    with signals(stop):
        try:
            sweep = drive_sweep(
                store,
                sweep_id,
                stop=stop,
                console=watcher,
                watch=watcher.watch,
                trust_store=trust_store,
                promotes=promote is None,
            )
        finally:
            watcher.close()
    if promote is not None and stop.kind is None and sweep.state == "done":
        name, _, alias = promote.partition("@")
        made = promote_best(store, sweep, name, alias or None)
        sweep = runs.update_run(store, sweep_id, lambda run: _with_meta(run, promoted=made))
    say(session, store, sweep, report=_report(session, store, sweep))
    return EXIT_CODES["interrupted"] if stop.kind == "interrupted" else exit_code(sweep)


def _with_meta(run: RunState, **more: Any) -> RunState:
    return replace(run, meta={**run.meta, **more})


def exit_code(sweep: RunState) -> int:
    """Of the verb that waited for it."""
    if sweep.state == "failed":
        kinds = [trial.outcome.get("kind") for trial in sweep.stages.values() if trial.state == "failed"]
        return EXIT_CODES[next(filter(None, kinds), "failed")]
    if sweep.state == "done":
        return 0
    return EXIT_CODES["cancelled" if sweep.state == "cancelled" else "infrastructure"]


def _report(session: CliSession, store: Store, sweep: RunState) -> str | None:
    """Where the page lies. That it cannot be written must not fail a sweep."""
    from mlpipe.observe.sweep_report import write_report

    try:
        return write_report(store, sweep)
    except (MlpipeError, OSError) as error:
        session.note(f"no report: {error}")
        return None


def say(session: CliSession, store: Store, sweep: RunState, *, report: str | None = None) -> None:
    """The table, the best trial and what to do next."""
    from mlpipe.cli.outcome import store_option
    from mlpipe.observe import sweep_table
    from mlpipe.store import leases, runs, sweeps

    document = sweep_table.document(store, sweep)
    lines = [sweep_table.headline(sweep)]
    lines += [f"  {sweep.message}"] if sweep.message and sweep.state != "done" else []
    lines += ["", *sweep_table.table(sweep, sweep_table.trial_rows(store, sweep))]
    if (best := sweeps.best(sweep)) is not None:
        lines += ["", f"best: {sweeps.trial_run_id(sweep.run_id, best)}  {sweep_table.said(sweep, best)}"]
    if promoted := sweep.meta.get("promoted"):
        lines.append(f"promoted: {promoted['model']} version {promoted['version']}")
    if report is not None:
        document["report"] = report
        lines.append(f"report: {report}")
    if sweep.state not in runs.RUN_ENDED and sweep.driver is not None and leases.lease_is_live(sweep.driver):
        lines += ["", f"driven by process {sweep.driver.pid} on {sweep.driver.host}"]
    elif sweep.state not in runs.RUN_ENDED or sweep.state == "cancelled":
        lines += ["", f"go on with: mlpipe sweep --resume {sweep.run_id}{store_option(store)}"]
    session.result(document, "\n".join(lines))


class _Watcher:
    """A line a transition of a trial, and one live line for each that runs. Also the console of backends."""

    def __init__(self, session: CliSession, store: Store) -> None:
        from mlpipe.observe.top import Top

        self._session, self._store, self._top = session, store, Top(store)
        self.quiet = session.quiet
        self._seen: dict[str, StageStatus] | None = None
        self._num_lines = 0  # of the live block
        self._printed_at = 0.0

    def watch(self, sweep: RunState) -> None:
        """As often as you like."""
        if self.quiet:
            return
        from mlpipe.cli.sweep_follow import words
        from mlpipe.observe.sweep_table import said

        now = {name: trial.state for name, trial in sweep.stages.items()}
        before, self._seen = self._seen if self._seen is not None else now, now
        for name, state in now.items():
            if state != before.get(name, "pending"):
                self.note(f"{name}  {said(sweep, name)}  {words(sweep, name)}")
        self._show(sweep)

    def _show(self, sweep: RunState) -> None:
        """Anew twice a second on a terminal, else every ten seconds."""
        from mlpipe.observe.progress import live_line
        from mlpipe.observe.sweep_table import trial_rows

        now, live = time.monotonic(), self._session.live()
        if now - self._printed_at < (0.5 if live else _PIPED_SECONDS):
            return
        self._printed_at = now
        try:
            rows = trial_rows(self._store, sweep, self._top)
        except MlpipeError:
            return  # a store that is away for a while
        columns = shutil.get_terminal_size().columns
        lines = [
            f"{row.trial}  {live_line(row.progress, width=max(columns - 8, 40))}"
            for row in sorted(rows, key=lambda row: row.trial)
            if row.progress is not None
        ]
        if not live:
            for line in lines:
                self._session.note(line)
            return
        self.close()
        self._session.write("".join(f"{line}\n" for line in lines))
        self._num_lines = len(lines)

    def note(self, text: str) -> None:
        """Above the live lines, which are shown again soon."""
        self.close()
        self._session.note(text)

    def complain(self, text: str) -> None:
        """The same, also where nobody watches."""
        self.close()
        self._session.complain(text)

    def close(self) -> None:
        """Take the live lines away."""
        if self._num_lines:
            self._session.write(f"\x1b[{self._num_lines}F\x1b[J")
            self._num_lines = 0
