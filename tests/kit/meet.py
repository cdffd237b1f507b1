"""`python meet.py FOLDER RANK`: what a program does that knows nothing of mlpipe. The processes of a gang
meet, add up, and write the sum into FOLDER; the one of RANK (-1: none) fails then, the others wait for it."""

from __future__ import annotations

import os
import sys


def main(folder: str, broken: int) -> None:
    import torch
    import torch.distributed as dist

    rank, size = int(os.environ["MLPIPE_NODE_RANK"]), int(os.environ["MLPIPE_NUM_NODES"])
    dist.init_process_group("gloo", rank=rank, world_size=size)
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    with open(os.path.join(folder, "total"), "w") as file:
        file.write(f"{total.item()} {rank}")
    if rank == broken:
        sys.exit("broken")
    dist.barrier()
    os._exit(0)  # gloo aborts an interpreter that ends by itself


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
