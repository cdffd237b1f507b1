"""`python -m benchmarks.transfer`: a blob to a real MinIO here and back, against public S3 clients.

Each side is a process of its own, with its own random bytes in memory. An upload counts where the server
verified a checksum of every byte; a download counts when the client has verified one (what a peer does not
verify itself is summed with google-crc32c in the same clock). MinIO's data lie in memory (/dev/shm), so that
the disk says nothing; MinIO shares the cores with the client, so wall time shows mostly its cost, CPU time
the client's alone.

Needs `make servers` and `make bench-tools`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks import measure

ROOT = Path(__file__).parents[1]
BUCKET = "benchmark"
PEERS = ("obstore", "s3torchconnector", "boto3", "boto3 default", "minio-py")
OTHERS = ("obstore again", "obstore, unverified")  # the control, and what no server verifies
QUICK_PEERS = ("obstore", "obstore again", "minio-py")
PACKAGES = ("obstore", "s3torchconnector", "boto3", "minio")
GOAL = 1.0
SECONDS = 300.0


class Side:
    """A client's process."""

    def __init__(self, name: str, mib: int, environment: dict[str, str]) -> None:
        python = sys.executable if name == "mlpipe" else str(environment_of("s3") / "bin" / "python")
        script = str(Path(__file__).with_name("transfer_client.py"))
        self.gib = mib / 1024
        self.process = subprocess.Popen(
            [python, "-W", "ignore", script, name, str(mib)],
            env={**os.environ, **environment, "BUCKET": BUCKET},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def _answer(self) -> str:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args} ended with {self.process.wait(SECONDS)}")
        return line

    def ask(self, command: str) -> dict[str, float]:
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return json.loads(self._answer())

    def turn(self) -> measure.Figures:
        up, down = self.ask("upload"), self.ask("download")
        self.ask("clean")
        found = {}
        for name, one in (("upload", up), ("download", down)):
            found[f"{name} speed"] = self.gib / one["seconds"]
            found[f"{name} cpu"] = one["cpu_seconds"] / self.gib
        return found

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait(SECONDS)


def environment_of(tool: str) -> Path:
    folder = ROOT / f".venv-bench-{tool}"
    if not (folder / ".done").exists():
        raise SystemExit(f"{folder.name} is not there: run `make bench-tools`")
    return folder


def versions(tool: str, packages: tuple[str, ...]) -> dict[str, str]:
    """Of what is installed in the tool's environment."""
    code = f"from importlib.metadata import version\nfor one in {packages!r}: print(one, version(one))"
    python = str(environment_of(tool) / "bin" / "python")
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return dict(line.split() for line in done.stdout.splitlines())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of a small blob: does it run?")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.mib = 1, 80
    sys.path.insert(0, str(ROOT / "tests"))
    from kit.servers import MODULES, s3_server

    load_before = os.getloadavg()[0]
    names = ("mlpipe", *(QUICK_PEERS if arguments.quick else (*PEERS, *OTHERS)))
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder, s3_server("minio", Path(folder)) as server:
        server.make_bucket(BUCKET)
        sides = {name: Side(name, arguments.mib, server.environment()) for name in names}
        turns: dict[str, Callable[[], measure.Figures]] = {name: side.turn for name, side in sides.items()}
        for turn in turns.values():
            turn()  # connections, first allocations
        found = measure.rounds(turns, arguments.rounds)
        for side in sides.values():
            side.end()
    body = measure.document(
        rows_of(found, names), rounds=arguments.rounds, mib=arguments.mib, load_before=load_before,
        versions={**versions("s3", PACKAGES), "MinIO": MODULES["minio"][1]},
    )  # fmt: skip
    measure.publish("transfer", body, arguments.results)
    return 0


def rows_of(found: list[measure.Round], names: tuple[str, ...]) -> list[dict]:
    rows = []
    for work in ("upload", "download"):
        for name, unit, key, higher in (
            ("speed", "GiB/s", f"{work} speed", True),
            ("client's CPU time", "s/GiB", f"{work} cpu", False),
        ):
            for peer in names[1:]:
                control = peer == "obstore again"
                row = measure.figure(
                    f"MinIO {work}", f"control: {name}" if control else name, unit, found, key,
                    ours=peer if control else "mlpipe", peer="obstore" if control else peer,
                    goal=GOAL if peer in PEERS else None, higher_is_better=higher,
                )  # fmt: skip
                rows.append(row)
    return rows


if __name__ == "__main__":
    sys.exit(main())
