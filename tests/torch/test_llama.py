"""The Llama is the one `transformers` knows, counts what the planner counts, and starts where it should."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from mlpipe._core.presets import PRESETS
from mlpipe.train.init import initialize
from mlpipe.train.models.llama import RMSNorm, build_model

pytestmark = pytest.mark.torch

SMALL = {
    "vocab_size": 61, "dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 44,
    "max_seq_len": 40, "rope_theta": 500.0, "norm_eps": 1e-5, "tied": False,
}  # fmt: skip


def small(**changes):
    model = build_model(**{**SMALL, **changes})
    initialize(model, 0)
    return model


@pytest.mark.parametrize("changes", [{}, {"tied": True}, {"num_kv_heads": 4}, {"num_kv_heads": 1}])
def test_logits_and_gradients_are_those_of_transformers(changes):
    model = small(**changes)
    config = model.config
    import transformers  # here: it takes seconds, in each process of tests

    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.dim,
            intermediate_size=config.ffn_dim,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            max_position_embeddings=config.max_seq_len,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            rms_norm_eps=config.norm_eps,
            tie_word_embeddings=config.tied,
        )
    )
    renamed = {n if n.startswith("lm_head") else f"model.{n}": p for n, p in model.state_dict().items()}
    missing, unexpected = theirs.load_state_dict(renamed, strict=False)
    assert not unexpected
    assert missing == (["lm_head.weight"] if config.tied else [])
    theirs.tie_weights()
    inputs = torch.randint(0, config.vocab_size, (3, config.max_seq_len))
    ours_logits, their_logits = model(inputs), theirs(inputs).logits
    torch.testing.assert_close(ours_logits, their_logits, atol=1e-5, rtol=1e-5)
    ours_logits.logsumexp(-1).sum().backward()
    their_logits.logsumexp(-1).sum().backward()
    for name, parameter in theirs.named_parameters():
        ours = model.get_parameter(name.removeprefix("model."))
        torch.testing.assert_close(ours.grad, parameter.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith("llama-")])
def test_presets_have_the_parameters_that_the_planner_counts(name):
    with torch.device("meta"):
        model = build_model(**dataclasses.asdict(PRESETS[name]))
    assert sum(parameter.numel() for parameter in model.parameters()) == PRESETS[name].num_params()
    assert len(model.layers) == PRESETS[name].num_layers


def test_no_token_sees_what_comes_after_it():
    model = small()
    inputs = torch.randint(0, 61, (1, 20))
    changed = inputs.clone()
    changed[0, 12] = (changed[0, 12] + 1) % 61
    before, after = model(inputs), model(changed)
    assert torch.equal(before[0, :12], after[0, :12])
    assert not torch.equal(before[0, 12:], after[0, 12:])


def test_out_of_the_meta_device_every_tensor_is_the_same():
    direct = small()
    with torch.device("meta"):
        meta = build_model(**SMALL)
    meta.to_empty(device="cpu")
    for parameter in meta.parameters():
        parameter.data.fill_(float("nan"))
    initialize(meta, 0)
    tensors = dict(meta.named_parameters()) | dict(meta.named_buffers())
    for name, tensor in [*direct.named_parameters(), *direct.named_buffers()]:
        assert torch.equal(tensor, tensors[name]), name
    assert "rope_cos" not in meta.state_dict()


def test_the_first_loss_is_that_of_guessing_with_logits_of_variance_one():
    model = small(vocab_size=1000)
    inputs, targets = torch.randint(0, 1000, (2, 64, 40), generator=torch.Generator().manual_seed(0))
    loss = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    assert abs(loss.item() - (math.log(1000) + 0.5)) < 0.1


def test_under_autocast_matmuls_are_bf16_and_the_residual_stream_is_fp32():
    model = small()
    seen = {}

    def watch(name):
        return lambda module, args, output: seen.update({name: (args[0].dtype, output.dtype)})

    for name, module in model.named_modules():
        module.register_forward_hook(watch(name))
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(torch.randint(0, 61, (2, 16)))
    assert logits.dtype == torch.bfloat16
    for name, module in model.named_modules():
        if isinstance(module, RMSNorm):
            assert seen[name] == (torch.float32, torch.bfloat16), name
        elif isinstance(module, torch.nn.Linear):
            assert seen[name] == (torch.bfloat16, torch.bfloat16), name
        elif name.startswith("layers.") and name.count(".") == 1:
            assert seen[name] == (torch.float32, torch.float32), name


def test_bf16_parameters_of_a_block_still_normalise_in_fp32():
    """FSDP2 gathers a block's parameters in bf16."""
    norm = RMSNorm(64, 1e-5)
    x = torch.randn(4, 64)
    expected = norm(x)
    assert torch.equal(norm.bfloat16()(x), expected)


def test_blocks_compile_without_a_graph_break():
    model = small()
    inputs = torch.randint(0, 61, (2, 16))
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(inputs)
        for number, block in enumerate(model.layers):
            model.layers[number] = torch.compile(block, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(model(inputs), expected)


def test_more_tokens_than_positions_and_odd_shapes_are_clear_errors():
    with pytest.raises(ValueError, match="41 tokens, but the model has 40 positions"):
        small()(torch.zeros(1, 41, dtype=torch.int64))
    with pytest.raises(ValueError, match="num_heads 5 does not divide dim 32"):
        build_model(**{**SMALL, "num_heads": 5})
