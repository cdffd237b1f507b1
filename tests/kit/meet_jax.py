"""`python meet_jax.py FOLDER`: the program of docs/how-to/command-gangs.md. The processes of JAX meet, add
up, and write the sum into FOLDER."""

from __future__ import annotations

import os
import sys


def main(folder: str) -> None:
    import jax
    from jax.experimental import multihost_utils

    rank, size = int(os.environ["MLPIPE_NODE_RANK"]), int(os.environ["MLPIPE_NUM_NODES"])
    jax.distributed.initialize(  # the address is in the environment
        num_processes=size, process_id=rank, cluster_detection_method="deactivate"
    )
    total = multihost_utils.process_allgather(jax.numpy.float32(rank + 1)).sum()
    with open(os.path.join(folder, "total"), "w") as file:
        file.write(f"{float(total)} {rank}")
    jax.distributed.shutdown()  # type: ignore[no-untyped-call, unused-ignore]


if __name__ == "__main__":
    main(sys.argv[1])
