"""How a stage's processes are started: the Launch of plan.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from mlpipe._core.units import parse_bytes, parse_seconds
from mlpipe.plan import allocators, grace
from mlpipe.plan.hardware import Hardware
from mlpipe.plan.mesh import Mesh
from mlpipe.plan.plan import Launch, PreflightPlan
from mlpipe.plan.work import TrainPlan
from mlpipe.spec.model import Resources, Stage
from mlpipe.spec.placeholders import fill, resolve

if TYPE_CHECKING:
    from mlpipe.plan.shapes.traced import Traced

COMMAND_SECONDS = 30.0  # between SIGTERM and SIGKILL of what has no checkpoint to write


class Given(NamedTuple):
    """What a stage is planned for. `known`: values of placeholders. `resume`: from the stage's latest
    checkpoint. `traced`: the numbers of a user's own model."""

    hardware: Hardware
    known: Mapping[str, str]
    resume: bool = False
    traced: Traced | None = None


def single_process(stage: Stage, given: Given, *, shutdown_seconds: float = COMMAND_SECONDS) -> Launch:
    """Of a kind that runs as a command, or in the driver."""
    return Launch(
        num_nodes=1,
        nproc_per_node=1,
        max_restarts=0,
        device="cpu",
        argv=(),
        env={key: resolve(value, given.known, partial=True) for key, value in stage.env.items()},
        timeout_seconds=_timeout_seconds(stage),
        shutdown_seconds=shutdown_seconds,
        metrics_port=None,
    )


def workers(
    stage: Stage,
    given: Given,
    plan: TrainPlan,
    *,
    saves: bool = False,
    max_restarts: int = 0,
    metrics_port: int | None = None,
) -> Launch:
    """Of a kind that runs in workers, which are told `plan`. `saves`: whether they train by it, and write a
    checkpoint before they stop."""
    hardware = given.hardware
    env = {key: fill(value, given.known) for key, value in stage.env.items()}
    threads = max(1, hardware.cpus_per_node // hardware.devices_per_node)
    env.setdefault("OMP_NUM_THREADS", str(threads))
    layout = (plan.mesh, plan.activation_checkpointing) if saves else (Mesh(), "none")
    env = {**allocators.environment(hardware, *layout), **env}
    if plan.deterministic and hardware.device == "cuda":
        env.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is not deterministic without it
    return Launch(
        num_nodes=hardware.num_nodes,
        nproc_per_node=hardware.devices_per_node,
        max_restarts=max_restarts,
        device=hardware.device,
        argv=("-m", "mlpipe.train.worker"),
        env=env,
        timeout_seconds=_timeout_seconds(stage),
        shutdown_seconds=grace.shutdown_seconds(plan if saves else None, hardware.devices_per_node),
        metrics_port=metrics_port,
    )


def preflight_plan(resources: Resources | None, hardware: Hardware, precision: str) -> PreflightPlan | None:
    """None: its machines are not checked."""
    asked = resources.preflight if resources is not None else None
    if asked is None or asked == "off":
        return None
    from mlpipe.spec.machines import Preflight

    limits = Preflight.model_construct() if isinstance(asked, str) else asked
    peak = hardware.peak_flops.get(precision) if hardware.device == "cuda" else None
    speed = hardware.speed
    return PreflightPlan(
        slow_ratio=limits.slow_ratio,
        clock_seconds=parse_seconds(limits.clock),
        disk_bytes=parse_bytes(limits.disk),
        store_bytes_per_second=limits.store_mb_per_second * 1e6,
        link_bytes_per_second=None if (link := limits.link_gb_per_second) is None else link * 1e9,
        expected_flops=None if peak is None else peak * speed.achievable_ratio,
        expected_memory_bytes_per_second=speed.memory_bytes_per_second if peak is not None else None,
        spares=(resources.spares or 0) if resources is not None else 0,
    )


def _timeout_seconds(stage: Stage) -> float | None:
    return parse_seconds(stage.timeout) if stage.timeout else None
