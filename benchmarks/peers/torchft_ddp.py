"""torchft 0.2.0, by its train_ddp.py: each replica is one process under its own torchrun. Calls, timeouts and
the least number of replicas are its own; a model that sleeps and random tokens stand for its images.

`ddp`: false sums gradients by the manager after the backward pass. For its DDP ends every survivor when gloo
reports a lost peer: the hook (torchft/ddp.py) asserts a future that is only made where the wait did not fail.

A rank appends a line to `records` when it starts, and one for each step that it commits.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from kit.models import paced
from torch.utils.data import DataLoader
from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo
from torchft.checkpointing.pg_transport import PGTransport

VOCABULARY, SEQ_LEN, SAMPLES = 256, 32, 9_600
_PR_SET_PDEATHSIG = 1


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # in a container no rank outlives its torchrun
    logging.basicConfig(level=logging.INFO)
    replica, replicas = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["NUM_REPLICA_GROUPS"])
    work = json.loads(os.environ["BENCHMARK"])

    def record(**fields: Any) -> None:
        with Path(work["records"]).open("a") as file:
            file.write(json.dumps({"time": time.time(), **fields}) + "\n")

    record(kind="start")
    torch.manual_seed(0)
    tokens = torch.randint(VOCABULARY, (SAMPLES, SEQ_LEN + 1))
    sampler = DistributedSampler(
        tokens, replica_rank=replica, num_replica_groups=replicas, group_rank=0, num_replicas=1, shuffle=True
    )
    batches = DataLoader(tokens, batch_size=work["batch"], sampler=sampler)

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        adamw.load_state_dict(state["adamw"])

    group = ProcessGroupGloo(timeout=timedelta(seconds=5))
    manager = Manager(
        pg=group,
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=lambda: {"model": model.state_dict(), "adamw": adamw.state_dict()},
        replica_id=f"train_ddp_{replica}",
        timeout=timedelta(seconds=30),
        checkpoint_transport=PGTransport(group, timeout=timedelta(seconds=10), device="cpu"),
    )
    plain = paced([work["seconds"]])
    model = DistributedDataParallel(manager, plain) if work["ddp"] else plain
    adamw = torch.optim.AdamW(model.parameters())
    adamw.register_step_post_hook(  # torchft steps it only where the step is committed
        lambda *_: record(kind="step", step=manager.current_step(), participants=manager.num_participants())
    )
    optimizer = Optimizer(manager, adamw)
    while True:  # until the benchmark ends it
        for batch in batches:
            optimizer.zero_grad()
            logits = model(batch[:, :-1])
            F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
            if not work["ddp"]:
                sums = [manager.allreduce(one.grad) for one in model.parameters()]
                for one in sums:
                    one.wait()  # for its timeout at most; errors are the manager's: it does not commit then
            optimizer.step()


if __name__ == "__main__":
    main()
