"""`python -m benchmarks.checkpoint`: what an asynchronous save costs the trainer, against DCP's async_save.

Two ranks train a Llama (DDP, then FSDP2; AdamW). The same tensors are saved by mlpipe and by
`torch.distributed.checkpoint.async_save` in turn: at its defaults, as the control once more at its
defaults, and with its process-based setting over a reused shared-memory stager. Per GiB of the checkpoint
(weights and moments, all ranks), on the slower rank, from the second save on:

stall       what the training thread waits for: in the call that saves and, of mlpipe, before the next update
extra time  the wall time of the steps from the save to its end, less that of as many steps without a save:
            also what copying and writing take from two busy cores
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from benchmarks import launch, measure

STRATEGIES = {"ddp": "DDP", "fsdp": "FSDP2"}
PEERS = ("DCP default", "DCP process, shared memory")
GOAL = 1 / 3
# 86M parameters: 1.0 GiB of weights and moments in all, in short steps
FULL = {"dim": 768, "num_layers": 12, "num_heads": 12, "num_kv_heads": 12, "ffn_dim": 2048}
QUICK = {"dim": 128, "num_layers": 2, "num_heads": 4, "num_kv_heads": 4, "ffn_dim": 256}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of a small model: does it run?")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--only", action="append", help="ddp or fsdp; may be repeated")
    parser.add_argument("--folder", type=Path, help="where checkpoints go; a temporary folder if not given")
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    arguments = parser.parse_args()
    shape = QUICK if arguments.quick else FULL
    num_rounds = 1 if arguments.quick else arguments.rounds
    if arguments.quick:
        arguments.only = arguments.only or ["fsdp"]
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        tokens = launch.corpus(folder, vocab_size=512)
        for strategy, title in STRATEGIES.items():
            if arguments.only and strategy not in arguments.only:
                continue
            plan = launch.train_plan(
                folder,
                tokens,
                strategy,
                strategy=strategy,
                checkpoint__keep=1,
                model__seq_len=32,
                data__batch_size=2,
                **{f"model__{key}": size for key, size in shape.items()},
            )
            answer = launch.measure(
                plan, folder / strategy, "benchmarks.checkpoint_worker", rounds=num_rounds
            )
            rows = rows_of(f"{title} save", answer["rounds"])
            print(measure.table({"figures": rows}), flush=True)
            body = measure.document(
                rows, rounds=num_rounds, workers=2, model=shape, gib=answer["gib"], load_before=load_before
            )
            print(
                f"written to {measure.write(f'checkpoint_{strategy}', body, arguments.results)}", flush=True
            )
    return 0


def rows_of(work: str, found: list[measure.Round]) -> list[dict]:
    def row(key: str, name: str, ours: str, peer: str, goal: float | None = None) -> dict:
        return measure.figure(
            work, name, "s/GiB", found, key, ours=ours, peer=peer, goal=goal, higher_is_better=False
        )

    rows = []
    for key, name in (
        ("stall_seconds_per_gib", "stall"),
        ("extra_seconds_per_gib", "extra time"),
        ("save_seconds_per_gib", "from save to commit"),
    ):
        for peer in PEERS:
            goal = GOAL if name == "stall" and peer == PEERS[0] else None
            rows.append(row(key, name, "mlpipe", peer, goal))
        rows.append(row(key, f"control: {name}", "DCP default again", PEERS[0]))
    return rows


if __name__ == "__main__":
    sys.exit(main())
