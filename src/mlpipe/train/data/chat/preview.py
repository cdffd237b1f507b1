"""One sample as text, for people: what of it is learnt, and how long the others are."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import numpy as np

from mlpipe._core.errors import TrainError
from mlpipe.plan.data import ChatPlan
from mlpipe.train.data.chat.tokenised import tokenise
from mlpipe.train.data.tokenizer import load_tokenizer, tokenizer_file


@dataclass(frozen=True)
class Piece:
    """Of a sample, neighbouring tokens that are learnt, or not."""

    text: str
    learnt: bool


@dataclass(frozen=True)
class Preview:
    """`lengths`: of all samples, in tokens. `num_cut`: samples that are longer than `seq_len`, of which
    `num_mute` have nothing to learn in what is left."""

    num_samples: int
    num_tokens: int
    num_learnt: int
    num_cut: int
    num_mute: int
    lengths: dict[str, int]
    num_sample_tokens: int
    pieces: tuple[Piece, ...]


def preview(plan: ChatPlan, path: str, index: int, seq_len: int) -> Preview:
    """Of one of the plan's files. Raises TrainError (input)."""
    made = tokenise(plan, path)
    lengths = np.diff(made.ends, prepend=0)
    if index >= len(lengths):
        raise TrainError(
            f"there is no sample {index}",
            where=path,
            hint=f"it has samples 0 to {len(lengths) - 1}",
            kind="input",
        )
    begin, end = int(made.ends[index] - lengths[index]), int(made.ends[index])
    tokens, learnt = made.tokens[begin:end].tolist(), made.learnt[begin:end].tolist()
    tokenizer = load_tokenizer(tokenizer_file(plan.tokenizer))
    pieces = []
    for is_learnt, group in groupby(zip(tokens, learnt, strict=True), key=lambda pair: bool(pair[1])):
        text = tokenizer.decode([token for token, _ in group], skip_special_tokens=False)
        pieces.append(Piece(text, is_learnt))
    ordered = np.sort(lengths)
    num_cut, num_mute = made.num_cut(seq_len)
    return Preview(
        num_samples=len(lengths),
        num_tokens=made.numbers.num_tokens,
        num_learnt=made.numbers.num_learnt,
        num_cut=num_cut,
        num_mute=num_mute,
        lengths={
            "median": int(ordered[len(ordered) // 2]),
            "p90": int(ordered[len(ordered) * 9 // 10]),
            "max": int(ordered[-1]),
        },
        num_sample_tokens=len(tokens),
        pieces=tuple(pieces),
    )
