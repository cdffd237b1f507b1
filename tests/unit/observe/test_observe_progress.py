from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mlpipe._core.record_lines import parse
from mlpipe.observe.progress import Progress, format_count, live_line, start_line, summarize

pytestmark = pytest.mark.unit

START = {
    "kind": "start", "time": 999.0, "restart": 0, "steps": 400, "start_step": 0, "world_size": 2,
    "strategy": "ddp", "device": "cpu", "precision": "bf16", "num_params": 1_830_000,
    "num_flops_per_token": 1.1e7, "peak_flops": 8.3e10, "peak_name": "measured matmul peak",
}  # fmt: skip


def step(number, **fields):
    return {
        "kind": "step", "step": number, "loss": 3.2142, "seconds": 0.36, "tokens_per_second": 12_345.0,
        "mfu_ratio": 0.312, "time": 1000.0 + number, **fields,
    }  # fmt: skip


def test_the_live_line():
    summary = summarize(
        parse(line)
        for line in [START, step(119), {"kind": "checkpoint", "time": 1100.0, "step": 100}, step(120)]
    )
    assert live_line(summary, width=120) == (
        "step 120/400  loss 3.214  12.3k tok/s  MFU 31.2 % (of measured matmul peak)  ETA 1m41s  ckpt 100"
    )
    assert live_line(summary) == "step 120/400  loss 3.214  12.3k tok/s  MFU 31.2 %  ETA 1m41s  ckpt 100"


def test_the_live_line_counts_nodes_that_come_and_go():
    summary = summarize(map(parse, [START, step(119, replicas=3), step(120, replicas=1)]))
    assert live_line(summary).startswith("step 120/400  1 node  loss 3.214")
    assert live_line(summarize(map(parse, [START, step(119, replicas=3)]))).startswith(
        "step 119/400  3 nodes"
    )


def test_the_live_line_names_who_is_slow():
    """The slowest first, three at most; all of them stand in the summary, until they are no more."""
    slow = {"1": 1.25, "4": 3.0, "7": 1.3, "9": 1.2}
    summary = summarize(map(parse, [START, step(119), step(120, stragglers=slow)]))
    assert summary["stragglers"] == slow
    assert "  slow: rank 4 (3.0x), rank 7 (1.3x), rank 1 (1.2x)  ETA" in live_line(summary, width=150)
    assert summarize(map(parse, [START, step(119, stragglers=slow), step(120)]))["stragglers"] == {}


def test_stages_of_a_run():
    progress = Progress()
    assert live_line(progress.summary()) == "starting"
    progress.add(parse(START))
    assert live_line(progress.summary()) == "step 0/400"
    progress.add(parse(step(1, loss=None)))
    assert "loss not finite" in live_line(progress.summary())
    progress.add(parse({"kind": "signal", "time": 1e3, "signal": "SIGTERM", "step": 1}))
    assert "saving on SIGTERM" in live_line(progress.summary())
    progress.add(parse({"kind": "end", "time": 1e3, "outcome": "saved", "step": 1}))
    assert live_line(progress.summary()).endswith("saved")


def test_a_restart_forgets_the_pace_and_the_steps_of_before():
    before = [START, step(120, seconds=100.0), {"kind": "end", "time": 1e3, "outcome": "failed"}]
    summary = summarize(map(parse, [*before, {**START, "restart": 1, "start_step": 100}]))
    assert summary["step"] == 100
    assert summary["checkpoint_step"] == 100
    assert summary["eta_seconds"] is None
    assert summary["outcome"] is None


def test_eta_is_the_recent_pace():
    summary = summarize(
        map(parse, [START, *(step(n, seconds=9.0) for n in range(1, 50)), *(step(n) for n in range(50, 101))])
    )
    assert summary["eta_seconds"] == pytest.approx(300 * 0.36)


def test_the_start_line_says_what_mfu_is_measured_against():
    assert start_line(parse({**START, "start_step": 100})) == (
        "ddp on 2 x cpu, 1.83M parameters, bf16, resumed from step 100, "
        "MFU = 11 MFLOP/token x tok/s / (2 x 83 GFLOP/s, measured matmul peak)"
    )


def test_a_peak_not_measured_yet_is_named_at_least():
    assert start_line(parse({**START, "peak_flops": None})).endswith("(2 x peak, measured matmul peak)")


maybe = st.none() | st.floats(allow_nan=False, allow_infinity=False)
records = st.lists(
    st.one_of(
        st.builds(
            lambda s, n: {**START, "start_step": s, "steps": n}, st.integers(0, 10**9), st.integers(1, 10**9)
        ),
        st.builds(
            lambda n, loss, rate, mfu, seconds: step(
                n, loss=loss, tokens_per_second=rate, mfu_ratio=mfu, seconds=seconds
            ),
            st.integers(1, 10**9), maybe, maybe, maybe, st.none() | st.floats(0, 1e6),
        ),
        st.builds(lambda n: {"kind": "checkpoint", "time": 1e3, "step": n}, st.integers(0, 10**9)),
        st.just({"kind": "end", "time": 1e3, "outcome": "done"}),
        st.builds(lambda name: {"kind": "signal", "time": 1e3, "signal": name}, st.text(max_size=9)),
    ),
    max_size=30,
)  # fmt: skip


@example([START, {"kind": "signal", "time": 1e3, "signal": "\n"}], 21)
@example([START, {"kind": "signal", "time": 1e3, "signal": "é"}], 200)
@example([{**START, "start_step": 10**9, "steps": 10**9}], 20)
@given(records, st.integers(20, 200))
def test_any_records_give_one_ascii_line_that_fits_and_a_json_summary(many, width):
    summary = summarize(map(parse, many))
    line = live_line(summary, width=width)
    assert len(line) <= width
    assert line.isascii()
    assert "\n" not in line
    json.dumps(summary)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"), (7, "7"), (7.25, "7.25"), (999.4, "999"), (1234, "1.23k"), (12_345, "12.3k"),
        (999_960, "1.00M"), (1.83e6, "1.83M"), (9.89e14, "989T"), (3.2e18, "3.20E"),
    ],
)  # fmt: skip
def test_counts(number, text):
    assert format_count(number) == text
