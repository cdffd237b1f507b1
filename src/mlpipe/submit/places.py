"""`submit --to auto`: at which of a user's places a run would be done first, or be cheapest, as they are now.

Each place is asked in a thread of its own, all with one deadline: one that is away is told as such and holds
up nobody. Nothing is started here.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from mlpipe._core.errors import MlpipeError, SubmitError
from mlpipe._core.units import format_seconds
from mlpipe.plan.lasting import Lasting, lasting
from mlpipe.plan.training import trainings
from mlpipe.spec.load import load_pipeline_text
from mlpipe.spec.model import Pipeline
from mlpipe.spec.places import Goal, RunPlace
from mlpipe.spec.problems import SpecErrors
from mlpipe.spec.rules import OF_GPUS
from mlpipe.submit import backends
from mlpipe.submit.backend import Backend
from mlpipe.submit.submission import Availability, Submission

DEADLINE_SECONDS = 30.0


@dataclass(frozen=True)
class Answer:
    """Of a place. `cannot`: why the run cannot go there, in words; then nothing else is known. `submission`:
    as it would go there."""

    place: RunPlace
    cannot: str | None = None
    backend: Backend | None = None
    submission: Submission | None = None
    lasting: Lasting = field(default_factory=Lasting)
    availability: Availability = field(default_factory=Availability)

    @property
    def done_seconds(self) -> float | None:
        """From now until its trainings are done; None: nobody knows."""
        if self.availability.wait_seconds is None or self.lasting.seconds is None:
            return None
        return self.availability.wait_seconds + self.lasting.seconds


class _Nobody:
    """A console."""

    quiet = True

    def note(self, text: str) -> None:
        """Not heard."""

    complain = note


def ask(
    places: Sequence[RunPlace], submission: Submission, deadline_seconds: float = DEADLINE_SECONDS
) -> list[Answer]:
    """All of them, in their order. Raises SubmitError (input) for a backend or an option that is none."""
    answers = [_planned(place, submission) for place in places]
    asked = []
    for index, planned in enumerate(answers):
        if planned.cannot is None:
            thread = threading.Thread(target=_ask, args=(planned, answers, index), daemon=True)
            answers[index] = Answer(planned.place, f"it did not answer within {deadline_seconds:.0f} s")
            asked.append(thread)
            thread.start()
    deadline = time.monotonic() + deadline_seconds
    for thread in asked:
        thread.join(max(0.0, deadline - time.monotonic()))
    return list(answers)  # whoever answers later is not heard


def _planned(place: RunPlace, submission: Submission) -> Answer:
    """What is known without asking it."""
    try:
        chosen = backends.load(place.backend)
        backends.with_options(chosen, submission.pipeline, place.options)
    except SubmitError as error:
        error.where = f"place {place.name!r}"
        raise
    try:
        overrides = (*_overrides(place, submission.pipeline), *submission.overrides)
        pipeline = load_pipeline_text(submission.text, submission.spec, overrides=overrides)
        if pipeline.store != submission.pipeline.store:
            return Answer(place, "it would have another store, and the run is found by its store")
        there = replace(submission, overrides=overrides, pipeline=pipeline)
        backend = backends.with_options(chosen, pipeline, place.options)
        return Answer(place, None, backend, there)
    except MlpipeError as error:
        return Answer(place, _told(error))


def _told(error: MlpipeError) -> str:
    if isinstance(error, SpecErrors):
        return "; ".join(f"{one.place}: {one.message}" for one in error.problems)
    return error.told


def _overrides(place: RunPlace, pipeline: Pipeline) -> Iterator[str]:
    """As `--set` takes them."""
    there = {} if place.resources is None else place.resources.model_dump(exclude_unset=True)
    for name in trainings(pipeline):
        own, resources = pipeline.stage(name).resources, there
        if "gpus_per_node" not in there and (own is None or not own.gpus_per_node):  # it trains on CPUs
            resources = {key: value for key, value in there.items() if key not in (*OF_GPUS, "device")}
        if own is not None and resources.keys() & {"gpu", "gpus_per_node"}:
            described = [
                key for key in ("device", "hardware", "workers_per_node") if getattr(own, key) is not None
            ]
            yield from (f"stages.{name}.resources.{key}=null" for key in described if key not in resources)
        for key, value in resources.items():
            yield f"stages.{name}.resources.{key}={json.dumps(value)}"
        if place.usd_per_gpu_hour is not None:
            yield f"stages.{name}.resources.price_usd_per_gpu_hour={place.usd_per_gpu_hour}"
    yield from place.overrides


def _ask(planned: Answer, answers: list[Answer], index: int) -> None:
    """What it lacks, whether it would take the run, when, and how long it would last."""
    backend, submission = planned.backend, planned.submission
    assert backend is not None
    assert submission is not None
    try:
        for finding in backend.doctor(()):
            if finding.level == "fail":
                words = " ".join(finding.detail.split())
                answers[index] = Answer(planned.place, f"{finding.name}: {words}")
                return
        backend.preview(submission, _Nobody(), on_server=backend.has_server_dry_run)
        there = backend.availability(submission)
        lasts = there.lasting or lasting(submission.pipeline, backend.hardware, submission.stage)
        answers[index] = replace(planned, availability=there, lasting=lasts)
    except MlpipeError as error:
        answers[index] = Answer(planned.place, _told(error))
    except Exception as error:  # of a package, say, in whose thread nobody would see it
        answers[index] = Answer(planned.place, f"{type(error).__name__}: {error}")


def choose(answers: Sequence[Answer], goal: Goal) -> tuple[Answer | None, str]:
    """One of them, and why. What nobody knows counts as the worst; of equals the first one. None: the run can
    go nowhere."""
    able = [one for one in answers if one.cannot is None]
    if not able:
        return None, "no place can run it"
    ranked = sorted(able, key=_first if goal == "first" else _cheapest)
    best, others = ranked[0], ranked[1:]
    if not others:
        return best, "the only place that can run it"
    words, (least, *rest) = [], [one.done_seconds if goal == "first" else one.lasting.usd for one in ranked]
    if least is None:
        what = "when its trainings would be done" if goal == "first" else "what it would cost"
        words = [f"nobody knows of any place {what}"]
        if (less := _first(best)) < _first(others[0]):
            what = "trainings are done first" if math.isfinite(less[0]) else "trainings take the least time"
            words.append(f"its {what}")
    elif goal == "first":
        words = [f"done first, {_in(least)}"]
        words += [f"{others[0].place.name} {_in(rest[0])}"] if rest[0] is not None else []
    else:
        words = [f"the cheapest, for {least:,.2f} USD"]
        words += [f"{others[0].place.name} for {rest[0]:,.2f} USD"] if rest[0] is not None else []
    if least is not None and (unknown := rest.count(None)):
        words.append(f"of {unknown} {'other' if unknown == 1 else 'others'} nobody knows")
    return best, "; ".join(words)


def _first(one: Answer) -> tuple[float, float]:
    return _or_worst(one.done_seconds), _or_worst(one.lasting.seconds)


def _cheapest(one: Answer) -> tuple[float, ...]:
    return _or_worst(one.lasting.usd), *_first(one)


def _in(seconds: float) -> str:
    return f"in {format_seconds(seconds)}" if seconds else "at once"


def _or_worst(value: float | None) -> float:
    return math.inf if value is None else value
