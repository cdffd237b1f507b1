"""`python -m kit.gang_links INDEX SIZE PORT MEMBERS`: one machine of a gang, of which MEMBERS, a JSON list,
try links between their GPUs. These are CPUs here, and gloo is their NCCL. Prints what the machine found."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict

from mlpipe.train.preflight import gang
from mlpipe.train.preflight.verdict import Report


def main(index: int, size: int, port: int, members: list[int]) -> None:
    gang._GPU, gang._GPU_BYTES = ("cpu", "gloo"), 2**20
    report = Report(index, f"n{index}")
    one = gang.Gang(f"localhost:{port}", index, size, report.node)
    one.look_at_links(report, None, members)
    one.look_at_links(report, [(members[0], members[-1])])
    one.exchange("end", None)
    print(json.dumps(asdict(report)), flush=True)
    one.leave([])


if __name__ == "__main__":
    main(*map(json.loads, sys.argv[1:]))
    os._exit(0)  # gloo aborts an interpreter that ends by itself
