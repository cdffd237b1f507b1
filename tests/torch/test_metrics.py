"""How states of metrics are reduced over ranks: whatever rank saw whatever samples, the value is that of one
rank which saw them all."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit.metrics import CPU, batch, values

from mlpipe._core.errors import TrainError
from mlpipe.plan.validation import MetricPlan
from mlpipe.train.metrics import Metric, Metrics

pytestmark = pytest.mark.torch

OWN = ("Right", "Extremes", "Median", "Counts", "Merging")


def metric(name: str, **args: object) -> Metric:
    return Metric(MetricPlan(name.lower(), f"kit.metrics:{name}", args), CPU)


ACCURACY = MetricPlan("accuracy", "mlpipe.train.metrics:Accuracy")


@pytest.mark.parametrize(
    "plan",
    [*(MetricPlan(name.lower(), f"kit.metrics:{name}") for name in OWN), ACCURACY],
    ids=lambda plan: plan.name,
)
@settings(max_examples=15, deadline=None)
@example(owners=[0, 1, 1, 1, 1, 1])  # of four classes the first rank sees three at most
@given(owners=st.lists(st.integers(0, 2), min_size=6, max_size=6))
def test_every_sample_counts_once_wherever_it_was(plan, owners):
    """Also where a rank has none at all."""
    dealt = [[number for number, owner in enumerate(owners) if owner == rank] for rank in range(3)]
    whole = values(plan, [list(range(6))])
    assert values(plan, dealt) == pytest.approx(whole, rel=1e-6)
    assert any(value > 0 for value in whole.values())


def test_a_metric_begins_anew():
    one = metric("Right")
    for _ in range(2):
        one.begin()
        one.update(*batch(2, 3))
        found = one.values([one.state()])
    assert found == values(MetricPlan("right", "kit.metrics:Right"), [[2]])


def test_targets_that_do_not_count_are_not_given_to_metrics_of_logits_and_targets():
    outputs, given = batch(1, 2)
    given["targets"][0, 1:] = -100
    one = metric("Merging")
    one.update(outputs, given)
    assert one.current.total == 4


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Unreducible", r"its attribute 'seen', a set, cannot be reduced over ranks"),
        ("Table", r"compute\(\) gives a tensor of shape \(3,\)"),
    ],
)
def test_what_cannot_be_reduced_or_told_is_refused(name, words):
    ranks = [metric(name) for _ in range(2)]
    for number, one in enumerate(ranks):
        one.update(*batch(number, 3))
    with pytest.raises(TrainError, match=words) as caught:
        ranks[0].values([one.state() for one in ranks])
    assert (caught.value.kind, caught.value.where) == ("input", f"kit.metrics:{name}")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("not_a_metric", r"makes a str without update\(\)"),
        ("Misspelt", r"reduce\['most'\] is 'maximum'"),
        ("Missing", r"has no function 'Missing'"),
    ],
)
def test_what_is_no_metric_is_refused_before_the_first_step(name, words):
    with pytest.raises(TrainError, match=words) as caught:
        metric(name)
    assert caught.value.kind == "input"


def test_ranks_that_have_the_same_samples_count_them_once():
    """As those of a tensor-parallel group will."""
    for holds_loss, expected in ((True, 12 + 3), (False, 3)):
        world = SimpleNamespace(holds_loss=holds_loss, size=1, device=CPU)
        found = Metrics([MetricPlan("counts", "kit.metrics:Counts")], world)  # type: ignore[arg-type]
        found.update(*batch(3, 4))
        assert found.metrics[0].current.parity[0] + found.metrics[0].current.parity[1] == expected


def test_the_watchdog_hears_whose_code_computes():
    world = SimpleNamespace(holds_loss=True, size=1, device=CPU)
    found = Metrics([MetricPlan("right", "kit.metrics:Right")], world)  # type: ignore[arg-type]
    found.update(*batch(3, 4))
    beats: list[str] = []
    found.values(beats.append)
    assert beats == ["the metric right"]
