"""A line of text from a model: to see what it has learnt, not to serve it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from mlpipe._core.errors import TrainError
from mlpipe.plan.data import ChatPlan
from mlpipe.train.data.tokenizer import END_OF_TEXT


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 takes the likeliest token. The same seed gives the same text."""

    max_new_tokens: int
    max_context: int
    seed: int
    temperature: float = 0.8


@dataclass(frozen=True)
class Model:
    """`forward`: token ids (1, T) -> logits (1, T, V), or None where another rank has them. `agreed`: makes
    of the token that a rank drew the one that counts, since logits may differ in their last bit."""

    forward: Callable[[Tensor], Tensor | None]
    device: torch.device
    agreed: Callable[[int], int] = int


def generate(model: Model, tokenizer: Tokenizer, prompt: str, sampling: Sampling) -> str:
    """The prompt and what the model makes of it, up to the end of the document; the same text on every
    rank."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids or ([] if end is None else [end])
    if not ids:
        raise TrainError("an empty prompt, and a tokenizer without an end-of-text token", kind="input")
    return str(tokenizer.decode(ids + _continuation(model, tokenizer, ids, end, sampling)))


def answer(model: Model, plan: ChatPlan, prompt: str, sampling: Sampling) -> str:
    """The prompt, and below it what the assistant says to it in the conversation that the chat template makes
    of both; where there is none, or it wants more than a question, as `generate`."""
    from mlpipe.train.data.chat.encode import Encoder  # with jinja2
    from mlpipe.train.data.chat.jsonl import BadLine

    encoder = Encoder(plan)
    asked = ""
    if encoder.template is not None:
        with suppress(BadLine):
            asked, _ = encoder.template.render([{"role": "user", "content": prompt}], prompt=True)
    ids = encoder.tokenizer.encode(asked, add_special_tokens=False).ids
    if not ids:
        return generate(model, encoder.tokenizer, prompt, sampling)
    said = _continuation(model, encoder.tokenizer, ids, encoder.end_id, sampling)
    return f"{prompt}\n{encoder.tokenizer.decode(said).strip()}"


@torch.no_grad()
def _continuation(
    model: Model, tokenizer: Tokenizer, prompt: list[int], end: int | None, sampling: Sampling
) -> list[int]:
    """The tokens that follow `prompt`, up to `end`.

    Every call of `forward` has the same shape: what stands right of a token does not reach it, and a compiled
    model is not compiled anew for each length.
    """
    ids = list(prompt)
    length = min(sampling.max_context, len(prompt) + sampling.max_new_tokens)
    generator = torch.Generator().manual_seed(sampling.seed)
    for _ in range(sampling.max_new_tokens):
        context = ids[-length:]
        inputs = torch.tensor([context + [0] * (length - len(context))], device=model.device)
        all_logits = model.forward(inputs)
        token = 0
        if all_logits is not None:
            logits = all_logits[0, len(context) - 1, : tokenizer.get_vocab_size()].float().cpu()
            if sampling.temperature:
                probabilities = torch.softmax(logits / sampling.temperature, dim=-1)
                token = int(torch.multinomial(probabilities, 1, generator=generator))
            else:
                token = int(logits.argmax())
        token = model.agreed(token)
        if token == end:
            break
        ids.append(token)
    return ids[len(prompt) :]
