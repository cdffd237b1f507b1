"""Which machine of a gang is at fault, by what all of them have measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlpipe.plan.plan import PreflightPlan
from mlpipe.store.preflight import Checked, to_avoid
from mlpipe.train.preflight.gang import rounds
from mlpipe.train.preflight.verdict import PEERS, Report, chosen, judge, slow_links

pytestmark = pytest.mark.unit
LIMITS = PreflightPlan(slow_ratio=0.5, clock_seconds=1.0, disk_bytes=1, store_bytes_per_second=1.0)


def gang(size, links=100e6):
    return [
        Report(
            index,
            f"n{index}",
            {"flops": 1e9 + index, "memory_bytes_per_second": 5e9, "store_bytes_per_second": 10e6},
            links={other: links for other in range(size) if other != index},
        )
        for index in range(size)
    ]


def test_equal_machines_pass():
    for size in (1, 2, 3, 8):
        assert judge(gang(size), LIMITS, 1.0).words == []


@pytest.mark.parametrize("figure", ["flops", "memory_bytes_per_second", "store_bytes_per_second"])
def test_the_slow_one_of_two_is_at_fault(figure):
    reports = gang(2)
    reports[1].figures[figure] *= 0.4
    assert set(judge(reports, LIMITS, 1.0).faults) == {"n1"}
    reports[1].figures[figure] *= 0.6 / 0.4
    assert judge(reports, LIMITS, 1.0).words == []


def test_a_machine_whose_gpus_have_slow_links_is_at_fault():
    """Some have none: of those, nothing is said."""
    reports = gang(4)
    for report, rate in zip(reports, (4e11, 1e10, 4e11), strict=False):
        report.figures[PEERS] = rate
    words = "between its GPUs 10 GB/s, where the others have 400"
    assert judge(reports, LIMITS, 1.0).faults == {"n1": [words]}


def test_a_store_that_is_fast_enough_is_nobodys_fault():
    reports = gang(3)
    for report, rate in zip(reports, (900e6, 900e6, 30e6), strict=True):
        report.figures["store_bytes_per_second"] = rate
    assert judge(reports, LIMITS, 1.0).words == []


def test_the_machine_all_of_whose_links_are_slow_is_at_fault():
    reports = gang(4)
    for report in reports:
        report.links = {other: 1e6 if 2 in (other, report.index) else 100e6 for other in report.links}
    checked = judge(reports, LIMITS, 1.0)
    assert (set(checked.faults), checked.pairs) == ({"n2"}, [])


def test_of_one_slow_link_among_good_ones_either_end_may_be_to_blame():
    reports = gang(4)
    reports[0].links[3] = reports[3].links[0] = 1e6
    checked = judge(reports, LIMITS, 1.0)
    assert checked.faults == {}
    assert checked.pairs == [("n0", "n3", "their link has 1 MB/s")]


def test_the_link_of_two_machines_is_judged_by_the_limit_alone():
    reports = gang(2, links=1e6)
    assert judge(reports, LIMITS, 1.0).words == []
    limits = PreflightPlan(0.5, 1.0, 1, 1.0, link_bytes_per_second=2e6)
    told = "their link has 1 MB/s, of 2 that it needs"
    assert judge(reports, limits, 1.0).pairs == [("n0", "n1", told)]


def test_of_three_clocks_the_odd_one_is_wrong_also_if_it_is_the_first():
    reports = gang(3)
    reports[1].clock_seconds = reports[2].clock_seconds = 3600.0
    assert judge(reports, LIMITS, 1.0).faults == {"n0": ["its clock is 3.6e+03 s behind"]}


def test_of_two_clocks_the_stores_tells_and_else_nobody():
    reports = gang(2)
    reports[1].clock_seconds = 5.0
    assert judge(reports, LIMITS, 1.0).pairs == [("n0", "n1", "their clocks are 5 s apart")]
    reports[0].store_clock_seconds, reports[1].store_clock_seconds = -5.2, -0.2
    assert judge(reports, LIMITS, 1.0).faults == {"n0": ["its clock is 5 s behind"]}


TAKEN = "others used 60 % of the CPUs"


@pytest.mark.parametrize("figure", ["flops", "memory_bytes_per_second", "store_bytes_per_second"])
def test_who_is_slow_while_others_take_its_cpus_is_told_and_blamed_for_nothing(figure):
    reports = gang(3)
    reports[1].figures[figure] *= 0.1
    reports[1].busy = {figure: TAKEN}
    checked = judge(reports, LIMITS, 1.0)
    assert checked.words == []
    (words,) = checked.busy["n1"]
    assert words.endswith(f"while {TAKEN}")
    reports[1].busy = dict.fromkeys(["flops", "memory_bytes_per_second", "store_bytes_per_second"], TAKEN)
    reports[1].busy[figure] = None  # in one look it had its CPUs to itself
    assert set(judge(reports, LIMITS, 1.0).faults) == {"n1"}


def test_links_that_were_slow_while_an_end_was_busy_blame_nobody_but_by_the_limit():
    reports = gang(4)
    for report in reports:
        report.links = {other: 1e6 if 2 in (other, report.index) else 100e6 for other in report.links}
    reports[2].busy = {f"link {other}": TAKEN for other in (0, 1, 3)}
    checked = judge(reports, LIMITS, 1.0)
    assert (checked.words, set(checked.busy)) == ([], {"n2"})
    reports[2].busy["link 3"] = None
    assert set(judge(reports, LIMITS, 1.0).faults) == {"n2"}
    reports[2].busy["link 3"] = TAKEN
    limits = PreflightPlan(0.5, 1.0, 1, 1.0, link_bytes_per_second=2e6)
    assert set(judge(reports, limits, 1.0).faults) == {"n2"}


def test_a_busy_machine_is_not_in_a_pair_that_is_blamed():
    reports = gang(4)
    reports[0].links[3] = reports[3].links[0] = 1e6
    assert slow_links(reports, LIMITS) == [(0, 3)]
    reports[3].busy = {"link 0": TAKEN}
    assert judge(reports, LIMITS, 1.0).words == []


def test_a_machine_that_told_nothing_in_the_end_is_missed_by_nobody():
    reports = gang(4)[:3]
    for report in reports:
        report.links[3] = 1e6
    assert judge(reports, LIMITS, 1.0).words == []


def test_what_is_wrong_alone_stands_beside_what_is_compared():
    reports = gang(3)
    reports[0].faults.append("nvidia-smi shows 7 GPUs of 8")
    assert judge(reports, LIMITS, 1.0).words == ["n0: nvidia-smi shows 7 GPUs of 8"]


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8, 33])
def test_in_each_round_machines_are_in_pairs(size):
    found = [list(rounds(index, size)) for index in range(size)]
    for index, others in enumerate(found):
        assert index not in others
        assert 1 <= len(set(others)) == len(others) <= 8
        assert all(index in found[other] for other in others)
    if size <= 8:
        assert all(len(others) == size - 1 for others in found)


def test_links_of_a_large_gang_are_tried_in_one_order_by_both_ends():
    """Who waits for a partner that waits for another one would wait for ever."""
    size = 21
    left = [list(rounds(index, size)) for index in range(size)]
    while any(left):
        done = [(i, others[0]) for i, others in enumerate(left) if others and left[others[0]][0] == i]
        assert done
        for index, _ in done:
            left[index].pop(0)


def test_the_one_of_a_pair_is_found_by_the_next_attempts():
    first = Checked(pairs=[("a", "b", "slow")])
    assert to_avoid([first], 0.5) == ("b",)
    second = Checked(pairs=[("a", "c", "slow")])
    assert to_avoid([first, second], 0.5) == ("a",)  # b was not to blame
    assert to_avoid([first, Checked(faults={"a": ["slow"]})], 0.5) == ("a",)


def test_ranks_go_to_machines_that_pass_in_their_order_and_to_busy_ones_last():
    reports = gang(5)
    everybody = judge(reports, LIMITS, 1.0)
    assert chosen(reports, everybody, 4) == [0, 1, 2, 3]
    assert chosen(reports, replace(everybody, faults={"n1": ["slow"]}), 4) == [0, 2, 3, 4]
    assert chosen(reports, replace(everybody, busy={"n0": ["slow"]}), 4) == [1, 2, 3, 4]
    assert chosen(reports, replace(everybody, busy={"n0": ["slow"]}), 5) == [0, 1, 2, 3, 4]
    assert chosen(reports, replace(everybody, pairs=[("n0", "n3", "slow")]), 4) == [0, 1, 2, 4]
    both = replace(everybody, faults={"n3": ["slow"]}, pairs=[("n0", "n3", "slow")])
    assert chosen(reports, both, 5) == [0, 1, 2, 4], "too few"


def test_who_got_as_slow_as_no_machine_may_be_is_left_out_too():
    trained = Checked(slow={"n1": 1.9, "n2": 2.1})
    assert to_avoid([trained], 0.5) == ("n2",)
    assert to_avoid([trained, Checked(faults={"n3": ["slow"]})], 0.6) == ("n1", "n2", "n3")
    assert to_avoid([Checked(slow={"n2": 0.0, "-n2": 9.0})], 0.5) == ()


def test_a_name_that_is_none_reaches_no_script():
    names = ["n1", "n2\n#SBATCH --wrap=x", "n3,n4", "-n5", "", "n6 "]
    assert to_avoid([Checked(faults={name: ["slow"] for name in names})], 0.5) == ("n1",)
