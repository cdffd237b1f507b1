"""The gate of an evaluation, for those who read plans. Its grammar is shared with the spec."""

from mlpipe._core.gate import METRICS, Gate, check, parse_gate

__all__ = ["METRICS", "Gate", "check", "parse_gate"]
