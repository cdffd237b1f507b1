"""An exported checkpoint of mlpipe's model is what `transformers` loads: same logits, same tokens; all or
nothing."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import product
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from kit import own

from mlpipe._core.errors import MlpipeError, StoreError, TrainError
from mlpipe._core.presets import LLAMA, MOE
from mlpipe.cli.outcome import _next
from mlpipe.plan.mesh import Mesh
from mlpipe.store import catalogue
from mlpipe.store.open import open_store
from mlpipe.train import write_safetensors
from mlpipe.train.data.corpus import build_corpus
from mlpipe.train.data.tokenizer import END_OF_TEXT, load_tokenizer
from mlpipe.train.export import export_checkpoint
from mlpipe.train.init import initialize
from mlpipe.train.model import BuiltModel, LossModule
from mlpipe.train.models import moe
from mlpipe.train.models.llama import build_model
from mlpipe.train.parallel.parallelized_model import ParallelizedModel, local_shards
from mlpipe.train.world import World

pytestmark = pytest.mark.torch

FIELDS = {
    "vocab_size": 300, "dim": 32, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 44,
    "max_seq_len": 40, "rope_theta": 500.0, "norm_eps": 1e-5, "tied": True,
}  # fmt: skip


def save(store, tensors, model, *, cuts=(2, 1), tied=None):
    """Commits `tensors` as ranks would that hold a grid of `cuts` (along dim 0 and 1) of each."""
    key = catalogue.new_prefix("runs/r/stages/train", 7, 1)
    entries = {
        name: {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "chunks": []}
        for name, tensor in tensors.items()
    }
    blobs = []
    for place in product(*map(range, cuts)):
        data = bytearray()
        for name, tensor in tensors.items():
            box, offset = tensor, [0] * tensor.dim()
            for dim, (index, cut) in enumerate(zip(place, cuts, strict=True)):
                if dim < tensor.dim():
                    size = -(-tensor.shape[dim] // cut)
                    offset[dim] = min(index * size, tensor.shape[dim])
                    box = box.narrow(dim, offset[dim], min(size, tensor.shape[dim] - offset[dim]))
            if box.numel() and not any(place[tensor.dim() :]):
                chunk = {"offset": offset, "shape": list(box.shape), "blob": len(blobs)}
                entries[name]["chunks"].append({**chunk, "byte_offset": len(data)})
                data += box.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        blobs.append(catalogue.write_blob(store, f"{key}/model-{len(blobs):05d}", [bytes(data)]))
    manifest = {"format": 1, "step": 7, "attempt": 1, "uuid": key.rpartition("-")[2], "time": 0.0, "code": {}}
    manifest |= {"scalars": {"model": model, "tied": tied or {}}, "tensors": entries, "blobs": blobs}
    assert catalogue.commit(store, key, manifest)
    return key


def llama(**changes):
    model = build_model(**{**FIELDS, **changes})
    initialize(model, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)  # away from logits that are all nearly zero
    return model


def llama_checkpoint(store, model, **kwargs):
    tensors = {f"model.{name}": tensor.detach() for name, tensor in model.named_parameters()}
    tensors["optim.embed_tokens.weight.exp_avg"] = torch.zeros(5)
    return save(store, tensors, {"entry": LLAMA, "args": asdict(model.config), "preset": None}, **kwargs)


@pytest.fixture
def store(tmp_path):
    return open_store(str(tmp_path / "store"))


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    root = tmp_path_factory.mktemp("corpus")
    (root / "text.txt").write_text("".join(f"def f{i}(x): return x + {i}\n" for i in range(200)))
    build_corpus(root / "out", source=root / "text.txt", vocab_size=300)
    return root / "out"


@pytest.fixture(scope="module")
def transformers():
    """Takes seconds to import, in each process of tests."""
    import transformers

    return transformers


@pytest.mark.parametrize(
    ("changes", "cuts"),
    [({}, (1, 1)), ({"tied": False}, (2, 1)), ({"num_kv_heads": 4}, (3, 2)), ({"num_kv_heads": 1}, (5, 1))],
)
@pytest.mark.parametrize("shard_bytes", [10**9, 20_000])
def test_transformers_gives_the_same_logits(
    tmp_path, store, tokens, changes, cuts, shard_bytes, transformers
):
    model = llama(**changes)
    key = llama_checkpoint(store, model, cuts=cuts)
    out = tmp_path / "out"
    done = export_checkpoint(store, key, out, tokenizer=tokens / "tokenizer.json", shard_bytes=shard_bytes)
    assert (done.step, done.transformers) == (7, True)
    assert done.num_params == model.config.num_params()
    assert set(done.files) == {path.name for path in out.iterdir()}
    assert ("model.safetensors" in done.files) == (shard_bytes == 10**9)

    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert theirs.dtype == torch.float32
    inputs = torch.randint(0, 300, (4, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours = model(inputs)
        assert ours.std() > 0.1
        torch.testing.assert_close(theirs(inputs).logits, ours, atol=1e-5, rtol=0)

    text = "def f12(x): return ü 🎉"
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    own = load_tokenizer(tokens / "tokenizer.json")
    assert tokenizer(text)["input_ids"] == own.encode(text).ids
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token == END_OF_TEXT
    assert theirs.config.eos_token_id == tokenizer.eos_token_id == own.token_to_id(END_OF_TEXT)


@pytest.mark.parametrize(("shared", "cuts"), [(2, (3, 2)), (0, (1, 1))])
def test_transformers_computes_experts_alike(tmp_path, store, shared, cuts, transformers):
    """Biases decide, too; ranks' cuts do not lie between experts."""
    of_experts = {"num_experts": 4, "experts_per_token": 2, "num_shared_experts": shared, "balance_rate": 0.1}
    model = moe.build_model(**{**FIELDS, **of_experts})
    initialize(model, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
        for name, buffer in model.named_buffers():
            if name.endswith("bias"):
                buffer.copy_(torch.tensor([0.5, 0.0, -0.5, 0.2]))
    args = asdict(model.config)
    tensors = {f"model.{name}": tensor.detach() for name, tensor in model.state_dict().items()}
    key = save(store, tensors, {"entry": MOE, "args": args, "preset": None}, cuts=cuts)
    done = export_checkpoint(store, key, tmp_path / "out")
    assert done.transformers
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert type(theirs).__name__ == "Glm4MoeForCausalLM"
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    inputs = torch.randint(0, 300, (4, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(theirs(inputs).logits, model(inputs), atol=1e-4, rtol=1e-4)


def test_the_exported_model_generates(tmp_path, store, tokens, transformers):
    key = llama_checkpoint(store, llama())
    export_checkpoint(store, key, tmp_path / "out", tokenizer=tokens / "tokenizer.json")
    pipe = transformers.pipeline("text-generation", model=str(tmp_path / "out"))
    assert pipe("def f", max_new_tokens=4, do_sample=False)[0]["generated_text"].startswith("def f")


def test_bf16_and_other_dtypes_and_shapes_survive_the_format(tmp_path, store):
    tensors = {
        "model.a": torch.randn(5, 3, 2, dtype=torch.bfloat16),
        "model.b": torch.tensor(3, dtype=torch.int64),
        "model.c": torch.zeros(0, 4),
        "model.d": torch.randn(9) > 0,
        "model.sub.e": torch.randn(300, 1),
    }
    key = save(store, tensors, {"entry": "my.module:build", "args": {}, "preset": None})
    done = export_checkpoint(store, key, tmp_path / "out")
    assert done.files == ("model.safetensors",)
    assert not done.transformers
    loaded = safetensors.torch.load_file(tmp_path / "out/model.safetensors")
    assert {f"model.{name}" for name in loaded} == set(tensors)
    for name, tensor in loaded.items():
        assert torch.equal(tensor, tensors[f"model.{name}"]), name


def test_a_tied_model_of_ones_own_loads_under_all_its_names(tmp_path, store, transformers):
    """One of transformers: its load_state_dict is strict, and with its config.json it is loaded there."""
    model = own.from_config().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    module = LossModule(model, "cpu")
    world = World(Mesh(), 0, torch.device("cpu"))
    built = BuiltModel(module, model, [], on_meta=False, construct=own.from_config)
    parallel = ParallelizedModel(built, module, shards=local_shards(module, world))
    assert parallel.tied() == {"model.lm_head.weight": "model.model.embed_tokens.weight"}
    tensors = {item.name: item.local for item in parallel.shards}
    key = save(store, tensors, {"entry": "kit.own:from_config", "args": {}}, tied=parallel.tied())
    done = export_checkpoint(store, key, tmp_path / "out")
    assert (done.files, done.transformers) == (("model.safetensors",), False)
    assert done.num_params == sum(parameter.numel() for parameter in model.parameters())
    loaded = own.from_config().eval()
    loaded.load_state_dict(safetensors.torch.load_file(tmp_path / "out/model.safetensors"))
    model.config.save_pretrained(tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    inputs = torch.arange(40).view(2, 20)
    with torch.no_grad():
        expected = model(inputs).logits
        assert expected.std() > 0.01
        torch.testing.assert_close(loaded(inputs).logits, expected)
        torch.testing.assert_close(theirs(inputs).logits, expected)


def test_what_comes_next_names_transformers_only_where_it_loads(store):
    for key, loads in (
        (llama_checkpoint(store, llama()), True),
        (save(store, {"model.a": torch.zeros(2)}, {"entry": "my.module:build", "args": {}}), False),
    ):
        stage = SimpleNamespace(attempt=1, outcome={"step": 7, "checkpoint": key})
        run = SimpleNamespace(run_id="r", state="done", backend="local", meta={}, stages={"train": stage})
        assert ("what transformers loads" in "".join(_next(store, run))) is loads


def test_small_tensors_share_the_blocks_that_were_read(tmp_path, store, monkeypatch):
    reads = []
    real = write_safetensors.read_blob
    monkeypatch.setattr(
        write_safetensors, "read_blob", lambda *args: (reads.append(args[1]["key"]), real(*args))
    )
    key = llama_checkpoint(store, llama(), cuts=(2, 1))
    export_checkpoint(store, key, tmp_path / "out")
    assert len(reads) == 2


def test_a_folder_with_something_in_it_is_refused_and_left_alone(tmp_path, store):
    key = llama_checkpoint(store, llama())
    out = tmp_path / "out"
    out.mkdir()
    export_checkpoint(store, key, out)  # empty: fine
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(TrainError, match="something here already") as caught:
        export_checkpoint(store, key, out)
    assert caught.value.kind == "input"
    assert before == {path.name: path.read_bytes() for path in out.iterdir()}


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
def test_a_damaged_checkpoint_leaves_nothing_behind(tmp_path, store, damage):
    key = llama_checkpoint(store, llama())
    path = tmp_path / "store" / key / "model-00001"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    if damage == "delete":
        path.unlink()
    else:
        path.write_bytes(data if damage == "flip" else data[:-8])
    with pytest.raises(StoreError) as caught:
        export_checkpoint(store, key, tmp_path / "out")
    assert "model-00001" in str(caught.value)
    assert {path.name for path in tmp_path.iterdir()} == {"store"}


def test_what_cannot_be_exported_says_why(tmp_path, store, tokens):
    with pytest.raises(MlpipeError) as caught:
        export_checkpoint(store, "runs/r/stages/train/checkpoints/step-000000001/1-ab", tmp_path / "out")
    assert caught.value.kind == "input"
    key = save(store, {"optim.a": torch.zeros(3)}, {"entry": "my.module:build", "args": {}})
    with pytest.raises(TrainError, match="holds no model"):
        export_checkpoint(store, key, tmp_path / "out")
    renamed = {"entry": LLAMA, "args": FIELDS}
    tensors = {f"model.{name}": value.detach() for name, value in llama().named_parameters()}
    tensors["model.embedding.weight"] = tensors.pop("model.embed_tokens.weight")
    with pytest.raises(TrainError, match=r"lacks 1 tensors .* model\.embed_tokens\.weight") as caught:
        export_checkpoint(store, save(store, tensors, renamed), tmp_path / "out")
    assert caught.value.kind == "input"
    key = llama_checkpoint(store, llama())
    with pytest.raises(TrainError, match=r"no tokenizer\.json") as caught:
        export_checkpoint(store, key, tmp_path / "out", tokenizer=tokens / "manifest.json")
    assert caught.value.kind == "input"
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainError, match="cannot be written") as caught:
        export_checkpoint(store, key, tmp_path / "file/out")
    assert caught.value.kind == "infrastructure"
    assert not (tmp_path / "out").exists()


def test_the_index_lists_every_tensor_of_a_sharded_export(tmp_path, store):
    key = llama_checkpoint(store, llama(tied=False))
    export_checkpoint(store, key, tmp_path / "out", shard_bytes=10_000)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    found = {}
    for file in set(index["weight_map"].values()):
        for name, tensor in safetensors.torch.load_file(tmp_path / "out" / file).items():
            assert index["weight_map"][name] == file
            found[name] = tensor
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    assert "lm_head.weight" in found
    assert "model.layers.2.mlp.down_proj.weight" in found
