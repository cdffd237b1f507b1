"""A line of generated text: deterministic, one shape, within the context and the vocabulary."""

from __future__ import annotations

import pytest
import torch

from mlpipe._core.errors import TrainError
from mlpipe.plan.data import ChatPlan
from mlpipe.train.data.tokenizer import END_OF_TEXT, MIN_VOCAB_SIZE, train_tokenizer
from mlpipe.train.generate import Model, Sampling, answer, generate
from mlpipe.train.models.llama import build_model

pytestmark = pytest.mark.torch

TOKENIZER = train_tokenizer([], MIN_VOCAB_SIZE)  # one token a byte


def run(forward, prompt="ab", **changes):
    agreed = changes.pop("agreed", int)
    sampling = Sampling(**{"max_new_tokens": 5, "max_context": 100, "seed": 0, **changes})
    return generate(Model(forward, torch.device("cpu"), agreed), TOKENIZER, prompt, sampling)


def next_letter(inputs):
    """The likeliest token is always the last byte plus one, whatever stands further right."""
    assert inputs.shape[0] == 1
    return torch.nn.functional.one_hot(inputs + 1, 400).float() * 100


def test_it_continues_from_the_end_of_the_prompt():
    assert run(next_letter) == "abcdefg"
    assert run(next_letter, temperature=0) == "abcdefg"


def test_the_shape_stays_and_the_context_slides():
    shapes = set()

    def forward(inputs):
        shapes.add(tuple(inputs.shape))
        return next_letter(inputs)

    assert run(forward, "abcd", max_context=3, max_new_tokens=8) == "abcdefghijkl"
    assert shapes == {(1, 3)}


def test_it_stops_at_the_end_of_the_document_and_stays_in_the_vocabulary():
    end = TOKENIZER.token_to_id(END_OF_TEXT)

    def forward(inputs):
        logits = torch.zeros(*inputs.shape, 400)
        logits[..., 300:] = 1000.0  # a model may have more rows than the tokenizer has tokens
        logits[..., end] = 500.0
        return logits

    assert run(forward) == "ab"


def test_the_seed_decides_and_the_global_generator_does_not():
    def forward(inputs):
        return torch.zeros(*inputs.shape, 257)

    first = run(forward, max_new_tokens=20)
    torch.manual_seed(99)
    assert run(forward, max_new_tokens=20) == first
    assert run(forward, max_new_tokens=20, seed=1) != first


def test_padding_to_the_right_changes_no_greedy_token():
    model = build_model(
        vocab_size=257, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=44, max_seq_len=40,
        rope_theta=500.0, norm_eps=1e-5, tied=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model.init_weights()
    text = run(model, "hello", max_new_tokens=12, temperature=0)
    ids = TOKENIZER.encode("hello").ids
    with torch.no_grad():
        for _ in range(12):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    assert text == TOKENIZER.decode(ids)


def test_an_empty_prompt_starts_a_document():
    assert len(run(next_letter, "")) > 0


def test_an_empty_prompt_without_an_end_token_is_an_error():
    from tokenizers import Tokenizer, models

    with pytest.raises(TrainError, match="empty prompt"):
        generate(Model(next_letter, torch.device("cpu")), Tokenizer(models.BPE()), "", Sampling(1, 4, 0))


def test_what_counts_is_the_token_that_the_ranks_agreed_on():
    seen = []

    def agreed(token):
        seen.append(token)
        return TOKENIZER.token_to_id("x")

    assert run(next_letter, max_new_tokens=3, agreed=agreed) == "abxxx"
    assert seen == [TOKENIZER.token_to_id(letter) for letter in "cyy"]


def test_of_conversations_the_answer_ends_where_the_assistant_does(tmp_path):
    """The template asks; what it writes is not shown."""
    TOKENIZER.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "z"}')
    template = tmp_path / "chat_template.jinja"
    template.write_text("<{{ messages[0].content }}>{% if add_generation_prompt %}a{% endif %}")
    plan = ChatPlan("train.jsonl", None, str(tmp_path), None)
    model, sampling = Model(next_letter, torch.device("cpu")), Sampling(40, 100, 0, 0.0)
    assert answer(model, plan, "why?", sampling) == "why?\nbcdefghijklmnopqrstuvwxy"
    template.write_text("{{ raise_exception('no') }}")
    assert answer(model, plan, "wx", sampling).startswith("wxyz{")
