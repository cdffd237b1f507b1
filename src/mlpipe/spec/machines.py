"""Mappings of a stage's `resources` that few files have."""

from pydantic import Field

from mlpipe.spec import fields as f
from mlpipe.spec.base import SpecModel


class Device(SpecModel):
    """A GPU that the catalogue lacks, or other figures for one that it has. A new one needs `memory` and
    `fp32_tflops`; what else is left out is taken for slow: PCIe within nodes, 10 Gb/s between."""

    memory: f.Size | None = Field(None, description="What the driver shows as total, like `80 GiB`.")
    fp32_tflops: f.Positive | None = Field(None, description="Dense peak outside the tensor cores.")
    bf16_tflops: f.Positive | None = Field(
        None, description="Dense peak, without sparsity. Default: it has no bf16."
    )
    fp16_tflops: f.Positive | None = Field(
        None, description="Likewise, with fp32 accumulation. Default: that of bf16."
    )
    achievable_ratio: f.PositiveRatio | None = Field(
        None, description="Share of the peak that its best matmul reaches."
    )
    memory_gb_per_second: f.Positive | None = Field(None, description="Bandwidth of its memory.")
    link_gb_per_second: f.Positive | None = Field(
        None, description="To the other GPUs of the node, in one direction, such as 450 for NVLink 4."
    )
    network_gb_per_second: f.Positive | None = Field(
        None, description="To other nodes, of one GPU, in one direction, such as 50 for 400 Gb/s."
    )


class Preflight(SpecModel):
    """What a machine must be able to do before it is trusted with ranks. Its speeds are compared with those
    of the gang's other machines, a GPU's also with the catalogue's."""

    slow_ratio: f.PositiveRatio = Field(
        0.5, description="A machine or link with less than this share of the others' speed is at fault."
    )
    clock: f.Duration = Field("1 s", description="By which a clock may differ from the others'.")
    disk: f.Size = Field("1 GiB", description="Free where the stage has its scratch folder.")
    store_mb_per_second: f.Positive = Field(
        1.0, description="Speed at which a machine writes to the store and reads from it, at least."
    )
    link_gb_per_second: f.Positive | None = Field(
        None,
        description="Speed between any two machines in one direction, at least: of their GPUs by NCCL, else "
        "over TCP. Default: `slow_ratio` of what a network's profile with RDMA says; without one it is only "
        "compared with the gang's other links, of which two machines have none.",
    )
