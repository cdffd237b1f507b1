"""`python -m benchmarks.overhead`: tokens per second of mlpipe's loop against a plain torchrun script.

All train the same model on the same data with the same optimizer in the same two workers, a few steps in
turn, so that what the machine does meanwhile hits all. mlpipe's side is the real `Loop.step` with records
and metrics on, in the real worker under the real launcher. The plain script is `plain.py`, once with the
usual loss and once with mlpipe's (which is faster: that peer shows what the loop alone costs); a second
copy of it is the control.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from benchmarks import launch, measure

STRATEGIES = {"ddp": "DDP", "fsdp": "FSDP2"}
GOAL = 0.98
# 7.3M parameters: 4 layers of width 256, vocabulary 8,192
MODEL = {"model__num_kv_heads": 4, "model__tied": "false", "data__batch_size": 16, "model__seq_len": 256}
VOCAB_SIZE = 8192


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round of a small batch: does it run?")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=2, help="steps in a block")
    parser.add_argument("--only", action="append", help="such as ddp-fp32; may be repeated")
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    arguments = parser.parse_args()
    overrides = dict(MODEL)
    if arguments.quick:
        arguments.rounds, arguments.steps = 1, 1
        arguments.only = arguments.only or ["ddp-fp32", "fsdp-bf16"]
        overrides |= {"data__batch_size": 2, "model__seq_len": 32, "model__dim": 64, "model__num_layers": 1}
    load_before = os.getloadavg()[0]
    figures = []
    launcher_cores = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokens = launch.corpus(folder, vocab_size=512 if arguments.quick else VOCAB_SIZE)
        for precision in ("fp32", "bf16"):
            for strategy, title in STRATEGIES.items():
                label = f"{strategy}-{precision}"
                if arguments.only and label not in arguments.only:
                    continue
                plan = launch.train_plan(
                    folder, tokens, label, strategy=strategy, precision=precision, **overrides
                )
                answer = launch.measure(
                    plan,
                    folder / label,
                    "benchmarks.overhead_worker",
                    rounds=arguments.rounds,
                    steps=arguments.steps,
                )
                launcher_cores[label] = answer["launcher_cores"]
                rows = rows_of(f"{title} {precision}", answer["rounds"])
                print(measure.table({"figures": rows}), flush=True)
                figures += rows
    path = measure.merge(
        "overhead",
        figures,
        arguments.results,
        rounds=arguments.rounds,
        steps_per_block=arguments.steps,
        workers=2,
        model=overrides | {"vocab_size": VOCAB_SIZE},
        launcher_cores=launcher_cores,
        load_before=load_before,
    )
    print(f"merged into {path}")
    return 0


def rows_of(work: str, found: list[measure.Round]) -> list[dict]:
    pairs = [
        ("", "mlpipe", "plain", GOAL),
        ("", "mlpipe", "plain, mlpipe's loss", GOAL),
        ("control: ", "plain again", "plain", None),
    ]
    names = (("tokens a second", "tokens_per_second"), ("tokens a CPU second", "tokens_per_cpu_second"))
    return [
        measure.figure(
            work, prefix + name, "tok/s", found, key, ours=ours, peer=peer, goal=goal, higher_is_better=True
        )
        for name, key in names
        for prefix, ours, peer, goal in pairs
    ]


if __name__ == "__main__":
    sys.exit(main())
