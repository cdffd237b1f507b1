from __future__ import annotations

import math

import pytest

from mlpipe._core.gate import METRICS, Gate, check, parse_gate

pytestmark = pytest.mark.unit


def test_grammar() -> None:
    assert parse_gate("val_bits_per_byte < 2.6") == Gate("val_bits_per_byte", "<", 2.6)
    assert parse_gate(" val_loss>=1e-1 ") == Gate("val_loss", ">=", 0.1)
    assert str(parse_gate("val_loss<=2")) == "val_loss <= 2"
    assert parse_gate("recall.cats > -0.5") == Gate("recall.cats", ">", -0.5)  # of the stage's own metrics


@pytest.mark.parametrize(
    "text",
    ["", "2loss < 1", "val_loss = 1", "val_loss < ", "val_loss < 1 and", "1 < val_loss", "val_loss < x"],
)
def test_everything_else_is_refused_with_what_to_write(text: str) -> None:
    with pytest.raises(ValueError, match="is not a gate; write '<metric> <op> <number>'"):
        parse_gate(text)


def test_check() -> None:
    metrics = dict.fromkeys(METRICS, 2.0)
    for op, holds in (("<", False), ("<=", True), (">", False), (">=", True)):
        assert check(parse_gate(f"val_loss {op} 2"), metrics) is holds
    assert check(parse_gate("val_loss < 3"), metrics)
    assert not check(parse_gate("val_loss > 3"), metrics)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_gate_holds_for_what_is_not_finite(value: float) -> None:
    assert not check(parse_gate("val_loss > 0"), {"val_loss": value})
    assert not check(parse_gate("val_loss < 9"), {"val_loss": value})
