"""The models by which a calibration measures a device: of one it times whole passes, of the other the single
kernels of a block. Standard library only."""

from __future__ import annotations

from mlpipe._core.presets import LlamaConfig
from mlpipe.plan.kernels import Kernels
from mlpipe.plan.shapes.dense import Dense
from mlpipe.plan.shapes.shape import StepShape
from mlpipe.plan.speed import Speed

REFERENCE = {
    "cpu": Dense(LlamaConfig(4_096, 384, 2, 6, 2, 1_024, 256, 1e4, 1e-5, True)),
    "cuda": Dense(LlamaConfig(32_768, 2_048, 2, 16, 8, 5_632, 2_048, 1e4, 1e-5, True)),
}
REFERENCE_BATCH = 4  # of its longest sequences at once
BLOCK = {
    "cpu": LlamaConfig(4_096, 256, 1, 4, 2, 704, 1_024, 1e4, 1e-5, True),
    "cuda": LlamaConfig(32_768, 2_048, 1, 16, 8, 5_632, 2_048, 1e4, 1e-5, True),
}


def reference_step(device: str, precision: str) -> StepShape:
    """The passes that are timed."""
    seq_len = REFERENCE[device].config.max_seq_len
    return StepShape(seq_len, REFERENCE_BATCH, 1, precision, "none", compiled=False)


def reference_seconds(precision: str, device: str, speed: Speed) -> float:
    """Of both passes, as the kernels of `speed` add up to them."""
    reference = REFERENCE[device]
    kernels = Kernels(precision, False, device, speed)
    told = reference.pass_seconds(reference_step(device, precision), kernels)
    return told.total(reference.parameters.num_blocks)
