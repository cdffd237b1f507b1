"""`python -m benchmarks.startup`: CPU time of `mlpipe --help` against that of `import click`."""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
from pathlib import Path

from benchmarks import measure

GOAL = 1.5
HELP = "import sys; sys.argv = ['mlpipe', '--help']; from mlpipe.cli import main; main()"


def cpu_seconds(code: str) -> dict[str, float]:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-c", code],
        stdout=subprocess.DEVNULL,
        check=True,
        timeout=60,
        env=measure.with_bytecode(),
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cpu_seconds": spent}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two rounds: does it run at all?")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    arguments = parser.parse_args()
    num_rounds = 2 if arguments.quick else arguments.rounds
    load_before = os.getloadavg()[0]
    found = measure.rounds(
        {
            "mlpipe --help": lambda: cpu_seconds(HELP),
            "import click": lambda: cpu_seconds("import click"),
            "import click again": lambda: cpu_seconds("import click"),
        },
        num_rounds,
    )
    figures = [
        measure.figure(
            "start-up", name, "s", found, "cpu_seconds", ours=ours, peer="import click", goal=goal,
            higher_is_better=False,
        )
        for name, ours, goal in (
            ("CPU time", "mlpipe --help", GOAL), ("control: CPU time", "import click again", None)
        )
    ]  # fmt: skip
    body = measure.document(figures, rounds=num_rounds, load_before=load_before)
    path = measure.write("startup", body, arguments.results)
    print(measure.table(body))
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
