"""What matmuls compute in, as torch calls it."""

from __future__ import annotations

import torch
from torch import Tensor

from mlpipe.plan.settings import Precision

DTYPES: dict[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def autocast(device_type: str, precision: Precision) -> torch.autocast:
    """Matmuls in `precision`, what needs it in fp32."""
    return torch.autocast(device_type, DTYPES[precision], enabled=precision != "fp32")


def low_dtype(x: Tensor) -> torch.dtype:
    """In which products with `x` are computed."""
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):  # which knows no meta
        return torch.get_autocast_dtype(kind)
    return x.dtype
