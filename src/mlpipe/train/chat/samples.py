"""Tokenised lines as a map-style set of samples of different lengths."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from mlpipe._core.errors import TrainError
from mlpipe.plan.plan import ChatPlan
from mlpipe.train.loss import IGNORED

ROUND = 64  # tokens: batches of few different shapes


class ChatSamples:
    """Sample `i` is the `i`th line: `inputs`, and as `targets` the token behind each, or -100 where that is
    not learnt. Longer ones are cut to `seq_len` tokens."""

    def __init__(self, tokenised: Any, seq_len: int) -> None:
        self.tokenised = tokenised
        self.seq_len = seq_len
        self.vocab_size: int = tokenised.numbers.vocab_size
        begins = np.concatenate([np.zeros(1, np.int64), tokenised.ends[:-1]])
        self._begins = begins
        whole = tokenised.ends - begins - 1
        self.num_cut, self.num_mute = tokenised.num_cut(seq_len)
        self.lengths: NDArray[np.int64] = np.minimum(whole, seq_len)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """As long as it is."""
        inputs, targets = self.sample(index)
        return {"inputs": torch.from_numpy(inputs), "targets": torch.from_numpy(targets)}

    def sample(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Inputs and targets."""
        begin, length = int(self._begins[index]), int(self.lengths[index])
        tokens = self.tokenised.tokens[begin : begin + length + 1].astype(np.int64)
        learnt = self.tokenised.learnt[begin + 1 : begin + length + 1]
        return tokens[:-1], np.where(learnt, tokens[1:], IGNORED)

    def padded(self, indices: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """A batch with a sample a row, as long as the longest of them rounded up."""
        longest = int(self.lengths[indices].max())
        width = min(self.seq_len, -(-longest // ROUND) * ROUND)
        inputs = np.zeros((len(indices), width), np.int64)
        targets = np.full((len(indices), width), IGNORED, np.int64)
        for row, index in enumerate(indices.tolist()):
            length = int(self.lengths[index])
            inputs[row, :length], targets[row, :length] = self.sample(index)
        return {"inputs": torch.from_numpy(inputs), "targets": torch.from_numpy(targets)}

    @property
    def length_counts(self) -> dict[str, int]:
        """How many samples have up to 16, 32, ... tokens, and more than the bound before."""
        bounds = [16 << i for i in range(max(1, int(self.lengths.max() - 1).bit_length() - 3))]
        counts = np.bincount(np.searchsorted(bounds, self.lengths), minlength=len(bounds))
        return {str(bound): int(count) for bound, count in zip(bounds, counts, strict=True) if count}

    @property
    def notes(self) -> list[str]:
        """What a report says of them."""
        if not self.num_cut:
            return []
        mute = f"; nothing is left to learn of {self.num_mute}" if self.num_mute else ""
        return [f"{self.num_cut} of {len(self)} samples cut to {self.seq_len} tokens{mute}"]

    @property
    def identity(self) -> str:
        """What decides which sample has which number."""
        return f"{len(self)} conversations ({self.tokenised.digest[:8]})"


def open_chat(plan: ChatPlan, split: str, seq_len: int) -> ChatSamples:
    """Of a split, tokenised where it is not yet. Raises TrainError (input): also where the workers read
    different ones."""
    from mlpipe.train.chat.tokenised import tokenise  # with tokenizers and jinja2

    path = plan.path if split == "train" else plan.validation
    if path is None:
        raise TrainError(
            "there are no conversations to validate with",
            where=plan.path,
            hint="name them: data.validation",
            kind="input",
        )
    samples = ChatSamples(tokenise(plan, path), seq_len)
    if samples.num_mute == len(samples):
        raise TrainError(
            f"nothing in it is learnt: every sample is cut to seq_len {seq_len} before the assistant says "
            "anything",
            where=path,
            hint="write a larger seq_len; `mlpipe data preview` tells how long the samples are",
            kind="input",
        )
    _check_alike(samples, path)
    return samples


def _check_alike(samples: ChatSamples, path: str) -> None:
    """On all ranks: nodes may have different copies, and a file may change while a run starts."""
    if not dist.is_initialized():
        return
    own = int(samples.tokenised.digest[:15], 16)
    bounds = torch.tensor([own, -own])
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
    if bounds.tolist() != [own, -own]:
        raise TrainError(
            f"the workers do not read the same: this one has {samples.identity}, another one has not",
            where=path,
            hint="put the same file, tokenizer and template on every node, and change none as a run starts",
            kind="input",
        )
