"""Machines for rent, and what each would cost to finish a stage: the arithmetic of `submit --to rented`.

An offer says what its machine has; the catalogue and the planner say how long a step takes there. What no
offer says is assumed, each in a constant here. Pure: no network, no clock, no vendor.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mlpipe._core.errors import PlanError
from mlpipe._core.units import format_bytes, parse_bytes
from mlpipe.plan.grace import checkpoint_bytes
from mlpipe.plan.hardware import GPUS, Hardware, cpu_speed
from mlpipe.plan.plan import Plan
from mlpipe.plan.pods import host_bytes
from mlpipe.plan.work import TrainPlan

if TYPE_CHECKING:
    from mlpipe.spec.model import Resources

GIB = 2**30
HOUR = 3600.0
IMAGE_BYTES = 6 * GIB  # assumed: a compressed image with torch and CUDA's libraries
BOOT_SECONDS = 90.0  # assumed: from the order to a running container, its image fetched
SPOT_SECONDS = 6 * HOUR  # assumed: between two interruptions of a machine that others may outbid
RETURN_SECONDS = 120.0  # that are kept for returning a machine, after what it saves
UNKNOWN_SECONDS = HOUR  # of a stage whose time nobody predicts; its offers are compared by this
_SPARE_DISK_BYTES = 8 * GIB


@dataclass(frozen=True)
class Offer:
    """What a vendor has for rent. `machine`: the vendor's id of it, which outlives the offer. `gpu`: its name
    in the catalogue, None where that lacks it. `usd_per_hour`: of the whole machine, with the disk that was
    asked for. `bid_usd_per_hour`: of a machine that others may outbid. `lasts_seconds`: its longest rental.
    Speeds in bytes a second; `link`: between its GPUs, None where nobody measured it."""

    id: str
    machine: str
    gpu: str | None
    gpu_name: str
    num_gpus: int
    gpu_memory_bytes: int
    cpus: float
    memory_bytes: int
    disk_bytes: int
    usd_per_hour: float
    download_bytes_per_second: float
    upload_bytes_per_second: float
    disk_bytes_per_second: float
    link_bytes_per_second: float | None = None
    usd_per_byte_down: float = 0.0
    usd_per_byte_up: float = 0.0
    reliability: float = 1.0
    region: str = ""
    bid_usd_per_hour: float | None = None
    lasts_seconds: float = math.inf

    @property
    def is_spot(self) -> bool:
        return self.bid_usd_per_hour is not None


@dataclass(frozen=True)
class Wishes:
    """What the user asks of machines besides the stage's resources. `gpus`: names of the catalogue; empty:
    any. `regions`: ends of an offer's region, such as `DE`. `left_usd`, `left_seconds`: of the run's budget
    and time. `avoid`: machines that failed this run."""

    left_usd: float
    left_seconds: float = math.inf
    gpus: tuple[str, ...] = ()
    regions: tuple[str, ...] = ()
    min_reliability: float = 0.95
    spot: bool = False
    avoid: Collection[str] = ()


@dataclass(frozen=True)
class Work:
    """What is left of a stage. `share_left`: of its steps, 0 to 1. `input_bytes`: what it reads, its
    checkpoint included; `saved_bytes`: one checkpoint, 0: as the planner counts it."""

    share_left: float = 1.0
    input_bytes: int = 0
    saved_bytes: int = 0


@dataclass(frozen=True)
class Quote:
    """What an offer costs to the end of the stage, with `disk_bytes` of its disk. `seconds`: from the order
    on; None: nobody predicts it, and `usd` is of `UNKNOWN_SECONDS`. `traffic_usd`: what of `usd` is not paid
    by the hour. `reserve_seconds`: kept besides, to save and return it in time if it takes longer."""

    offer: Offer
    hardware: Hardware
    prepare_seconds: float
    seconds: float | None
    usd: float
    traffic_usd: float
    reserve_seconds: float
    disk_bytes: int = 0

    @property
    def reserve_usd(self) -> float:
        return self.reserve_seconds / HOUR * self.offer.usd_per_hour


class UnfitError(Exception):
    """Why an offer is none for this stage."""


def disk_bytes(resources: Resources | None, work: Work) -> int:
    """What is rented of the disk: as the stage asks, else room for the image unpacked, the inputs, and two
    checkpoints."""
    if resources is not None and resources.disk:
        return parse_bytes(resources.disk) + 3 * IMAGE_BYTES
    return 3 * IMAGE_BYTES + work.input_bytes + 2 * work.saved_bytes + _SPARE_DISK_BYTES


def hardware_of(offer: Offer, resources: Resources | None) -> Hardware:
    """What the planner knows of the offer's machine. Raises UnfitError."""
    asked = (resources.cpus if resources else None) or 0.0
    memory = parse_bytes(resources.memory) if resources and resources.memory else 0
    if offer.cpus < max(1.0, asked):
        raise UnfitError(f"{offer.cpus:g} cores")
    if offer.memory_bytes < memory:
        raise UnfitError(f"{format_bytes(offer.memory_bytes)} of memory")
    cpus = int(asked or offer.cpus)
    num_gpus = resources.gpus_per_node if resources else 0
    if not num_gpus:
        workers = (resources.workers_per_node if resources else None) or 1
        share = (memory or offer.memory_bytes) // workers
        speed, price = cpu_speed(cpus / workers), offer.usd_per_hour / workers
        return Hardware("cpu", 1, workers, share, "CPU worker", {}, cpus, speed, price)
    if offer.num_gpus != num_gpus:
        raise UnfitError(f"{offer.num_gpus} GPUs")
    if offer.gpu is None:
        raise UnfitError(f"{offer.gpu_name} is not in the catalogue")
    gpu = GPUS[offer.gpu]
    speed = gpu.speed
    if num_gpus > 1 and offer.link_bytes_per_second is not None:  # whole GB/s: few hardwares to plan for
        link = max(1.0, math.floor(offer.link_bytes_per_second / 1e9)) * 1e9
        speed = speed._replace(link_bytes_per_second=min(speed.link_bytes_per_second, link))
    return Hardware(
        "cuda",
        1,
        num_gpus,
        min(gpu.memory_bytes, offer.gpu_memory_bytes),
        offer.gpu,
        gpu.speed.peak_flops,
        cpus,
        speed,
        offer.usd_per_hour / num_gpus,
    )


def quote(offer: Offer, hardware: Hardware, plan: Plan, work: Work) -> Quote:
    """`plan`: of the stage on this hardware. A machine that is up for a share of the time takes as much
    longer; an interruption costs the preparation and half of what is between two checkpoints, again."""
    fetched = IMAGE_BYTES + work.input_bytes
    prepare = BOOT_SECONDS + fetched / min(offer.download_bytes_per_second, offer.disk_bytes_per_second)
    training = plan.part(TrainPlan)
    seconds: float | None = None
    saves, saved = 1.0, work.saved_bytes
    if training is not None:
        saved = saved or checkpoint_bytes(training) or 0
    if training is not None and training.predicted is not None:
        steps = math.ceil(training.steps * work.share_left)
        computing = steps * training.predicted.step_seconds
        checkpoint = training.checkpoint
        every = checkpoint.every_seconds or (checkpoint.every_steps or 1) * training.predicted.step_seconds
        saves = max(1.0, math.ceil(computing / every))
        sending = saves * saved / offer.upload_bytes_per_second
        running = max(computing, sending) / offer.reliability
        again = running / SPOT_SECONDS * (prepare + every / 2) if offer.is_spot else 0.0
        seconds = prepare + running + again
    traffic = work.input_bytes * offer.usd_per_byte_down + saves * saved * offer.usd_per_byte_up
    traffic += IMAGE_BYTES * offer.usd_per_byte_down
    paid = prepare + UNKNOWN_SECONDS if seconds is None else seconds
    usd = paid / HOUR * offer.usd_per_hour + traffic
    return Quote(offer, hardware, prepare, seconds, usd, traffic, reserve_seconds(plan))


def reserve_seconds(plan: Plan) -> float:
    """Before the end of its term a machine is told to save by so much."""
    return plan.launch.shutdown_seconds + RETURN_SECONDS


def why_not(offer: Offer, wishes: Wishes) -> str | None:
    """What of the user's wishes the offer does not meet, without its price; None: it meets all."""
    if offer.machine in wishes.avoid:
        return "failed this run before"
    if wishes.gpus and offer.gpu not in wishes.gpus:
        return f"its GPU is {offer.gpu_name}"
    if wishes.regions and not offer.region.endswith(wishes.regions):
        return f"in {offer.region or 'an unknown region'}"
    if offer.reliability < wishes.min_reliability:
        return f"reliability {offer.reliability:.3f}"
    if offer.is_spot and not wishes.spot:
        return "others may outbid it"
    return None


def too_much(quoted: Quote, wishes: Wishes) -> str | None:
    """Why it cannot finish within what is left of money and time; None: it can."""
    if quoted.usd + quoted.reserve_usd > wishes.left_usd:
        return (
            f"${quoted.usd:.2f} to finish, and ${quoted.reserve_usd:.2f} kept for a save in time, are more "
            f"than ${wishes.left_usd:.2f}"
        )
    longest = min(wishes.left_seconds, quoted.offer.lasts_seconds)
    if (quoted.seconds or quoted.prepare_seconds) + quoted.reserve_seconds > longest:
        return f"takes longer than {longest / HOUR:.1f} h"
    return None


def rank(quotes: Iterable[Quote], wishes: Wishes) -> list[Quote]:
    """Those that can finish, the cheapest first; of two that cost the same, the quicker."""
    fitting = [one for one in quotes if too_much(one, wishes) is None]
    return sorted(fitting, key=lambda one: (one.usd, one.seconds or math.inf, one.offer.id))


def table(quotes: Sequence[Quote], chosen: Quote | None) -> str:
    """For people, a line an offer."""
    lines = [f"{'':2}{'OFFER':>12}  {'GPUS':<16}{'USD/H':>8}{'HOURS':>8}{'USD':>9}  {'RELIABLE':>8}  REGION"]
    for one in quotes:
        offer = one.offer
        gpus = f"{offer.num_gpus} x {offer.gpu_name}" if one.hardware.device == "cuda" else "CPU"
        hours = f"{one.seconds / HOUR:.2f}" if one.seconds is not None else "?"
        mark = "*" if one is chosen else ""
        spot = " (may be outbid)" if offer.is_spot else ""
        lines.append(
            f"{mark:2}{offer.id:>12}  {gpus:<16}{offer.usd_per_hour:8.3f}{hours:>8}{one.usd:9.2f}  "
            f"{offer.reliability:8.3f}  {offer.region}{spot}"
        )
    return "\n".join(lines)


def consider(
    offers: Iterable[Offer],
    resources: Resources | None,
    wishes: Wishes,
    work: Work,
    make_plan: Callable[[Hardware], Plan],
) -> tuple[list[Quote], dict[str, int]]:
    """What each offer that can run the stage would cost, whether or not that is too much; and how many
    cannot, by the reason. `make_plan`: of the stage on a hardware, of which there are fewer than offers."""
    quotes: list[Quote] = []
    unfit: Counter[str] = Counter()
    planned: dict[str, Plan | str] = {}
    disk = disk_bytes(resources, work)
    for offer in offers:
        try:
            if (reason := why_not(offer, wishes)) is not None:
                raise UnfitError(reason)
            if offer.disk_bytes < disk:
                raise UnfitError(f"less than {format_bytes(disk)} of disk")
            hardware = hardware_of(offer, resources)
            key = repr(hardware._replace(price_usd_per_device_hour=None))  # its text leaves out links
            if key not in planned:
                try:
                    planned[key] = make_plan(hardware)
                except PlanError as error:
                    planned[key] = error.message
            plan = planned[key]
            if isinstance(plan, str):
                raise UnfitError(plan)
            if offer.memory_bytes < host_bytes(plan.work, plan.launch):  # of what waits there
                raise UnfitError(f"{format_bytes(offer.memory_bytes)} of memory")
            quotes.append(replace(quote(offer, hardware, plan, work), disk_bytes=disk))
        except UnfitError as unfitting:
            unfit[str(unfitting)] += 1
    return quotes, dict(unfit.most_common())
