"""`python -m kit.one_gpu`: the trainer's worker, of several ranks that share the first GPU. NCCL refuses two
ranks on a device, so their tensors travel by gloo; GPUs that map each other's memory have to be told, by
TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

from mlpipe.train import session, worker


def _first() -> torch.device:
    first = torch.device("cuda", 0)
    torch.zeros(1, device=first)  # else a DeviceMesh takes the local rank's
    return first


def main() -> int:
    meet = dist.init_process_group

    def by_gloo(backend: str, **more: Any) -> None:
        meet("gloo", **more)

    vars(dist)["init_process_group"] = by_gloo
    session.Session._device = lambda self: _first()  # type: ignore[method-assign]
    return worker.main()


if __name__ == "__main__":
    sys.exit(main())
