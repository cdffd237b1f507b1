"""What a step of an optimizer costs. Which optimizers there are, and the bytes of state that each keeps, says
`_core/optimizers.py`; a plan and a pipeline have the latter as `state_bytes_per_parameter`."""

from __future__ import annotations

from mlpipe.plan.tensors import GRADIENT_BYTES, WEIGHT_BYTES


def traffic_bytes_per_parameter(state_bytes_per_parameter: int) -> int:
    """Bytes that a step reads and writes in memory for each fp32 parameter: the norm reads the gradient,
    clipping reads and writes it; the update reads weight, gradient and state, and writes weight and state.
    For AdamW 4 + 8 + 16 + 12 = 40."""
    norm, clipping = GRADIENT_BYTES, 2 * GRADIENT_BYTES
    read = WEIGHT_BYTES + GRADIENT_BYTES + state_bytes_per_parameter
    written = WEIGHT_BYTES + state_bytes_per_parameter
    return norm + clipping + read + written
