"""What the report of a training says of buckets."""

from __future__ import annotations

import json

import pytest

from mlpipe._core.record_lines import decode_line
from mlpipe._core.records import Start
from mlpipe.kinds.train.report import _buckets

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
