"""`python -m benchmarks.validated`: from the command to the first validated checkpoint, and what follows.

The same CNN and the same small GPT, on two ranks, with validation every few steps, a checkpoint after each,
and TensorBoard's tracker: as a pipeline, and as a script of each tool as its pages have it. No side is
instrumented: its checkpoints' times on disk are what is looked at. `first` is from the command to the first
of them, which is behind the first validation; `speed` is images or tokens a second from the first to the
last. `lines` are those of the script or the pipeline, without blank ones, comments and docstrings; model and
data set are the same file for all and not counted. The goals hold against the tools; raw DDP is shown beside.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from benchmarks import measure
from benchmarks.peers import results

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RAW = "raw DDP"
ENVIRONMENT = ROOT / ".venv-bench-validated"
# side -> its file, and what of a checkpoint is written last
PEERS = {
    "Lightning": ("lightning_trainer", "*.ckpt"),
    "Accelerate": ("accelerate_ddp", "step-*/random_states_*.pkl"),
    "HF Trainer": ("hf_trainer", "checkpoint-*/trainer_state.json"),
    RAW: ("raw_ddp", "step-*.pt"),
}
# in one step: samples, and tokens or images of each; steps, and those between two validations
WORKS = {"cnn": (64, 1, "images/s", 400, 40), "gpt": (16, 128, "tok/s", 120, 20)}


def side(name: str, work: str, steps: int, every: int) -> measure.Figures:
    """One run from its command to its end. Raises RuntimeError with its output where that fails."""
    batch, size, _, _, _ = WORKS[work]
    with tempfile.TemporaryDirectory() as folder:
        argv, pattern = command(name, work, folder, steps, every)
        began = time.time()
        done = subprocess.run(
            argv, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=900, check=False
        )
        by_checkpoint: dict[Path, float] = {}
        for path in Path(folder).glob(pattern):
            key = path.parent if "/" in pattern else path
            by_checkpoint[key] = max(by_checkpoint.get(key, 0.0), path.stat().st_mtime)
        times = sorted(by_checkpoint.values())
    # Accelerate's ranks abort now and then as the interpreter ends, when all that is measured is over
    ended = done.returncode == 0 or name == "Accelerate"
    if not ended or len(times) != steps // every:
        found = f"exit {done.returncode}, {len(times)} of {steps // every} checkpoints"
        raise RuntimeError(f"{name}: {found}: {done.stdout[-2000:]}{done.stderr[-3000:]}")
    samples = (len(times) - 1) * every * batch
    return {"first": times[0] - began, "speed": samples * size / (times[-1] - times[0])}


def command(name: str, work: str, folder: str, steps: int, every: int) -> tuple[list[str], str]:
    """And where its checkpoints come to lie."""
    if name == results.OURS:
        spec = Path(folder, "pipeline.yaml")
        spec.write_text((HERE / "pipeline.yaml").read_text().replace("WORK", work))
        about = WORKS[work]
        lr = "5e-3" if work == "cnn" else "1e-3"
        settings = {
            "data.batch_size": about[0], "optimizer.lr": lr, "steps": steps,
            "validate.every": f"{every} steps", "checkpoint.every": f"{every} steps",
        }  # fmt: skip
        argv = [str(Path(sys.executable).with_name("mlpipe")), "run", str(spec), "--store", f"{folder}/store"]
        argv += ["--run-id", "r", "--quiet"]
        argv += [
            text for key, value in settings.items() for text in ("--set", f"stages.train.train.{key}={value}")
        ]
        return argv, "store/runs/r/stages/train/checkpoints/*/*/MANIFEST.json"
    script, pattern = PEERS[name]
    python = ENVIRONMENT / "bin/python"
    own = sys.executable if name == RAW and not python.exists() else str(python)
    argv = [own, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return [*argv, "-m", f"benchmarks.validated.{script}", work, folder, str(steps), str(every)], pattern


def environment() -> dict[str, str]:
    """One thread a rank on every side; mlpipe shares the cores among its workers by itself."""
    settings = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {
        **measure.with_bytecode(),
        **settings,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
    }


def lines_of(name: str) -> int:
    """Of what a user of it writes."""
    if name == results.OURS:
        text = (HERE / "pipeline.yaml").read_text()
        return sum(bool(line.strip()) and not line.strip().startswith("#") for line in text.splitlines())
    text = (HERE / f"{PEERS[name][0]}.py").read_text()
    body = ast.parse(text).body
    doc = body[0].end_lineno or 0 if isinstance(body[0], ast.Expr) else 0
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in text.splitlines()[doc:])


def versions() -> dict[str, str]:
    """Of the peers, in their environment."""
    names = {"lightning", "accelerate", "transformers", "tensorboard"}
    found = distributions(path=[str(path) for path in ENVIRONMENT.glob("lib/python*/site-packages")])
    return {one.name: one.version for one in found if one.name in names}


def rows_of(work: str, found: list[measure.Round]) -> list[dict[str, Any]]:
    unit, counted = WORKS[work][2], {name: {"lines": float(lines_of(name))} for name in found[0]}
    rows = []
    for name, of, key, more in (
        ("first validated checkpoint", "s", "first", False),
        ("speed, validated and tracked", unit, "speed", True),
        ("lines of user code", "lines", "lines", False),
    ):
        rounds = [counted] if key == "lines" else found
        tools = [{side: figures for side, figures in one.items() if side != RAW} for one in rounds]
        if len(tools[0]) > 1:
            rows += results.against_best(work, name, of, tools, key, goal=1.0, higher_is_better=more)
        if RAW in rounds[0]:
            pair = [{side: one[side] for side in (results.OURS, RAW)} for one in rounds]
            named = f"{name}, against {RAW}"
            rows += results.against_best(work, named, of, pair, key, goal=None, higher_is_better=more)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round, few steps: does it run?")
    parser.add_argument("--peers", default=",".join(PEERS), help="names, separated by commas")
    parser.add_argument("--only", choices=WORKS, help="one of the two works")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--checkpoints", type=int, help="of a run, at least 2; default: 10 (cnn), 6 (gpt)")
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    arguments = parser.parse_args()
    if arguments.checkpoints is not None and arguments.checkpoints < 2:
        parser.error("the speed is that between checkpoints: --checkpoints 2 or more")
    names = [results.OURS, *arguments.peers.split(",")]
    if any(name not in {results.OURS, RAW} for name in names) and not ENVIRONMENT.exists():
        parser.error(f"{ENVIRONMENT} is missing; `make .venv-bench-validated/.done` makes it")
    load_before = os.getloadavg()[0]
    for work in [arguments.only] if arguments.only else WORKS:
        steps, every = (4, 2) if arguments.quick else WORKS[work][3:]
        steps = every * arguments.checkpoints if arguments.checkpoints else steps
        sides = {
            name: lambda name=name, work=work, steps=steps, every=every: side(name, work, steps, every)
            for name in names
        }
        if arguments.quick:
            found = [{name: run() for name, run in sides.items()}]
        else:
            found = measure.rounds(sides, arguments.rounds)
        rows = rows_of(work, found)
        path = measure.merge(
            "validated", rows, arguments.results, versions=versions(), load_before=load_before,
            rounds=len(found), steps=steps, every=every, ranks=2,
        )  # fmt: skip
        print(measure.table({"figures": rows}), flush=True)
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
