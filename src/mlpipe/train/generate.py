"""A line of text from a model: to see what it has learnt, not to serve it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from mlpipe._core.errors import TrainError
from mlpipe.train.tokenizer import END_OF_TEXT


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 takes the likeliest token. The same seed gives the same text."""

    max_new_tokens: int
    max_context: int
    seed: int
    temperature: float = 0.8


@torch.no_grad()
def generate(
    forward: Callable[[Tensor], Tensor | None],
    tokenizer: Tokenizer,
    prompt: str,
    sampling: Sampling,
    *,
    device: torch.device,
    agreed: Callable[[int], int] = int,
) -> str:
    """The prompt and what `forward` (token ids (1, T) -> logits (1, T, V)) makes of it, up to the end of the
    document. The text is the same on every
    rank by `agreed`, which makes of the token that a rank drew the one that counts: logits may differ in
    their last bit, and where `forward` gives None another rank has them.

    Every call of `forward` has the same shape: what stands right of a token does not reach it, and a compiled
    model is not compiled anew for each length.
    """
    end = tokenizer.token_to_id(END_OF_TEXT)
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids or ([] if end is None else [end])
    if not ids:
        raise TrainError("an empty prompt, and a tokenizer without an end-of-text token", kind="input")
    num_prompt = len(ids)
    length = min(sampling.max_context, num_prompt + sampling.max_new_tokens)
    generator = torch.Generator().manual_seed(sampling.seed)
    for _ in range(sampling.max_new_tokens):
        context = ids[-length:]
        inputs = torch.tensor([context + [0] * (length - len(context))], device=device)
        all_logits = forward(inputs)
        token = 0
        if all_logits is not None:
            logits = all_logits[0, len(context) - 1, : tokenizer.get_vocab_size()].float().cpu()
            if sampling.temperature:
                probabilities = torch.softmax(logits / sampling.temperature, dim=-1)
                token = int(torch.multinomial(probabilities, 1, generator=generator))
            else:
                token = int(logits.argmax())
        token = agreed(token)
        if token == end:
            break
        ids.append(token)
    return str(tokenizer.decode(ids))
