"""What a rank says of slow nodes, to the launcher beside it."""

from __future__ import annotations

import json

import pytest

from mlpipe.train.slow_nodes import SLOW_FILE, SlowNodes

pytestmark = pytest.mark.unit


def test_a_node_is_as_slow_as_its_slowest_rank_and_what_is_told_is_not_told_again(tmp_path):
    told = SlowNodes(tmp_path)
    path = tmp_path / SLOW_FILE
    told.tell([("n1", 1.52), ("n2", 3.0), ("n1", 2.44)])
    assert json.loads(path.read_text()) == {"n1": 2.4, "n2": 3.0}
    path.unlink()
    told.tell([("n1", 2.41), ("n2", 3.01)])
    assert not path.exists()
    told.tell([])
    assert json.loads(path.read_text()) == {}
