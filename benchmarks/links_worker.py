"""`python -m benchmarks.links_worker LIST INTERFACE`: one rank that trains several plans, one after the
other. LIST is a JSON file: [[path of plan.json, scratch folder, port], ...]. For each it prints the bytes
that left by INTERFACE."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch.distributed as dist

from mlpipe.plan.plan import Plan
from mlpipe.train.rank_process import RankProcess
from mlpipe.train.session import Session
from mlpipe.train.stop import Stop
from mlpipe.train.watchdog import Watchdog


def sent_bytes(interface: str) -> int:
    """As the kernel counts them, headers and all. /sys/class/net would show another network namespace's."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == interface:
            return int(figures.split()[8])
    raise ValueError(f"there is no interface {interface}")


def main() -> int:
    entries, interface = json.loads(Path(sys.argv[1]).read_text()), sys.argv[2]
    process = RankProcess.from_environment()
    for path, folder, port in entries:
        os.environ["MASTER_PORT"] = str(port)
        scratch = Path(folder)
        scratch.mkdir(parents=True, exist_ok=True)
        stop = Stop(scratch, process)
        plan = Plan.from_json(Path(path).read_bytes())
        before = sent_bytes(interface)
        watchdog = Watchdog(scratch, rank=process.rank, timeout_seconds=1800)
        session = Session(plan, process, stop, watchdog, time.time())
        session.run([0])
        dist.barrier()
        session.close()
        dist.destroy_process_group()
        if process.rank == 0:
            print(json.dumps(sent_bytes(interface) - before), flush=True)
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # gloo's threads may abort at the interpreter's end
