"""What matmuls compute in, as torch calls it."""

from __future__ import annotations

import torch

from mlpipe.plan.work import Precision

DTYPES: dict[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def autocast(device_type: str, precision: Precision) -> torch.autocast:
    """Matmuls in `precision`, what needs it in fp32."""
    return torch.autocast(device_type, DTYPES[precision], enabled=precision != "fp32")
