"""Before a run: the machines that its stages would get, and what all of them would cost."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from mlpipe._core.errors import SubmitError
from mlpipe.plan.build import Start, build_plan
from mlpipe.plan.hardware import Hardware
from mlpipe.plan.lasting import Lasting
from mlpipe.plan.offers import Quote, Work
from mlpipe.plan.plan import Plan
from mlpipe.spec.model import Pipeline
from mlpipe.store.open import full_url
from mlpipe.submit.rented.limits import Limits
from mlpipe.submit.rented.market import Choice, consider, is_rented, wishes_of
from mlpipe.submit.rented.order import Term, script
from mlpipe.submit.rented.vendor import Vendor, connect
from mlpipe.submit.submission import Availability, Preview, Submission


@dataclass(frozen=True)
class Outlook:
    """`choices`: of the stages that rent, in the order of the file."""

    vendor: Vendor
    limits: Limits
    choices: list[Choice]


def look_ahead(submission: Submission, limits: Limits) -> Outlook:
    """Asks the vendor what is for rent, and rents nothing. Raises SubmitError or PlanError for what cannot
    run there, or not within the limits."""
    pipeline, only = submission.pipeline, submission.stage
    stages = [
        one.name for one in pipeline.stages if is_rented(pipeline, one.name) and only in (None, one.name)
    ]
    for stage in stages:
        _check_shape(pipeline, stage)
    store_url = full_url(submission.store_url)
    _check_reach(pipeline, store_url, bool(stages))
    vendor, choices, left = connect(limits.vendor), [], limits.max_usd
    for stage in stages:

        def plan(hardware: Hardware, stage: str = stage) -> Plan:
            return build_plan(pipeline, stage, Start(f"{pipeline.name[:40]}-RUN", 1, store_url), hardware)

        wishes = replace(wishes_of(pipeline, stage, limits), left_usd=left)
        choice = consider(pipeline, stage, vendor, wishes, (Work(), plan))
        if not choice.ranked:
            raise choice.refusal(wishes)
        left -= choice.ranked[0].usd
        choices.append(choice)
    return Outlook(vendor, limits, choices)


def _check_shape(pipeline: Pipeline, stage: str) -> None:
    resources = pipeline.stage(stage).resources
    if resources is not None and (resources.slice or resources.gpu_sharing or resources.device):
        raise SubmitError(
            "asks for a slice, a share or a description of a GPU, and whole ones of the catalogue are rented",
            where=f"stage {stage!r}",
            hint="leave resources.slice, gpu_sharing and device away",
            kind="input",
        )
    if resources is not None and resources.nodes != 1:
        raise SubmitError(
            f"asks for {resources.nodes} nodes, and one machine is rented for a stage",
            where=f"stage {stage!r}",
            hint=f"run it with --set {stage}.resources.nodes=1",
            kind="input",
        )


def _check_reach(pipeline: Pipeline, store_url: str, rents: bool) -> None:
    if rents and pipeline.image is None:
        raise SubmitError(
            "a rented machine runs an image, and the pipeline names none",
            hint="add 'image: ...', one that anybody may pull, with mlpipe and torch in it",
            kind="input",
        )
    if rents and not store_url.startswith("s3://"):
        raise SubmitError(
            f"a rented machine does not reach {store_url}",
            hint="write store: s3://bucket/prefix, on a server that the internet reaches",
            kind="input",
        )


def preview(submission: Submission, outlook: Outlook) -> Preview:
    """The machines, and what they would be told; of secrets there is nothing yet."""
    stages = [_stage(outlook, choice) for choice in outlook.choices]
    document = {"image": submission.pipeline.image, "max_usd": outlook.limits.max_usd, "stages": stages}
    tables = [choice.table() for choice in outlook.choices]
    total = sum(choice.ranked[0].usd for choice in outlook.choices)
    tables.append(f"${total:.2f} of ${outlook.limits.max_usd:.2f}, as the planner expects")
    return Preview(document, "\n\n".join(tables))


def availability(outlook: Outlook) -> Availability:
    """Of the best machines, one after the other; from the order on."""
    best = [choice.ranked[0] for choice in outlook.choices]
    machines = ", ".join(f"{one.offer.num_gpus} x {one.offer.gpu_name}" for one in best)
    known = [one.seconds for one in best if one.seconds is not None]
    seconds = sum(known) if len(known) == len(best) else None
    lasting = Lasting(seconds, sum(one.usd for one in best))
    return Availability(0.0, f"for rent: {machines}" if best else "nothing of it is rented", lasting)


def _stage(outlook: Outlook, choice: Choice) -> dict[str, Any]:
    best = choice.ranked[0]
    seconds = (outlook.limits.max_usd - best.traffic_usd) / best.offer.usd_per_hour * 3600
    term = Term(time.time() + seconds, seconds, "money")
    return {
        "stage": choice.stage,
        "offers": [_offer(one) for one in choice.ranked],
        "not_fit": dict(choice.unfit),
        "script": script(outlook.vendor.give_back(), term),
    }


def _offer(quote: Quote) -> dict[str, Any]:
    offer = quote.offer
    return {
        "offer": offer.id,
        "gpu": offer.gpu_name,
        "num_gpus": offer.num_gpus,
        "usd_per_hour": offer.usd_per_hour,
        "seconds": quote.seconds,
        "usd": quote.usd,
        "reliability": offer.reliability,
        "region": offer.region,
        "spot": offer.is_spot,
    }
