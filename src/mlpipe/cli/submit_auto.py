"""`mlpipe submit --to auto`: the place is chosen among the user's own."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mlpipe._core.errors import SubmitError
from mlpipe.cli.session import CliSession

if TYPE_CHECKING:
    from mlpipe.spec.places import Places
    from mlpipe.store.base import Store
    from mlpipe.submit.backend import Backend
    from mlpipe.submit.places import Answer
    from mlpipe.submit.submission import Submission

AUTO = "auto"


def choose_place(
    session: CliSession, submission: Submission, path: str | None, goal: str | None, *, only_look: bool
) -> tuple[Backend, Submission] | None:
    """Where the run goes, and as what; a run that is there goes on where it is. None: nothing is to be
    started. Raises SubmitError (input) where no place can run it, with what each said."""
    if not only_look and submission.run_id is not None:
        store = session.open_store(submission.pipeline.store)
        if store.exists(f"runs/{submission.run_id}/run.json"):
            return _where_it_is(session, store, submission)
    from mlpipe.spec.places import default_path, read_places
    from mlpipe.submit import places as asking

    where = path or str(default_path())
    if path is None and not default_path().exists():
        raise SubmitError(
            "nobody has said which places there are",
            where=where,
            hint="write it, or name another file with --places (docs/how-to/places.md)",
            kind="input",
        )
    listed: Places = read_places(where)
    wanted = goal or listed.goal
    session.note(f"asking {len(listed.places)} places of {where}")
    answers = asking.ask(listed.places, submission)
    best, why = asking.choose(answers, wanted)  # type: ignore[arg-type]  # of click's choices
    if only_look and best is not None:
        session.result(_document(answers, best, why, wanted), "\n".join([*_table(answers), _said(best, why)]))
        return None
    for line in _table(answers):
        session.note(line)
    if best is None or best.backend is None or best.submission is None:
        told = "; ".join(f"{one.place.name}: {one.cannot}" for one in answers)
        raise SubmitError(why, where=where, hint=told, kind="input")
    session.note(_said(best, why))
    return best.backend, best.submission


def _where_it_is(session: CliSession, store: Store, submission: Submission) -> tuple[Backend, Submission]:
    """The place of before, with what was set there: a lost answer starts nothing a second time elsewhere."""
    from mlpipe.spec.load import load_pipeline_text
    from mlpipe.store.runs import read_run
    from mlpipe.submit import backends

    assert submission.run_id is not None
    run = read_run(store, submission.run_id)
    backend = backends.of_run(run)
    overrides = tuple(str(one) for one in run.meta.get("set", []))
    pipeline = load_pipeline_text(submission.text, submission.spec, overrides=overrides)
    session.note(f"run {run.run_id} is there, at {run.backend}: it goes on where it is")
    return backend, replace(submission, overrides=overrides, pipeline=pipeline)


def _said(best: Answer | None, why: str) -> str:
    return why if best is None else f"{best.place.name}: {why}"


def _table(answers: list[Answer]) -> list[str]:
    from mlpipe._core.tables import aligned
    from mlpipe._core.units import format_seconds

    def seconds(value: float | None, nothing: str) -> str:
        return "?" if value is None else format_seconds(value) if value else nothing

    rows = [("place", "backend", "waits", "trains", "USD", "")]
    for one in answers:
        if one.cannot is not None:
            rows.append((one.place.name, one.place.backend, "-", "-", "-", f"cannot: {one.cannot}"))
            continue
        usd = "?" if one.lasting.usd is None else f"{one.lasting.usd:,.2f}"
        waits, lasts = seconds(one.availability.wait_seconds, "now"), seconds(one.lasting.seconds, "-")
        rows.append((one.place.name, one.place.backend, waits, lasts, usd, one.availability.words))
    return aligned(rows, left=(0, 1, 5))


def _document(answers: list[Answer], best: Answer | None, why: str, goal: str) -> dict[str, Any]:
    return {
        "goal": goal,
        "chosen": best.place.name if best is not None else None,
        "reason": why,
        "places": [
            {
                "name": one.place.name,
                "backend": one.place.backend,
                "cannot": one.cannot,
                "wait_seconds": one.availability.wait_seconds,
                "wait": one.availability.words,
                "train_seconds": one.lasting.seconds,
                "done_seconds": one.done_seconds,
                "usd": one.lasting.usd,
            }
            for one in answers
        ],
    }
