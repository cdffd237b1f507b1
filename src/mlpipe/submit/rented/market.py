"""Which machine a stage gets: by what is for rent, and what is left of the stage and of the money."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from mlpipe._core.errors import SubmitError
from mlpipe.plan import offers
from mlpipe.plan.build import Start, build_plan, stage_resources
from mlpipe.plan.hardware import Hardware
from mlpipe.plan.offers import Quote, Wishes, Work
from mlpipe.plan.plan import Plan
from mlpipe.spec.model import Pipeline
from mlpipe.store import catalogue, outputs, runs
from mlpipe.store.base import Store
from mlpipe.store.runs import RunState
from mlpipe.submit import planning
from mlpipe.submit.rented.keys import longest_seconds
from mlpipe.submit.rented.limits import Limits
from mlpipe.submit.rented.order import Ending, Term
from mlpipe.submit.rented.rentals import Rentals
from mlpipe.submit.rented.vendor import Need, Vendor

SHOWN = 8  # offers in a table


def is_rented(pipeline: Pipeline, stage: str) -> bool:
    """What runs in workers is; a command runs where its driver does."""
    return pipeline.stage(stage).kind.runs == "workers"


@dataclass(frozen=True)
class Choice:
    """Of a stage. `ranked`: what can finish it, the best first; `quotes`: also what is too dear or too
    late."""

    stage: str
    ranked: list[Quote]
    quotes: list[Quote]
    unfit: Mapping[str, int]

    def table(self) -> str:
        """For people."""
        shown = self.ranked[:SHOWN] or sorted(self.quotes, key=lambda one: one.usd)[:SHOWN]
        head = f"{self.stage}: {len(self.quotes)} machines could run it, {len(self.ranked)} within the limits"
        rows = offers.table(shown, self.ranked[0] if self.ranked else None) if shown else ""
        unfit = ", ".join(f"{many} ({why})" for why, many in list(self.unfit.items())[:SHOWN])
        return "\n".join(filter(None, [head, rows, f"not fit: {unfit}" if unfit else ""]))

    def refusal(self, wishes: Wishes) -> SubmitError:
        """For a stage that nothing can finish."""
        if self.quotes:
            best = min(self.quotes, key=lambda one: one.usd)
            why = offers.too_much(best, wishes) or ""
            words = (
                f"no machine for rent finishes it: of {len(self.quotes)} the cheapest, {best.offer.id}, {why}"
            )
            hint = "raise --max-usd or --max-time, or ask again later"
        else:
            reasons = ", ".join(f"{many}: {why}" for why, many in list(self.unfit.items())[:SHOWN])
            words = f"no machine for rent fits it ({reasons or 'there is no offer'})"
            hint = "allow others: --gpu any, --region, --min-reliability, --spot yes"
        return SubmitError(words, where=f"stage {self.stage!r}", hint=hint, kind="infrastructure")


def consider(
    pipeline: Pipeline,
    stage: str,
    vendor: Vendor,
    wishes: Wishes,
    left: tuple[Work, Callable[[Hardware], Plan]],
) -> Choice:
    """One search. `left`: of the stage, and its plan on a hardware. Raises SubmitError."""
    work, make_plan = left
    resources = stage_resources(pipeline, pipeline.stage(stage))
    num_gpus = resources.gpus_per_node if resources else 0
    need = Need(num_gpus, offers.disk_bytes(resources, work), wishes.min_reliability, wishes.spot)
    quotes, unfit = offers.consider(vendor.offers(need), resources, wishes, work, make_plan)
    return Choice(stage, offers.rank(quotes, wishes), quotes, unfit)


def wishes_of(pipeline: Pipeline, stage: str, limits: Limits) -> Wishes:
    """Before anything is spent."""
    resources = stage_resources(pipeline, pipeline.stage(stage))
    own = (resources.gpu,) if resources and resources.gpus_per_node and resources.gpu else ()
    return Wishes(
        limits.max_usd,
        limits.max_seconds,
        own if limits.gpus is None else limits.gpus,
        limits.regions,
        limits.min_reliability,
        limits.spot,
    )


class Market:
    """Of one run, for its driver. `one_at_a_time`: held by the stage that has a machine, so that what is left
    of the money is left for it."""

    def __init__(self, store: Store, run: RunState, vendor: Vendor, limits: Limits) -> None:
        self.store, self.vendor, self.limits = store, vendor, limits
        self.rentals = Rentals(store, run.run_id, vendor)
        self.one_at_a_time = threading.Lock()
        self._run_id = run.run_id
        self._ranked: dict[str, list[Quote]] = {}

    def left_usd(self) -> float:
        """Of the budget, now."""
        return self.limits.max_usd - self.rentals.spent_usd()

    def left_seconds(self) -> float:
        """Since the first rental."""
        began = min((one.asked for one in self.rentals.all()), default=time.time())
        return self.limits.max_seconds - (time.time() - began)

    def hardware(self, pipeline: Pipeline, stage: str) -> Hardware:
        """Of the best machine; those that are like it are remembered for `candidates`. Raises SubmitError
        where none can finish the stage within what is left."""
        folder = f"runs/{self._run_id}/stages"
        states = runs.read_run(self.store, self._run_id).stages
        done = [name for name, state in states.items() if state.state == "done"]
        read = planning.peek_inputs(self.store, self._run_id, pipeline, stage, done)
        num_bytes = sum(_output_bytes(self.store, f"{folder}/{name}") for name in read)
        latest = catalogue.latest(self.store, f"{folder}/{stage}")
        share, saved = 1.0, 0
        if latest is not None:
            steps = getattr(pipeline.stage(stage).work, "steps", None)
            share = max(0.0, 1 - latest.step / steps) if steps else 1.0
            saved = latest.size_bytes
        wishes = replace(
            wishes_of(pipeline, stage, self.limits),
            left_usd=self.left_usd(),
            left_seconds=self.left_seconds(),
            avoid=[one.host for one in self.rentals.all() if one.failed],
        )

        def plan(hardware: Hardware) -> Plan:
            start = Start(self._run_id, 1, self.store.url, read, resume=True)
            return build_plan(pipeline, stage, start, hardware)

        work = Work(share, num_bytes + saved, saved)
        choice = consider(pipeline, stage, self.vendor, wishes, (work, plan))
        if not choice.ranked:
            raise choice.refusal(wishes)
        best = choice.ranked[0].hardware
        self._ranked[stage] = [one for one in choice.ranked if _alike(one.hardware, best)]
        return best

    def candidates(self, plan: Plan) -> list[Quote]:
        """Machines for which the plan is made, the best first."""
        return self._ranked.get(plan.stage, [])

    def term(self, quote: Quote) -> Term:
        """For how long the machine may be paid at most, in whole seconds."""
        limits: dict[Ending, float] = {
            "money": (self.left_usd() - quote.traffic_usd) / quote.offer.usd_per_hour * offers.HOUR,
            "time": self.left_seconds(),
            "offer": min(quote.offer.lasts_seconds, longest_seconds(self.store.url)),
        }
        ending = min(limits, key=lambda name: limits[name])
        seconds = math.floor(limits[ending])
        return Term(time.time() + seconds, seconds, ending)


def _alike(one: Hardware, other: Hardware) -> bool:
    """Whether a plan for one is a plan for the other."""
    return one._replace(price_usd_per_device_hour=None) == other._replace(price_usd_per_device_hour=None)


def _output_bytes(store: Store, stage_key: str) -> int:
    files = outputs.load_output(store, stage_key)["files"]
    return sum(int(one["blob"].get("size_bytes", 0)) for one in files)
