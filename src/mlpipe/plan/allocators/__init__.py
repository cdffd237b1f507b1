"""What allocators make of a rank's tensors: one file each, behind the functions here. A GPU's tensors come
from CUDA's caching allocator (`cuda.py`); a CPU's from the C library's heap (`glibc.py`), where gloo, which
sends them, takes its own copies (`gloo.py`). Only the ones of the device are imported."""

from __future__ import annotations

from collections.abc import Mapping

from mlpipe.plan.hardware import Hardware
from mlpipe.plan.mesh import Mesh
from mlpipe.plan.speed import Speed
from mlpipe.plan.tensors import Group, RankTensors, Reserved


def reserve(tensors: RankTensors, device: str, mesh: Mesh, checkpointing: str) -> Reserved:
    """Bytes that a process with these tensors holds at its peak."""
    if device == "cuda":
        from mlpipe.plan.allocators import cuda

        return cuda.reserve(tensors, mesh.world_size)
    from mlpipe.plan.allocators import glibc, gloo

    return glibc.reserve(gloo.with_clones(tensors), trimming=glibc.is_trimming(mesh, checkpointing))


def beside_bytes(device: str, world_size: int) -> int:
    """Of a process, what its records do not count: on CUDA all that is not of the allocator."""
    if device != "cuda":
        return 0
    from mlpipe.plan.allocators import cuda

    return cuda.context_bytes(world_size)


def environment(hardware: Hardware, mesh: Mesh, checkpointing: str) -> dict[str, str]:
    """What the allocator is told by a worker's environment."""
    if hardware.device == "cuda":
        from mlpipe.plan.allocators import cuda

        return cuda.environment(hardware, mesh, checkpointing)
    from mlpipe.plan.allocators import glibc

    return glibc.environment(trimming=glibc.is_trimming(mesh, checkpointing))


def other_environment(
    hardware: Hardware, mesh: Mesh, checkpointing: str, env: Mapping[str, str]
) -> dict[str, str]:
    """The other way to keep memory, which `mlpipe tune` tries: what `environment` says besides is emptied.
    `env`: of the plan, the user's own settings among it. Empty: there is none."""
    if hardware.device == "cuda":
        from mlpipe.plan.allocators import cuda

        return cuda.other_environment(hardware, mesh, checkpointing, env)
    from mlpipe.plan.allocators import glibc

    is_trimming = glibc.is_trimming(mesh, checkpointing)
    ours, other = (glibc.environment(trimming=trimming) for trimming in (is_trimming, not is_trimming))
    if any(env.get(name, "") == value for name, value in other.items()):
        return {}
    return dict.fromkeys(ours.keys() - other.keys(), "") | other


def reason(hardware: Hardware, mesh: Mesh, checkpointing: str, env: Mapping[str, str]) -> str:
    """Of these settings in a sentence. `env`: of the plan."""
    if hardware.device == "cuda":
        from mlpipe.plan.allocators import cuda

        return cuda.reason(hardware, mesh, checkpointing, env)
    from mlpipe.plan.allocators import glibc

    return glibc.reason(env, trimming=glibc.is_trimming(mesh, checkpointing))


def allocation_seconds(made: Group, device: str, speed: Speed, mesh: Mesh, checkpointing: str) -> float:
    """What it costs to allocate the tensors of a micro-batch, instead of using again what is there."""
    if device == "cuda":
        return 0.0
    from mlpipe.plan.allocators import glibc

    if not glibc.is_trimming(mesh, checkpointing):
        return 0.0
    return glibc.num_mapped(made) * speed.new_tensor_seconds
