"""What the peers' scripts share, so that they differ in nothing but the library: the settings, the data, the
loss, and the turns that the benchmark gives them. Needs numpy and torch only.

Every side sees the same samples in the same global batches: sample i of the data set is the i-th of mlpipe's
order, which the usual samplers then hand out one after the other.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from benchmarks.peers.gpt import GPT, build_model
from mlpipe.train.data.order import order

VALIDATION_SAMPLES = 32


@dataclass(frozen=True)
class Work:
    """`settings`: "same" for all sides; "default", what the library's first page shows; "tuned", what its
    authors recommend for speed, torch.compile and bf16 included. `batch` is of a rank. `log`: where a script
    that runs by itself writes a line a step; `checkpoint`: where it saves, every `save_every` steps."""

    side: str
    settings: str
    precision: str
    model: dict[str, int]
    tokens: str
    batch: int
    seed: int
    lr: float
    grad_clip: float
    socket: str = ""
    log: str = ""
    checkpoint: str = ""
    save_every: int = 0
    # of `meshes.py`: sizes of axes, mlpipe's Llama, names of the modules of each stage, parts of a batch
    mesh: dict[str, int] = field(default_factory=dict)
    llama: dict[str, Any] = field(default_factory=dict)
    stages: list[list[str]] = field(default_factory=list)
    microbatches: int = 1

    @property
    def bf16(self) -> bool:
        return self.precision == "bf16"

    @property
    def compiled(self) -> bool:
        return self.settings == "tuned"

    def build(self) -> GPT:
        torch.manual_seed(self.seed)
        return build_model(**self.model)

    def adamw(self, parameters: Any) -> torch.optim.AdamW:
        """torch's own default is the slow loop over parameters on a CPU."""
        fused = {} if self.settings == "default" else {"fused": True}
        return torch.optim.AdamW(
            parameters, lr=self.lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, **fused
        )

    def dataset(self, split: str = "train") -> Samples:
        return Samples(Path(self.tokens), split, self.model["seq_len"], self.seed)


def read_work() -> Work:
    return Work(**json.loads(os.environ["BENCHMARK"]))


class Samples(Dataset):
    """Map-style: {"inputs", "targets"} of `seq_len` tokens each. 100 epochs long."""

    def __init__(self, folder: Path, split: str, seq_len: int, seed: int) -> None:
        about = json.loads((folder / "manifest.json").read_text())
        file = folder / about["splits"][split]["file"]
        self.tokens = np.memmap(file, dtype=about["dtype"], mode="r")
        self.seq_len = seq_len
        num_windows = (len(self.tokens) - 1) // seq_len
        self.order = order(seed, 0, 100 * num_windows, num_windows)

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        start = int(self.order[i]) * self.seq_len
        window = torch.from_numpy(self.tokens[start : start + self.seq_len + 1].astype(np.int64))
        return {"inputs": window[:-1], "targets": window[1:]}


def usual_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())


def validation_batches(work: Work, rank: int, num_ranks: int) -> list[tuple[Tensor, Tensor]]:
    """This rank's share of the first samples of the validation split, which are the same on every side, in
    the shape of training: another would be compiled anew."""
    samples = work.dataset("validation")
    mine = [samples[i] for i in range(rank, VALIDATION_SAMPLES, num_ranks)]
    return [
        (torch.stack([s["inputs"] for s in part]), torch.stack([s["targets"] for s in part]))
        for part in (mine[i : i + work.batch] for i in range(0, len(mine), work.batch))
    ]


class Turns:
    """The benchmark's side of a rank. `before_step` returns when this rank may do one more step; meanwhile it
    sleeps in a read, so that a side that waits costs the others nothing. `counted`: what it says of the steps
    that it has done since it was asked last."""

    def __init__(
        self,
        path: str,
        side: str,
        rank: int,
        validate: Callable[[], float | None],
        counted: Callable[[], dict[str, int]] = dict,
    ) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._lines = self._socket.makefile("r")
        self._validate = validate
        self._counted = counted
        self._left = -1
        self._say(side=side, rank=rank, pid=os.getpid())

    def before_step(self) -> None:
        if self._left == 0:
            self._say(done=True, **self._counted())
        while self._left <= 0:
            line = self._lines.readline()
            if not line:  # the benchmark is over
                sys.stdout.flush()
                os._exit(0)
            asked = json.loads(line)
            if asked["do"] == "steps":
                self._left = asked["count"]
            else:
                self._say(loss=self._validate())
        self._left -= 1

    def _say(self, **fields: Any) -> None:
        self._socket.sendall(json.dumps(fields).encode() + b"\n")


def turns(work: Work, rank: int, num_ranks: int, forward: Callable[[Tensor], Tensor]) -> Turns:
    """Of a peer whose model gives logits by `forward`."""
    batches = validation_batches(work, rank, num_ranks)

    @torch.no_grad()
    def validate() -> float:
        losses = [float(usual_loss(forward(inputs), targets)) for inputs, targets in batches]
        return sum(losses) / len(losses)

    return Turns(work.socket, work.side, rank, validate)
