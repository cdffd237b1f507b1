from __future__ import annotations

import random
from collections import Counter
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlpipe._core.pipelines import SCHEDULES, stages_per_rank, why_not
from mlpipe.plan.pipelining import (
    Action,
    Transfer,
    bubble_passes,
    held,
    idle_ratio,
    num_transfers,
    order,
    orders,
    with_transfers,
)
from mlpipe.plan.stages import even_cut, split_blocks

pytestmark = pytest.mark.unit

sizes = st.tuples(st.sampled_from(SCHEDULES), st.integers(2, 6), st.integers(1, 14)).filter(
    lambda size: why_not(*size) is None
)


@given(sizes)
def test_every_microbatch_passes_every_stage_once_each_way(size):
    schedule, num_ranks, num_microbatches = size
    found = Counter(action for actions in orders(*size) for action in actions)
    back = "IW" if schedule == "zero_bubble" else "B"
    stages = range(num_ranks * stages_per_rank(schedule))
    assert found == Counter(
        Action(kind, stage, number)
        for kind in f"F{back}"
        for stage in stages
        for number in range(num_microbatches)
    )
    for rank, actions in enumerate(orders(*size)):
        assert {action.stage % num_ranks for action in actions} == {rank}


@given(sizes)
def test_two_ranks_exchange_in_one_order_and_never_wait_for_each_other(size):
    """By queues for each pair of ranks, as NCCL has: a transfer ends when both have come to it."""
    _, num_ranks, _ = size
    lists = [list(actions) for actions in with_transfers(*size)]
    position = [0] * num_ranks

    def peer(rank, transfer):
        towards = 1 if transfer.kind == "F" else -1
        other = transfer.stage + towards if transfer.sends else transfer.stage
        return other % num_ranks

    between = {
        pair: [
            [t._replace(sends=True) for t in lists[a] if isinstance(t, Transfer) and peer(a, t) == b]
            for a, b in (pair, pair[::-1])
        ]
        for pair in combinations(range(num_ranks), 2)
    }
    for one, other in between.values():
        assert one == other
    # nobody passes a stage before what it needs has come, and nothing comes before it was sent
    done: set = set()
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(lists):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                needs = None
                if isinstance(action, Transfer) and not action.sends:
                    needs = action._replace(sends=True)
                elif isinstance(action, Action) and action.kind == "F" and action.stage > 0:
                    needs = Transfer(False, "F", action.stage - 1, action.microbatch)
                if needs is not None and needs not in done:
                    break
                done.add(action)
                position[rank] += 1
                moved = True
    assert position == [len(actions) for actions in lists]


@given(sizes)
def test_no_rank_waits_for_ever_until_what_it_has_sent_is_taken(size):
    """Where it waits at once, until the other one has come to receive it, which goes on without waiting."""
    lists = [list(actions) for actions in with_transfers(*size)]
    last, position = size[1] * stages_per_rank(size[0]) - 1, [0] * size[1]
    sent: set[Transfer] = set()
    taken: set[Transfer] = set()

    def waits(action):
        if isinstance(action, Transfer):
            (sent if action.sends else taken).add(action._replace(sends=True))
            return action.sends and action not in taken
        kind, stage = ("F", action.stage - 1) if action.kind == "F" else ("B", action.stage + 1)
        elsewhere = action.kind != "W" and 0 <= stage <= last
        return elsewhere and Transfer(True, kind, stage, action.microbatch) not in sent

    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(lists):
            while position[rank] < len(actions) and not waits(actions[position[rank]]):
                position[rank] += 1
                moved = True
    assert position == [len(actions) for actions in lists]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_ranks_are_idle_as_long_as_the_papers_say(schedule, num_ranks):
    """Slots of a simulated clock, where backward passes take twice as long as forward passes."""
    num_microbatches = 4 * num_ranks
    forward, backward = bubble_passes(schedule, num_ranks)
    idle, busy = forward + 2 * backward, 3 * num_microbatches
    found = idle_ratio(orders(schedule, num_ranks, num_microbatches))
    per_stage = stages_per_rank(schedule)
    assert found == pytest.approx(idle / (idle + busy), rel=1e-6), per_stage


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_what_a_rank_sends_and_receives_is_counted(schedule, num_ranks):
    for rank, actions in enumerate(with_transfers(schedule, num_ranks, 2 * num_ranks)):
        found = sum(isinstance(action, Transfer) for action in actions)
        assert num_transfers(schedule, rank, num_ranks, 2 * num_ranks) == found, rank


def test_zero_bubble_is_idle_less_than_1f1b_and_interleaved():
    ratios = {schedule: idle_ratio(orders(schedule, 4, 8)) for schedule in SCHEDULES}
    assert ratios["zero_bubble"] < ratios["interleaved"] < ratios["1f1b"] == ratios["gpipe"]


def test_what_is_held():
    """In parts of all stages of a rank: of how many microbatches it keeps anything."""
    most = {
        schedule: [
            max((sum(one.kept) + one.put_off) / len(one.kept) for one in held(schedule, rank, 4, 16))
            for rank in range(4)
        ]
        for schedule in SCHEDULES
    }
    assert most == {
        "gpipe": [16, 16, 16, 16],
        "1f1b": [4, 3, 2, 1],
        "interleaved": [5.5, 4.5, 3.5, 2.5],
        "zero_bubble": [4, 4, 4, 4],
    }
    # of all that zero_bubble holds, so many wait for weights' gradients alone
    waiting = [max(one.put_off for one in held("zero_bubble", rank, 4, 16)) for rank in range(4)]
    assert waiting == [1, 2, 3, 4]
    assert max(one.kept[0] for one in held("zero_bubble", 2, 4, 16)) == 2
    assert max(one.kept[1] for one in held("interleaved", 3, 4, 16)) == 1  # which has the logits


def test_what_interleaved_cannot_do():
    with pytest.raises(ValueError, match="which do not divide 5"):
        order("interleaved", 0, 2, 5)
    assert why_not("interleaved", 4, 3) is None  # fewer than ranks


@given(st.integers(1, 9), st.integers(0, 30), st.floats(0, 9), st.floats(0, 9))
def test_stages_are_as_even_as_blocks_allow(num_stages, more, first, last):
    counts = split_blocks(num_stages + more, num_stages, first=first, last=last)
    assert sum(counts) == num_stages + more
    assert min(counts) >= 1
    costs = [count + first * (i == 0) + last * (i == num_stages - 1) for i, count in enumerate(counts)]
    # no block of a longest stage would lie better elsewhere
    longest = max(costs)
    movable = all(count > 1 for count, cost in zip(counts, costs, strict=True) if cost == longest)
    assert not (movable and min(costs) + 1 < longest - 1e-9)


def test_the_head_takes_the_place_of_blocks():
    assert split_blocks(8, 2) == (4, 4)
    assert split_blocks(8, 2, last=2.0) == (5, 3)
    assert split_blocks(7, 3) == (2, 2, 3)
    with pytest.raises(ValueError, match="2 blocks make no 3 stages"):
        split_blocks(2, 3)


def test_a_more_even_cut_there_is_not():
    """Against all there are, for numbers in which many are equal."""
    draw = random.Random(7)
    for _ in range(200):
        flops = [draw.choice([0.0, 1.0, 2.0, 5.0]) for _ in range(draw.randint(1, 8))]
        num_stages = draw.randint(1, len(flops))
        longest = {
            cut: max(sum(flops[begin:end]) for begin, end in pairwise((0, *cut, len(flops))))
            for cut in combinations(range(1, len(flops)), num_stages - 1)
        }
        found = even_cut(flops, num_stages)
        assert longest[found] == min(longest.values())
    with pytest.raises(ValueError, match="2 children make no 3 stages"):
        even_cut([1.0, 1.0], 3)
