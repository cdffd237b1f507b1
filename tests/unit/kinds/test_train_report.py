"""What the report of a training says of what is sent."""

from __future__ import annotations

import json

import pytest
from kit.tracked import step

from mlpipe._core.record_lines import decode_line
from mlpipe._core.records import Start
from mlpipe.kinds.train.report import _buckets, _sent

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, None),
        ({"bucket_bytes": 2**20}, "1.0 MiB"),
        ({"bucket_seconds": {}}, "default: there are too few gradients for others"),
        (
            {"bucket_bytes": 2**22, "bucket_seconds": {"default": 0.5, str(2**22): 0.25}},
            "4.0 MiB, as measured: default 500 ms, 4.0 MiB 250 ms a pass",
        ),
        ({"bucket_seconds": {"default": 8.0}}, "default, as measured: default 8.0s a pass"),
    ],
)
def test_the_buckets_of_gradients_and_what_they_were_chosen_by(fields, words):
    line = {"v": 1, "kind": "start", "time": 1.0, "rank": 0, "restart": 0, **fields}
    start = decode_line(json.dumps(line).encode())
    assert isinstance(start, Start)
    assert _buckets(start) == words


@pytest.mark.parametrize(
    ("fields", "compressed", "words"),
    [
        ({}, True, None),
        ({"exchanged_bytes": 0, "exchanged_plain_bytes": 4096}, False, None),
        (
            {"exchanged_bytes": 1024, "exchanged_plain_bytes": 4096},
            True,
            ", which saved 60 % of the time at most",
        ),
        ({"exchanged_bytes": 1024, "exchanged_plain_bytes": 4096}, False, ""),
        ({"exchanged_bytes": 1024, "exchanged_plain_bytes": 1024}, True, ""),
    ],
)
def test_what_was_sent_and_what_time_that_saved(fields, compressed, words):
    """Half of each step is for what was sent: a quarter of it all, so that 3 more halves were saved."""
    steps = [step(number, **{"collective_seconds": 0.25, **fields}) for number in (1, 2)]
    ratio = fields.get("exchanged_plain_bytes", 0) // 1024
    said = f"1.0 KiB a step, {ratio} times less than gradients in fp32{words}"
    assert _sent(steps, compressed) == (None if words is None else said)
