"""What machines for rent cost to finish a training, and which of them is chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.rendered import pipeline_of

from mlpipe.plan import offers
from mlpipe.plan.build import Start, build_plan
from mlpipe.plan.hardware import GPUS, Hardware
from mlpipe.plan.offers import GIB, HOUR, Offer, Quote, Wishes, Work
from mlpipe.plan.plan import Plan
from mlpipe.spec.model import Resources

pytestmark = pytest.mark.unit
PIPELINE = pipeline_of(
    "quickstart",
    "stages.train.resources={gpus_per_node: 1, gpu: RTX-4090}",
    "stages.train.train.steps=200000",
    "stages.train.train.checkpoint.every=10000 steps",
)
RESOURCES = PIPELINE.stage("train").resources
WHOLE = Work()
PLANS: dict[str, Plan] = {}  # of a handful of hardwares


def plan_on(hardware: Hardware) -> Plan:
    key = repr(hardware._replace(price_usd_per_device_hour=None))
    if key not in PLANS:
        PLANS[key] = build_plan(PIPELINE, "train", Start("r", 1, "s3://b/p"), hardware)
    return PLANS[key]


def offer(number: int = 1, **changes: Any) -> Offer:
    made = Offer(
        id=str(number),
        machine=f"m{number}",
        gpu="RTX-4090",
        gpu_name="RTX 4090",
        num_gpus=1,
        gpu_memory_bytes=GPUS["RTX-4090"].memory_bytes,
        cpus=16,
        memory_bytes=64 * GIB,
        disk_bytes=500 * GIB,
        usd_per_hour=0.4,
        download_bytes_per_second=1e8,
        upload_bytes_per_second=1e8,
        disk_bytes_per_second=1e9,
        reliability=0.99,
        region="Germany, DE",
    )
    return replace(made, **changes)


def considered(given_offers: list[Offer], wishes: Wishes, work: Work = WHOLE) -> list[Quote]:
    return offers.consider(given_offers, RESOURCES, wishes, work, plan_on)[0]


def any_offer() -> st.SearchStrategy[Offer]:
    prices, speeds = st.floats(0.01, 20.0), st.floats(1e5, 1e9)
    return st.builds(
        offer,
        st.integers(1, 999),
        gpu=st.sampled_from(["RTX-4090", "RTX-3090", "H100-80GB", "T4", None]),
        num_gpus=st.sampled_from([1, 1, 1, 2]),
        cpus=st.sampled_from([16, 8, 16, 0.5]),
        disk_bytes=st.sampled_from([500 * GIB, 600 * GIB, GIB]),
        gpu_memory_bytes=st.sampled_from([80 * GIB, 40 * GIB, 2**20]),
        usd_per_hour=prices,
        download_bytes_per_second=speeds,
        upload_bytes_per_second=speeds,
        usd_per_byte_down=st.floats(0, 1e-10),
        usd_per_byte_up=st.floats(0, 1e-10),
        reliability=st.sampled_from([0.99, 0.95, 1.0, 0.9]),
        bid_usd_per_hour=st.none() | prices,
        lasts_seconds=st.floats(60, 1e7),
    )


@given(
    st.lists(any_offer(), max_size=12, unique_by=lambda one: one.id),
    st.builds(
        Wishes,
        st.floats(0, 5),
        st.floats(60, 1e5),
        spot=st.booleans(),
        gpus=st.sampled_from([(), ("RTX-3090",)]),
        avoid=st.sampled_from([(), ("m1", "m2")]),
    ),
    st.builds(Work, st.floats(0, 1), st.integers(0, 10**11), st.integers(0, 10**10)),
)
def test_the_cheapest_that_finishes_within_money_and_time_is_chosen(
    all_offers: list[Offer], wishes: Wishes, work: Work
) -> None:
    quotes = considered(all_offers, wishes, work)
    ranked = offers.rank(quotes, wishes)
    for one in ranked:
        made = one.offer
        assert one.usd + one.reserve_usd <= wishes.left_usd
        assert one.seconds is not None
        assert one.seconds + one.reserve_seconds <= min(wishes.left_seconds, made.lasts_seconds)
        assert made.num_gpus == 1
        assert made.reliability >= wishes.min_reliability
        assert made.machine not in wishes.avoid
        assert wishes.spot or not made.is_spot
        assert made.gpu is not None
        assert not wishes.gpus or made.gpu in wishes.gpus
        # what the hours and the bytes cost, no less
        assert one.usd >= one.seconds / HOUR * made.usd_per_hour
    fitting = [
        one
        for one in quotes
        if one.usd + one.reserve_usd <= wishes.left_usd
        and one.seconds is not None
        and one.seconds + one.reserve_seconds <= min(wishes.left_seconds, one.offer.lasts_seconds)
    ]
    assert len(ranked) == len(fitting)
    assert not fitting or ranked[0].usd == min(one.usd for one in fitting)
    assert offers.rank(reversed(quotes), wishes) == ranked


@given(st.integers(1, 50), st.floats(0, 1))
def test_the_fewer_steps_are_left_the_less_it_costs(number: int, share: float) -> None:
    one = offer(number)
    wishes = Wishes(1e6)
    (whole,), (part,) = considered([one], wishes), considered([one], wishes, Work(share))
    (nothing,) = considered([one], wishes, Work(0.0))
    assert whole.seconds is not None
    assert part.seconds is not None
    assert nothing.seconds is not None
    assert nothing.prepare_seconds < nothing.seconds <= part.seconds <= whole.seconds
    assert nothing.usd <= part.usd <= whole.usd


def test_a_dear_hour_may_be_the_cheap_run() -> None:
    fast = offer(1, gpu="H100-80GB", gpu_memory_bytes=80 * GIB, usd_per_hour=1.0)
    slow = offer(2, gpu="T4", gpu_memory_bytes=16 * GIB, usd_per_hour=0.5)
    ranked = offers.rank(considered([slow, fast], Wishes(1e6)), Wishes(1e6))
    assert [one.offer.id for one in ranked] == ["1", "2"]


@pytest.mark.parametrize(
    "worse",
    [
        {"reliability": 0.95},
        {"download_bytes_per_second": 1e6},
        {"usd_per_byte_up": 1e-8},
        {"usd_per_byte_down": 1e-9},
        {"upload_bytes_per_second": 1e4},
        {"disk_bytes_per_second": 1e6},
        {"bid_usd_per_hour": 0.4},
    ],
)
def test_what_costs_time_or_bytes_costs_dollars(worse: dict[str, Any]) -> None:
    work, wishes = Work(1.0, 10**10, 10**8), Wishes(1e6, spot=True)
    good, bad = considered([offer(1), offer(2, **worse)], wishes, work)
    assert bad.usd > good.usd


def test_links_between_gpus_are_the_machines_own() -> None:
    two = Resources(gpus_per_node=2, gpu="RTX-4090")
    slow = offers.hardware_of(offer(num_gpus=2, link_bytes_per_second=3.7e9), two)
    assert slow.speed.link_bytes_per_second == 3e9
    fast = offers.hardware_of(offer(num_gpus=2, link_bytes_per_second=900e9), two)
    assert fast.speed == GPUS["RTX-4090"].speed


@pytest.mark.parametrize("worse", [{"link_bytes_per_second": 1e9}, {"gpu_memory_bytes": 12 * GIB}])
def test_an_offer_is_quoted_by_its_own_plan(worse: dict[str, Any]) -> None:
    """Also beside another one of as many of the same GPUs."""
    two = "stages.train.resources={gpus_per_node: 2, gpu: RTX-4090}"
    pipeline = pipeline_of("quickstart", two, "stages.train.train.model={preset: llama-350m, seq_len: 1024}")
    seen: list[Hardware] = []

    def make_plan(hardware: Hardware) -> Plan:
        seen.append(hardware)
        return build_plan(pipeline, "train", Start("r", 1, "s3://b/p"), hardware)

    both = [offer(1, num_gpus=2), offer(2, num_gpus=2, **worse)]
    quotes, _ = offers.consider(both, pipeline.stage("train").resources, Wishes(1e6), WHOLE, make_plan)
    alone, _ = offers.consider(both[1:], pipeline.stage("train").resources, Wishes(1e6), WHOLE, make_plan)
    assert quotes[1:] == alone
    assert seen == [quotes[0].hardware, alone[0].hardware, alone[0].hardware]


def test_a_machine_without_room_for_what_waits_on_the_host_is_none() -> None:
    def offloaded(hardware: Hardware) -> Plan:
        plan = plan_on(hardware)
        return replace(plan, work=plan.work.training._replace(host_memory_bytes=28 * GIB))

    roomy, small = offer(1, memory_bytes=32 * GIB), offer(2, memory_bytes=32 * GIB - 1)
    quotes, unfit = offers.consider([roomy, small], RESOURCES, Wishes(1e6), Work(), offloaded)
    assert [one.offer.id for one in quotes] == ["1"]
    assert unfit == {"32.0 GiB of memory": 1}


def test_the_reasons_are_counted_and_the_table_marks_the_choice() -> None:
    given_offers = [offer(1), offer(2, num_gpus=4), offer(3, region="Japan, JP"), offer(4, gpu=None)]
    wishes = Wishes(100.0, regions=("DE",))
    quotes, unfit = offers.consider(given_offers, RESOURCES, wishes, Work(), plan_on)
    assert unfit == {"4 GPUs": 1, "in Japan, JP": 1, "RTX 4090 is not in the catalogue": 1}
    lines = offers.table(quotes, quotes[0]).splitlines()
    assert lines[1].split()[:5] == ["*", "1", "1", "x", "RTX"]
    assert f"{quotes[0].usd:.2f}" in lines[1]


def test_of_two_that_cost_the_same_the_quicker() -> None:
    wishes = Wishes(1e6)
    (first,) = considered([offer(1)], wishes)
    quicker = replace(first, seconds=1.0, offer=offer(9))
    assert offers.rank([first, quicker], wishes) == [quicker, first]
