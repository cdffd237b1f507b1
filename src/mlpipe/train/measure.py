"""How fast one core of this machine is, as a line of JSON for each precision on standard output: `precision`,
and the fields of `plan/machine.py`'s Core. Run by `standby.py`, in a fork.

Seconds are of CPU time, by one thread: another process on the same core makes us wait, and does not count.
The best try counts, as what happens beside us only ever adds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial

import torch

from mlpipe.plan.machine import PRECISIONS
from mlpipe.plan.reference import REFERENCE, REFERENCE_BATCH
from mlpipe.plan.settings import Precision
from mlpipe.train.model import LossModule
from mlpipe.train.models.llama import Llama
from mlpipe.train.precision import DTYPES

_TRIES = 2  # of both passes: the first makes the kernels
_MATMULS = 4
_MATMUL = 1_024  # rows and columns


def reference_passes(
    device: torch.device, precision: Precision, shard: Callable[[LossModule], None] | None = None
) -> Callable[[], object]:
    """Forward and backward of the reference model in the trainer's own wrapping; `shard`: by what it is
    sharded."""
    config = REFERENCE[device.type].config
    model = Llama(config).to(device)
    model.init_weights()
    module = LossModule(model, device.type, precision)
    if shard is not None:
        shard(module)
    tokens = torch.randint(config.vocab_size, (REFERENCE_BATCH, config.max_seq_len), device=device)

    def work() -> None:
        module({"inputs": tokens, "targets": tokens})[0].backward()
        module.zero_grad()

    return work


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for precision in PRECISIONS:
        left, right = (torch.ones(_MATMUL, _MATMUL, dtype=DTYPES[precision]) for _ in range(2))
        matmul = _best_seconds(partial(torch.matmul, left, right), _MATMULS)
        whole = _best_seconds(reference_passes(torch.device("cpu"), precision), _TRIES)
        rates = {"matmul_flops": 2.0 * _MATMUL**3 / matmul, "passes_seconds": whole}
        print(json.dumps({"precision": precision, **rates}), flush=True)  # noqa: T201


def _best_seconds(work: Callable[[], object], number: int) -> float:
    """Of CPU time, for one of so many calls."""
    tries: list[float] = []
    for _ in range(number):
        start = time.process_time()
        work()
        tries.append(time.process_time() - start)
    return min(tries)
