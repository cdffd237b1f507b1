"""`python -m benchmarks.overhead`: tokens per second of mlpipe's loop against a plain torchrun script.

Both train the same model on the same data with the same optimizer in the same two workers, block by block in
turn (A B B A), so that what the machine does meanwhile hits both. mlpipe's side is the real `Loop.step` with
records and metrics on. The plain script is `plain.py`; two of its kind against each other are the control.
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
STRATEGIES = {"ddp": "plain DDP script", "fsdp": "plain FSDP2 script"}
GOAL = 0.98


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round: does it run at all?")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=3, help="steps in a block")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.steps = 1, 1
    figures = []
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus"
        make_corpus(["--out", str(corpus), "--max-bytes", "2 MiB", "--vocab-size", "4096"])
        for strategy, peer in STRATEGIES.items():
            found = run(Path(folder), corpus, strategy, arguments)
            work = f"llama-4m {arguments.precision} {strategy}, 2 ranks"
            for name, sample, who, goal in (
                ("tokens per second", found["ours"], peer, GOAL),
                ("control: tokens per second", found["control"], "the same plain script", None),
            ):
                figures.append(
                    measure.figure(
                        work, name, "tok/s", sample, "tokens_per_second",
                        peer=who, goal=goal, higher_is_better=True,
                    )
                )  # fmt: skip
                figures.append(
                    measure.figure(
                        work, name.replace("tokens per second", "tokens per CPU second"), "tok/s", sample,
                        "tokens_per_cpu_second", peer=who, goal=goal, higher_is_better=True,
                    )
                )  # fmt: skip
    settings = {"rounds": arguments.rounds, "steps_per_block": arguments.steps, "load_before": load_before}
    body = measure.document(figures, **settings)
    path = measure.write(f"overhead-{arguments.precision}", body, arguments.results)
    print(measure.table(body))
    print(f"written to {path}")
    return 0


def run(folder: Path, corpus: Path, strategy: str, arguments: argparse.Namespace) -> dict[str, list]:
    """The rounds of one strategy, as rank 0 saw them."""
    overrides = [
        f"train.strategy={strategy}", f"train.precision={arguments.precision}", "train.steps=1000000",
        "train.checkpoint.every=1000000 steps", "train.optimizer.schedule=constant",
    ]  # fmt: skip
    pipeline = load_pipeline(ROOT / "pipelines" / "quickstart.yaml", overrides=overrides)
    plan = build_plan(
        pipeline,
        "train",
        run_id=f"overhead-{strategy}",
        attempt=1,
        store_url=str(folder / "store"),
        inputs={"corpus": str(corpus)},
        hardware=stage_hardware(pipeline, "train"),
    )
    path = folder / f"{strategy}.json"
    path.write_text(plan.to_json())
    answer = folder / f"{strategy}-answer.json"
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    argv += ["-m", "benchmarks.overhead_worker", str(path), str(answer)]
    argv += [str(arguments.rounds), str(arguments.steps)]
    # as the launcher sets it
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    subprocess.run(argv, env=env, cwd=ROOT, check=True, timeout=3600)
    return json.loads(answer.read_text())


if __name__ == "__main__":
    sys.exit(main())
