"""`python -m benchmarks.checkpoint`: what an asynchronous save costs the trainer, against DCP's async_save.

Two ranks train the same sharded Llama (FSDP2, AdamW) twice in the same workers: once with mlpipe's loop and
checkpointer, once with a plain script and `torch.distributed.checkpoint.async_save` at its defaults. Saves of
the two alternate (A B B A). Two figures, of a rank, per GiB that it saves, from the second save on:

stall       what the training thread waits for: inside the call that saves, and before the next update
extra time  how much longer the save and the two steps after it take than two steps without a save
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import measure
from mlpipe.plan.build import build_plan, stage_hardware
from mlpipe.spec.load import load_pipeline
from mlpipe.train.corpus import main as make_corpus

ROOT = Path(__file__).parents[1]
GOAL = 1 / 3
# 91M parameters: 1.0 GiB of weights and moments in all, in short steps
FULL = {"dim": 768, "num_layers": 12, "num_heads": 12, "num_kv_heads": 12, "ffn_dim": 2048}
QUICK = {"dim": 128, "num_layers": 2, "num_heads": 4, "num_kv_heads": 4, "ffn_dim": 256}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="one round of a small model: does it run at all?"
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--folder", type=Path, help="where checkpoints go; a temporary folder if not given")
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    arguments = parser.parse_args()
    shape = QUICK if arguments.quick else FULL
    num_rounds = 1 if arguments.quick else arguments.rounds
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        found = run(Path(folder), shape, num_rounds)
    figures = []
    peer = "DCP async_save, defaults"
    for key, name, goal in (
        ("stall_seconds_per_gib", "stall", GOAL),
        ("extra_seconds_per_gib", "extra time", None),
    ):
        figures.append(
            measure.figure(
                "asynchronous save, fsdp, 2 ranks", name, "s/GiB", found["saves"], key,
                peer=peer, goal=goal, higher_is_better=False,
            )
        )  # fmt: skip
    figures.append(
        measure.figure(
            "asynchronous save, fsdp, 2 ranks", "control: stall", "s/GiB", found["control"],
            "stall_seconds_per_gib", peer=peer, goal=None, higher_is_better=False,
        )
    )  # fmt: skip
    body = measure.document(
        figures, rounds=num_rounds, gib_per_rank=found["gib_per_rank"], load_before=load_before
    )
    path = measure.write("checkpoint", body, arguments.results)
    print(measure.table(body))
    print(f"written to {path}")
    return 0


def run(folder: Path, shape: dict[str, int], num_rounds: int) -> dict:
    """What rank 0 measured."""
    corpus = folder / "corpus"
    make_corpus(["--out", str(corpus), "--max-bytes", "1 MiB", "--vocab-size", "1024"])
    overrides = [
        "train.strategy=fsdp", "train.steps=1000000", "train.checkpoint.every=1000000 steps",
        "train.checkpoint.keep=1", "train.model.seq_len=32", "train.data.batch_size=2",
        "train.optimizer.schedule=constant", *(f"train.model.{name}={size}" for name, size in shape.items()),
    ]  # fmt: skip
    pipeline = load_pipeline(ROOT / "pipelines" / "quickstart.yaml", overrides=overrides)
    plan = build_plan(
        pipeline,
        "train",
        run_id="checkpoint",
        attempt=1,
        store_url=str(folder / "store"),
        inputs={"corpus": str(corpus)},
        hardware=stage_hardware(pipeline, "train"),
    )
    path, answer = folder / "plan.json", folder / "answer.json"
    path.write_text(plan.to_json())
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    argv += [
        "-m",
        "benchmarks.checkpoint_worker",
        str(path),
        str(answer),
        str(num_rounds),
        str(folder / "dcp"),
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    subprocess.run(argv, env=env, cwd=ROOT, check=True, timeout=3600)
    return json.loads(answer.read_text())


if __name__ == "__main__":
    sys.exit(main())
