"""What `benchmarks.data` measures of loading, in a process of its own: FOLDER STEPS."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

from mlpipe.plan.mesh import Mesh
from mlpipe.train.data.loader import MicrobatchLoader
from mlpipe.train.data.tokens import TokenDataset, open_folder
from mlpipe.train.world import World

SEQ_LEN, BATCH = 256, 16


def main() -> int:
    folder, num_steps = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    before = anonymous_mib()
    dataset = TokenDataset(open_folder(folder), "train", SEQ_LEN)
    world = World(Mesh(), 0, torch.device("cpu"))
    stream = MicrobatchLoader(dataset, world, seed=0, global_batch=BATCH, micro_batch=BATCH, seq_len=SEQ_LEN)
    for step in range(10):
        stream.step(step * BATCH)
    began = time.process_time()
    for step in range(10, 10 + num_steps):
        stream.step(step * BATCH)
    speed = num_steps * BATCH * SEQ_LEN / (time.process_time() - began)
    print(json.dumps({"speed": speed, "mib": anonymous_mib() - before}))
    return 0


def anonymous_mib() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("the kernel does not say RssAnon")


if __name__ == "__main__":
    sys.exit(main())
