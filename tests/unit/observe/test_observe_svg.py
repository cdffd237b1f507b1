"""Axes, buckets and charts hold for any numbers."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlpipe.observe.axes import LinearScale, domain, finite, into_bins, label, ticks
from mlpipe.observe.plots import WIDTH, Bar, Mark, Plot, Series, line_plot, share_bars, stacked_plot
from mlpipe.observe.report import environment

pytestmark = pytest.mark.unit

number = st.floats(-1e99, 1e99)
any_value = st.none() | st.floats() | st.floats(-100, 100)
curve = st.lists(any_value, max_size=700).map(lambda ys: [(float(x + 1), y) for x, y in enumerate(ys)])


@given(number, number, st.integers(5, 9))
def test_ticks_are_few_round_even_and_inside(one, other, most):
    low, high = domain([one, other], zero=False)
    found = ticks(low, high, most)
    span = high - low
    assert 2 <= len(found) <= most
    assert all(low - 1e-6 * span <= tick <= high + 1e-6 * span for tick in found)
    gaps = [right - left for left, right in pairwise(found)]
    assert min(gaps) > 0
    assert max(gaps) == pytest.approx(min(gaps), rel=1e-3)
    assert f"{gaps[0]:.1e}"[:3] in ("1.0", "2.0", "5.0")


@given(st.lists(number, max_size=20), st.booleans())
def test_a_domain_is_never_empty_and_holds_everything(values, zero):
    low, high = domain(values, zero=zero)
    assert low < high
    assert all(low <= value <= high for value in values)
    assert not zero or low <= 0 <= high


@given(number, number, st.floats(0, 1))
def test_a_scale_maps_the_ends_to_the_ends_and_stays_between(one, other, share):
    low, high = domain([one, other], zero=False)
    scale = LinearScale(low, high, 188, 12)
    assert scale(low) == pytest.approx(188)
    assert scale(high) == pytest.approx(12)
    assert 11.9 <= scale(low + share * (high - low)) <= 188.1


@given(curve, st.integers(1, 300))
def test_buckets_hold_every_point_once_in_order(points, most):
    buckets = into_bins(points, most)
    assert len(buckets) <= most
    inside = [[p for p in points if b.first <= p[0] <= b.last] for b in buckets]
    assert [p[0] for part in inside for p in part] == [p[0] for p in points]
    for bucket, part in zip(buckets, inside, strict=True):
        known = [y for _, y in part if finite(y)]
        assert (bucket.mean is None) == (not known)
        if known:
            assert (bucket.low, bucket.high) == (min(known), max(known)), "a spike is never averaged away"
            assert bucket.mean == pytest.approx(
                math.fsum(known) / len(known), abs=1e-6 * max(map(abs, known))
            )


SVG = environment(is_html=True).get_template("plot.svg.jinja").module


def draw(plot: Plot) -> ET.Element:
    return parse(SVG.chart(plot))


def parse(svg: str) -> ET.Element:
    root = ET.fromstring(svg)
    for element in root.iter():
        for name in ("x", "x1", "x2", "cx", "y", "cy", "width", "height"):
            if name in element.attrib:
                assert -20 <= float(element.attrib[name]) <= WIDTH, f"{name} is off the picture"
        assert "nan" not in element.attrib.get("d", "")
        assert "inf" not in element.attrib.get("d", "")
    return root


text_of_xml = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"], exclude_characters="\ufffe\uffff")
)


@given(st.lists(curve, max_size=3), st.lists(st.builds(Mark, number, st.just("bad"), text_of_xml)))
def test_any_lines_give_well_formed_svg_with_everything_on_the_picture(curves, marked):
    series = [Series(f"rank {index}", "blue", points) for index, points in enumerate(curves)]
    draw(line_plot(series, marked, unit="<&>"))


@given(curve, curve)
def test_any_stack_gives_well_formed_svg(one, other):
    length = min(len(one), len(other))
    parts = [Series("a", "blue", one[:length]), Series("b & c", "amber", other[:length])]
    draw(stacked_plot(parts, [], unit="ms"))


def test_a_gap_where_the_value_is_not_finite():
    points = [(1.0, 2.0), (2.0, 2.5), (3.0, math.nan), (4.0, None), (5.0, 3.0), (6.0, 2.0)]
    svg = draw(line_plot([Series("", "blue", points)], [], unit="nats"))
    assert len([e for e in svg.iter() if e.tag.endswith("path")]) == 2
    titles = [e.text for e in svg.iter() if e.tag.endswith("title")]
    assert "step 3\nnot finite" in titles
    assert "step 5\n3 nats" in titles


def test_one_point_is_a_dot():
    draw(line_plot([Series("", "blue", [(2.0**62, 2.0), (2.0**62 + 512, 2.0)])], [], unit="nats"))
    svg = draw(line_plot([Series("", "blue", [(1.0, 2.0)])], [], unit="nats"))
    assert any(e.tag.endswith("circle") and e.get("opacity") is None for e in svg.iter())


def test_marks_off_the_axis_or_on_top_of_each_other_are_not_drawn_twice():
    points = [(float(step), 1.0) for step in range(1, 101)]
    many = [Mark(50.0, "checkpoint", f"no {n}") for n in range(9)] + [Mark(500.0, "checkpoint", "off")]
    svg = draw(line_plot([Series("", "blue", points)], many, unit="x"))
    assert [e.text for e in svg.iter() if e.tag.endswith("title") and "no" in (e.text or "")] == ["no 0"]


def test_shares_fill_the_bar():
    bars = share_bars([("blue", 3.0), ("amber", 1.0)], width=200, height=10)
    assert bars == [Bar("blue", 0, 0, 150, 10), Bar("amber", 150, 0, 50, 10)]
    assert [float(e.get("width", 0)) for e in parse(SVG.shares(bars, 200, 10))] == [150.0, 50.0]
    assert share_bars([("blue", 0.0)], width=200, height=10) == [Bar("blue", 0, 0, 0, 10)]


@pytest.mark.parametrize(
    ("value", "step", "text"),
    [
        (0.25, 0.05, "0.25"), (3, 1, "3"), (-5, 5, "-5"),
        (12_000, 2000, "12 000"), (0.5, 0.5, "0.5"), (2e9, 1e9, "2e+09"),
    ],
)  # fmt: skip
def test_labels(value, step, text):
    assert label(value, step) == text
