"""`python -m benchmarks.reshard`: 1 GiB saved by 2 ranks is loaded by 4, against DCP's default reader.

The same fp32 tensors (a Llama and its two moments, sharded along dim 0) lie in the same folder, each as its
own tool writes them; every rank reads its rows into memory that is there already. mlpipe looks for the latest
checkpoint, reads its manifest and verifies a checksum of every block; DCP is told the folder and verifies
nothing. Both read from the page cache: the disk is not compared. Wall time is that of the slowest rank; CPU
time is that of all four, which share this machine's cores.
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

GOAL = 0.7


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of a sixteenth: does it run?")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--folder", type=Path, help="where checkpoints go; a temporary folder if not given")
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    arguments = parser.parse_args()
    num_rounds, scale = (1, 4) if arguments.quick else (arguments.rounds, 1)
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        argv = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
        argv += ["-m", "benchmarks.reshard_worker", folder, str(num_rounds), str(scale)]
        subprocess.run(
            [sys.executable, *argv], env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, timeout=1200
        )
        answer = json.loads(Path(folder, "answer.json").read_text())
    found = answer["rounds"]
    rows = []
    for key, name, goal in (("seconds", "wall time", GOAL), ("cpu", "CPU time of all ranks", None)):
        for ours, title, aim in (("mlpipe", name, goal), ("DCP again", f"control: {name}", None)):
            rows.append(
                measure.figure(
                    "load and reshard, 2 to 4", title, "s", found, key, ours=ours, peer="DCP", goal=aim,
                    higher_is_better=False,
                )
            )  # fmt: skip
    body = measure.document(rows, rounds=num_rounds, gib=answer["gib"], load_before=load_before)
    measure.publish("reshard", body, arguments.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
