"""CUDA's caching allocator: memory comes in segments, which it keeps and cuts; what no tensor fits is
lost.

Segments that grow (`expandable_segments`) leave fewer gaps between tensors of changing sizes. They are asked
for where a plan trades time for memory: recomputation and stages that hold several micro-batches are what
breaks segments up, by up to 43 % of the memory (Huang et al., STAlloc, arXiv:2507.16274), and they take no
time (NVIDIA, Megatron Bridge, "Memory tuning"). How much smaller the gaps become nobody measured on such
models: they are counted as without. Only NVIDIA's whole GPUs get them: ROCm has had them since version 7
(pytorch#179930), and on slices nobody has tried.

torch 2.15 takes the first of its variables that is set, and ours is the last of them: one of the user's, in
the stage's `env`, in an image or in a shell, comes first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mlpipe._core.gpus import DEFAULT_RESOURCE, gpu_classes
from mlpipe.plan.hardware import Hardware
from mlpipe.plan.mesh import Mesh
from mlpipe.plan.tensors import RankTensors, Reserved

_CONTEXT_BYTES = 2**30  # kernels and cuBLAS workspaces
_NCCL_BYTES = 3 * 2**29  # its buffers, where there are others to talk to
_FRAGMENTATION_RATIO = 0.08  # of the tensors: what lies unused in segments

_SETTINGS = "PYTORCH_ALLOC_CONF"
_BEFORE = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")  # which torch reads instead


def reserve(tensors: RankTensors, world_size: int) -> Reserved:
    """Bytes reserved on the device."""
    return Reserved(tensors, context_bytes(world_size), int(_FRAGMENTATION_RATIO * tensors.peak))


def context_bytes(world_size: int) -> int:
    """Of the device, which a process holds beside what it has allocated."""
    return _CONTEXT_BYTES + (_NCCL_BYTES if world_size > 1 else 0)


def environment(hardware: Hardware, mesh: Mesh, checkpointing: str) -> dict[str, str]:
    """Segments that grow, where they are worth it."""
    return _expandable(True) if _can_expand(hardware) and any(_causes(mesh, checkpointing)) else {}


def other_environment(
    hardware: Hardware, mesh: Mesh, checkpointing: str, env: Mapping[str, str]
) -> dict[str, str]:
    """The other kind of segments; empty: there is none, or the user's own setting decides."""
    ours = environment(hardware, mesh, checkpointing)
    if not _can_expand(hardware) or _owned(env, ours):
        return {}
    return _expandable(not ours)


def reason(hardware: Hardware, mesh: Mesh, checkpointing: str, env: Mapping[str, str]) -> str:
    """Of the settings, and whose they are."""
    ours = environment(hardware, mesh, checkpointing)
    if owned := _owned(env, ours):
        return f"The allocator does as the stage's env says, {owned}."
    if ours:
        return (
            f"The allocator's segments grow ({_set(ours)}): {' and '.join(_causes(mesh, checkpointing))}. "
            f"Its gaps are counted as without, as {_FRAGMENTATION_RATIO:.0%} of the tensors."
        )
    if not _can_expand(hardware):
        return f"The allocator is left as it is: on {hardware.name} nobody has tried segments that grow."
    return "The allocator is left as it is: its tensors have the same sizes in each step."


def _causes(mesh: Mesh, checkpointing: str) -> Iterator[str]:
    """Why tensors of other sizes take the place of those that died."""
    if mesh.dp_shard > 1:
        yield "gathered weights come and go"
    if mesh.pp > 1:
        yield "several micro-batches are held at once"
    if checkpointing != "none":
        yield "activations are recomputed"


def _can_expand(hardware: Hardware) -> bool:
    """The name of a slice is that of no class."""
    known = (gpu_classes().get(one.name) for one in hardware.groups or (hardware,))
    return all(gpu is not None and gpu.vendor.resource == DEFAULT_RESOURCE for gpu in known)


def _expandable(yes: bool) -> dict[str, str]:
    return {_SETTINGS: f"expandable_segments:{yes}"}


def _owned(env: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """The user's setting that torch takes instead of ours."""
    for name in (*_BEFORE, _SETTINGS):
        if name in env:
            return _set({name: env[name]}) if env[name] != ours.get(name) else ""
    return ""


def _set(env: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in env.items())
