"""`python -m benchmarks.peers.meshes`: tokens per second of mlpipe and of torchtitan with the same Llama on
the same mesh: tp 2, pp 2, dp_shard 2 x tp 2, and dp_shard 2 with ep 2 of one with experts, fp32, on gloo.

As `rates`: both sides are started once and take turns of a few steps while the other sleeps in a read. Both
begin with the same weights and see the same batches; losses of the first step, after warming up and of the
last are compared.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import launch, measure
from benchmarks.peers import rates, results, sides
from benchmarks.peers.work import Work
from mlpipe.plan.plan import Plan

MESHES = {
    "tp 2": {"tp": 2},
    "pp 2": {"pp": 2},
    "dp_shard 2, tp 2": {"dp_shard": 2, "tp": 2},
    "dp_shard 2, ep 2": {"dp_shard": 2, "ep": 2},
}
MICROBATCHES = 4  # of a pipeline
# untied: 7.3M parameters, and with a shared expert and eight, of which a token has two, 11M
LLAMA = {"preset": "llama-8b", "dim": 256, "num_layers": 4, "num_heads": 8, "num_kv_heads": 4, "ffn_dim": 704}
EXPERTS = LLAMA | {
    "preset": "moe-7b", "ffn_dim": 224, "num_experts": 8, "experts_per_token": 2, "num_shared_experts": 1,
}  # fmt: skip
QUICK = {"dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 128}
SEQ_LEN = 256
PEER = "torchtitan"
LOSSES_DIFFER = 1e-4  # relative; both compute in fp32, in another order
# By the end, of experts: a token that rounding sends to another expert can make this one fuller than the
# mean, and so moves its bias by a whole step.
EXPERTS_DRIFT = 1e-2


def workers_of(mesh: dict[str, int]) -> int:
    return math.prod(size for axis, size in mesh.items() if axis != "ep")  # which lies within dp_shard


def plan_of(base: Work, folder: Path, mesh: dict[str, int], shape: dict[str, Any], batch: int) -> Plan:
    """What a user writes; no save by itself. `batch`: samples of a step."""
    pipeline = {"accumulation": MICROBATCHES} if "pp" in mesh else {}
    settings = {
        "model": json.dumps({"seq_len": SEQ_LEN, **shape}),
        "mesh": json.dumps(mesh),
        "resources__workers_per_node": workers_of(mesh),
        "data__batch_size": batch,
        "optimizer__lr": base.lr,
        "optimizer__warmup_steps": 0,
        "optimizer__weight_decay": 0,
        "optimizer__grad_clip": base.grad_clip,
        "hang_timeout": "2 h",
        "seed": base.seed,
        **pipeline,
    }
    return launch.train_plan(folder, Path(base.tokens), "mlpipe", **settings)


def work_of(base: Work, plan: Plan, mesh: dict[str, int], batch: int) -> Work:
    """The same for torchtitan."""
    train: Any = plan.work
    stages: list[list[str]] = []
    if train.pipeline is not None:
        first = 0
        for number in train.pipeline.num_blocks:
            stages.append([f"layers.{first + one}" for one in range(number)])
            first += number
        stages = [["tok_embeddings", *stages[0]], *stages[1:-1], [*stages[-1], "norm", "lm_head"]]
    return replace(
        base, mesh=mesh, llama=train.model.build.args, stages=stages, batch=batch // mesh.get("dp_shard", 1),
        microbatches=MICROBATCHES if stages else 1,
    )  # fmt: skip


def row(folder: Path, name: str, base: Work, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    mesh = MESHES[name]
    shape = (EXPERTS if "ep" in mesh else LLAMA) | (QUICK if arguments.quick else {})
    num_ranks, batch = workers_of(mesh), arguments.batch
    plan = plan_of(base, folder / "mlpipe", mesh, shape, batch)
    work = work_of(base, plan, mesh, batch)
    work = replace(work, socket=str(folder / "socket"))

    def command(script: str, work: Work, mine: Path) -> list[str]:
        if script == "mlpipe":
            return sides.launcher(plan, mine, "benchmarks.peers.mlpipe_mesh")
        return sides.torchrun(script, num_ranks=num_ranks)

    works = {
        results.OURS: ("mlpipe", replace(work, side=results.OURS)),
        PEER: ("titan_mesh", replace(work, side=PEER)),
    }
    with rates.started(folder, works, command, num_ranks) as found:
        losses: dict[str, list[float]] = {side: [] for side in found}

        def look(differ: float = LOSSES_DIFFER) -> None:
            for side in found.values():
                answers = [answer["loss"] for answer in side.ask(do="validate")]
                known = [loss for loss in answers if loss is not None]
                losses[side.name].append(sum(known) / len(known))
            ours, theirs = losses[results.OURS][-1], losses[PEER][-1]
            if abs(ours - theirs) > differ * abs(theirs):
                raise RuntimeError(f"{name}: the sides do not compute the same: {losses}")

        for side in found.values():
            side.steps(1)
        look()
        for side in found.values():
            side.steps(arguments.warm_up)
        look()
        blocks = rates.in_turns(
            found, rounds=arguments.rounds, steps=arguments.steps, tokens_per_step=batch * SEQ_LEN
        )
        look(EXPERTS_DRIFT if "ep" in mesh else LOSSES_DIFFER)
    print(f"{name}: loss of the first step, after warming up, and of the last: {losses}", flush=True)
    label = f"Llama {'of 8 experts, 11M' if 'ep' in mesh else '7.3M'} fp32, {name}"
    rows = [
        *results.against_best(label, "tokens a second", "tok/s", blocks, "rate", goal=1.0),
        *results.against_best(label, "tokens a CPU second", "tok/s", blocks, "cpu_rate", goal=None),
    ]
    return [{**rows[0], "losses": losses}, *rows[1:]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round of a tiny model: does it run?")
    parser.add_argument("--only", choices=tuple(MESHES), action="append")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=2, help="steps in a block")
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8, help="samples of a step, over all ranks")
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.steps, arguments.warm_up = 2, 1, 1
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(1))  # and so ends what it started
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokens = launch.corpus(folder, vocab_size=512 if arguments.quick else 8192)
        base = Work(
            side="", settings="same", precision="fp32", model={"seq_len": SEQ_LEN}, tokens=str(tokens),
            batch=0, seed=0, lr=1e-3, grad_clip=1.0,
        )  # fmt: skip
        rows = []
        for number, one in enumerate(arguments.only or MESHES):
            (here := folder / str(number)).mkdir()
            rows += row(here, one, base, arguments)
    measure.tell(
        "peers", rows, arguments.results, rounds=arguments.rounds, steps_per_block=arguments.steps,
        batch=arguments.batch, load_before=load_before,
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
