"""One case: mlpipe's own worker under its own launcher, in which the training is replaced by blocks of steps
of mlpipe's loop and of the raw one, in turn. Writes answer.json whenever something more is known, so that a
process which is cut off leaves what it has."""

from __future__ import annotations

import gc
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import as_worker
from benchmarks.gpu.raw import RawLoop, usual_loss
from benchmarks.measure import Figures, rounds
from mlpipe.plan.work import TrainPlan
from mlpipe.train import loop, model, prepare
from mlpipe.train.loss import scale_gradient
from mlpipe.train.outcome import Outcome
from mlpipe.train.session import Session

_WARM_UP_STEPS = 3


def train(session: Session, plan: TrainPlan, progress: list[int]) -> Outcome:
    """Instead of the trainer's."""
    asked = json.loads(os.environ["BENCHMARK"])
    answer: dict[str, Any] = {"rounds": []}

    def write(**more: Any) -> None:
        answer.update(more)
        path = Path(asked["answer"])
        path.with_suffix(".tmp").write_text(json.dumps(answer))
        path.with_suffix(".tmp").replace(path)

    ours = None
    try:
        ours = measure(session, plan, progress, asked, answer, write)
    except Exception as error:  # becomes a row with its reason
        write(error=reason(error))
    if ours is not None:
        ours.checkpointer.finish()
    return Outcome("done", 0, session.rank, time=time.time())


def measure(
    session: Session,
    plan: TrainPlan,
    progress: list[int],
    asked: dict[str, Any],
    answer: dict[str, Any],
    write: Callable[..., None],
) -> loop.Loop:
    device = session.device
    choose_attention(asked["attention"])
    if asked["loss"] == "usual":
        model.cross_entropy_sum = usual_sum
    ours = prepare.prepare(session, plan, progress, prepare.make_callbacks(session, plan))
    if asked["loss"] == "chunked":
        ours.model.module.fused_loss = False
    forget_peak(device)
    began = time.perf_counter()
    ours.step()  # compiles
    wait(device)
    write(first_step_seconds=time.perf_counter() - began)
    for _ in range(_WARM_UP_STEPS - 1):
        ours.step()
    wait(device)
    write(
        memory=peak_memory(device),
        achievable_flops=ours.recording.achievable_flops,
        peak_flops=ours.recording.peak_flops,
        attention_kernel=attention_kernel(ours, device),
    )
    sides: dict[str, Callable[[], object]] = {"mlpipe": ours.step}
    # both loops train the same weights: nothing but the optimizer's states is there twice
    own_states = sum(item.local.nbytes for item in ours.update.state())
    raw = None
    try:
        raw = RawLoop(plan, ours.model.module.model, device)
        forget_peak(device)
        for _ in range(_WARM_UP_STEPS):
            raw.step()
        wait(device)
        found = peak_memory(device)
        write(raw_memory={"allocated": found["allocated"] - own_states} if found else {})
        sides |= {"raw": raw.step} | ({"raw again": raw.step} if asked["control"] else {})
    except torch.OutOfMemoryError as error:
        write(raw_error=reason(error))
        raw = None
        ours.model.module.zero_grad(set_to_none=True)
    gc.collect()
    gc.freeze()  # as mlpipe's loop does, for both
    tokens = asked["steps"] * plan.global_batch * plan.model.seq_len
    blocks = {name: block(step, asked["steps"], tokens, session) for name, step in sides.items()}
    names = list(blocks)
    for i in range(asked["rounds"]):
        order = names[i % len(names) :] + names[: i % len(names)]
        answer["rounds"] += rounds({name: blocks[name] for name in order}, 1)
        write()
    if raw is not None and not math.isfinite(float(raw.last)):
        raise ValueError("the raw loop's loss is not finite")
    write(complete=True)
    return ours


def block(step: Callable[[], object], num_steps: int, tokens: int, session: Session) -> Callable[[], Figures]:
    def run() -> Figures:
        session.watchdog.beat("measuring", 1)
        wait(session.device)
        began = time.perf_counter()
        for _ in range(num_steps):
            step()
        wait(session.device)
        return {"tokens_per_second": tokens / (time.perf_counter() - began)}

    return run


def usual_sum(
    logits: torch.Tensor, targets: torch.Tensor, *, fused: bool, scale: torch.Tensor | None
) -> tuple[torch.Tensor, int]:
    """F.cross_entropy, eager, as a sum."""
    return scale_gradient(usual_loss(logits, targets) * targets.numel(), scale), targets.numel()


def choose_attention(name: str) -> None:
    if name == "auto":
        return
    backends = torch.backends.cuda
    backends.enable_flash_sdp(name == "flash")
    backends.enable_mem_efficient_sdp(name == "efficient")
    backends.enable_cudnn_sdp(name == "cudnn")
    backends.enable_math_sdp(name == "math")


def attention_kernel(ours: loop.Loop, device: torch.device) -> str | None:
    """Which back end torch takes for the model's shapes; a private function, None where it is gone."""
    shape = ours.plan.model.build.args
    heads, kv_heads = shape["num_heads"], shape.get("num_kv_heads", shape["num_heads"])
    query, key = (
        torch.zeros(1, number, ours.plan.model.seq_len, shape["dim"] // heads, device=device).bfloat16()
        for number in (heads, kv_heads)
    )
    try:
        chosen = torch._fused_sdp_choice(query, key, key, is_causal=True, enable_gqa=heads != kv_heads)
        return torch.nn.attention.SDPBackend(int(chosen)).name
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return None


def forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> dict[str, int]:
    """Bytes. `process`: all that the device has given away, with CUDA's own; nothing else runs on it."""
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.max_memory_reserved(device)
    return {
        "allocated": torch.cuda.max_memory_allocated(device),
        "reserved": reserved,
        "process": reserved + max(0, total - free - torch.cuda.memory_reserved(device)),
    }


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reason(error: Exception) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:300]}"


if __name__ == "__main__":
    as_worker.run(train)
