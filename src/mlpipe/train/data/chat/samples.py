"""Tokenised lines as map-style sets of samples of different lengths, of a file or of several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlpipe._core.errors import TrainError
from mlpipe.plan.data import ChatPlan
from mlpipe.train.data.mixture import Mixture
from mlpipe.train.data.order import Ordered
from mlpipe.train.data.uneven_samples import UnevenSamples, check_alike
from mlpipe.train.loss import IGNORED


class ChatSamples(UnevenSamples):
    """Sample `i` is the `i`th line: `inputs`, and as `targets` the token behind each, or -100 where that is
    not learnt. Longer ones are cut to `seq_len` tokens."""

    def __init__(self, path: str, tokenised: Any, seq_len: int) -> None:
        self.path = path
        self.tokenised = tokenised
        self.seq_len = seq_len
        self.vocab_size: int = tokenised.numbers.vocab_size
        begins = np.concatenate([np.zeros(1, np.int64), tokenised.ends[:-1]])
        self._begins = begins
        whole = tokenised.ends - begins - 1
        self.num_cut, self.num_mute = tokenised.num_cut(seq_len)
        self.lengths = np.minimum(whole, seq_len)

    def sample(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """As the base class says."""
        begin, length = int(self._begins[index]), int(self.lengths[index])
        tokens = self.tokenised.tokens[begin : begin + length + 1].astype(np.int64)
        learnt = self.tokenised.learnt[begin + 1 : begin + length + 1]
        return tokens[:-1], np.where(learnt, tokens[1:], IGNORED)

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


class MixedChat(UnevenSamples, Ordered):
    """Samples of several files, indexed as if these lay one behind the other, in the order of a mixture."""

    def __init__(self, sources: Sequence[ChatSamples], weights: Sequence[float]) -> None:
        self.sources = sources
        self.mixture = Mixture(sources, weights)
        self.seq_len = sources[0].seq_len
        self.vocab_size = sources[0].vocab_size
        self.lengths = np.concatenate([source.lengths for source in sources])

    def sample(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """As the base class says."""
        source, own = self.mixture.place_of(index)
        return self.sources[source].sample(own)

    def order_at(self, seed: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """As the base class says."""
        return self.mixture.order_at(seed, positions)

    @property
    def notes(self) -> list[str]:
        """What a report says of them."""
        return [f"{source.path}: {note}" for source in self.sources for note in source.notes]

    @property
    def identity(self) -> str:
        """What decides which sample has which number."""
        return ", ".join(source.identity for source in self.sources)


def open_chat(plan: ChatPlan, split: str, seq_len: int) -> ChatSamples | MixedChat:
    """Of a split, tokenised where it is not yet. Raises TrainError (input): also where the workers read
    different ones."""
    if split == "train" and plan.path is None:
        sources = [_open_file(plan, one.path, seq_len) for one in plan.mix]
        return MixedChat(sources, [one.weight for one in plan.mix])
    path = plan.path if split == "train" else plan.validation
    if path is None:
        raise TrainError(
            "there are no conversations to validate with",
            where=plan.paths[0],
            hint="name them: data.validation",
            kind="input",
        )
    return _open_file(plan, path, seq_len)


def _open_file(plan: ChatPlan, path: str, seq_len: int) -> ChatSamples:
    from mlpipe.train.data.chat.tokenised import tokenise  # with tokenizers and jinja2

    samples = ChatSamples(path, tokenise(plan, path), seq_len)
    if samples.num_mute == len(samples):
        raise TrainError(
            f"nothing in it is learnt: every sample is cut to seq_len {seq_len} before the assistant says "
            "anything",
            where=path,
            hint="write a larger seq_len; `mlpipe data preview` tells how long the samples are",
            kind="input",
        )
    hint = "put the same file, tokenizer and template on every node, and change none as a run starts"
    check_alike(samples.tokenised.digest, path, samples.identity, hint)
    return samples
