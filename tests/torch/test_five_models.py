"""Five models as people have them, with the code that docs/how-to/own-model.md shows: their losses are those
of a plain PyTorch loop. And the pipelines beside the language ones run."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kit import plans
from kit.command_runs import Cli
from torch import Tensor, nn

from mlpipe.plan.data import DataPlan
from mlpipe.plan.entry import Entry
from mlpipe.plan.mesh import Mesh
from mlpipe.plan.model import ModelPlan
from mlpipe.plan.plan import Plan
from mlpipe.plan.work import TrainPlan
from mlpipe.train.data.datasets import open_dataset
from mlpipe.train.data.loader import MicrobatchLoader
from mlpipe.train.model import build_model
from mlpipe.train.parallel.materialize import materialize
from mlpipe.train.world import World

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/how-to/own-model.md").read_text()
BLOCKS = dict(re.findall(r"^```python\n# (\S+)\n(.*?)^```", PAGE, flags=re.M | re.S))
STEPS, BATCH = 3, 8

# As in pytorch.org/tutorials/beginner/transformer_tutorial, but for its dropout and its print
TUTORIAL = """
import math
import torch
from torch import nn, Tensor
from torch.nn import TransformerEncoder, TransformerEncoderLayer


class TransformerModel(nn.Module):

    def __init__(self, ntoken: int, d_model: int, nhead: int, d_hid: int,
                 nlayers: int, dropout: float = 0.5):
        super().__init__()
        self.model_type = 'Transformer'
        self.pos_encoder = PositionalEncoding(d_model, dropout)
        encoder_layers = TransformerEncoderLayer(d_model, nhead, d_hid, dropout)
        self.transformer_encoder = TransformerEncoder(encoder_layers, nlayers)
        self.embedding = nn.Embedding(ntoken, d_model)
        self.d_model = d_model
        self.linear = nn.Linear(d_model, ntoken)

        self.init_weights()

    def init_weights(self) -> None:
        initrange = 0.1
        self.embedding.weight.data.uniform_(-initrange, initrange)
        self.linear.bias.data.zero_()
        self.linear.weight.data.uniform_(-initrange, initrange)

    def forward(self, src: Tensor, src_mask: Tensor = None) -> Tensor:
        src = self.embedding(src) * math.sqrt(self.d_model)
        src = self.pos_encoder(src)
        if src_mask is None:
            src_mask = nn.Transformer.generate_square_subsequent_mask(len(src)).to(src.device)
        output = self.transformer_encoder(src, src_mask)
        output = self.linear(output)
        return output


class PositionalEncoding(nn.Module):

    def __init__(self, d_model: int, dropout: float = 0.1, max_len: int = 64):
        super().__init__()
        self.dropout = nn.Dropout(p=dropout)

        position = torch.arange(max_len).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
        pe = torch.zeros(max_len, 1, d_model)
        pe[:, 0, 0::2] = torch.sin(position * div_term)
        pe[:, 0, 1::2] = torch.cos(position * div_term)
        self.register_buffer('pe', pe)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.pe[:x.size(0)]
        return self.dropout(x)
"""


def of_logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    out = model(batch["inputs"])
    logits = getattr(out, "logits", out)
    return F.cross_entropy(logits.flatten(0, -2), batch["targets"].flatten())


def of_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    total, count = model.loss(batch)
    return total / count


def of_call(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


# name -> entry, its args, its data (None: token files), the loss as a plain loop writes it
GPT2 = {
    "vocab_size": 256, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
BERT = {
    "vocab_size": 128, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 16,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
TRANSFORMER = {"ntoken": 256, "d_model": 16, "nhead": 2, "d_hid": 32, "nlayers": 2, "dropout": 0.0}
FIVE: dict[str, tuple[Entry, Entry | None, Callable[[Any, dict[str, Tensor]], Tensor]]] = {
    "gpt2": (Entry("zoo.gpt2:build", GPT2), None, of_logits),
    "bert": (
        Entry("zoo.bert:build", BERT),
        Entry("zoo.masked:masked", {"num_samples": 64, "vocab_size": 128}), of_call,
    ),
    "tutorial": (Entry("zoo.tutorial:BatchFirst", TRANSFORMER), None, of_logits),
    "cnn": (
        Entry("pipelines.images.model:cnn", {"num_classes": 4, "width": 4}),
        Entry("pipelines.images.data:shapes", {"num_images": 64}), of_logits,
    ),
    "mlp": (
        Entry("pipelines.tabular.model:Mlp", {"num_columns": 4, "width": 8}),
        Entry("pipelines.tabular.data:flats", {"num_rows": 64}), of_loss,
    ),
}  # fmt: skip
RUNS = [(1, "single", name) for name in ("tutorial", "cnn", "mlp")] + [
    (2, strategy, name) for strategy in ("ddp", "fsdp") for name in FIVE
]


def code_of(block: str) -> list[str]:
    """Its lines, without those that import and those that are empty."""
    lines = [line for line in block.splitlines() if line.strip()]
    return [line for line in lines if not line.startswith(("import ", "from "))]


def test_each_takes_at_most_ten_lines_and_the_page_shows_what_is_shipped():
    for path in ("gpt2", "bert", "tutorial"):
        assert len(code_of(BLOCKS[f"zoo/{path}.py"])) <= 10
    assert len(code_of(BLOCKS["zoo/masked.py"])) <= 10
    for path in ("pipelines/images/model.py", "pipelines/tabular/model.py"):
        shipped = (ROOT / path).read_text()
        assert shipped.split('"""', 2)[2].lstrip() == BLOCKS[path]
        assert len(code_of(BLOCKS[path])) <= 10


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Iterator[tuple[Path, dict[tuple[int, str, str], Plan]]]:
    folder = tmp_path_factory.mktemp("five")
    tokens = plans.write_tokens(folder / "tokens")
    for path, text in {**BLOCKS, "zoo/transformer_tutorial.py": TUTORIAL}.items():
        if path.startswith("zoo/"):
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_text(text)

    def plan(world_size: int, strategy: Any, name: str) -> Plan:
        entry, dataset, _ = FIVE[name]
        data = {} if dataset is None else {"data": DataPlan(None, dataset, None)}
        made = plans.train_plan(
            folder / "store", tokens, run_id=f"{name} {strategy}", strategy=strategy, world_size=world_size,
            steps=STEPS, every=STEPS, model=ModelPlan(entry, None, 32 if dataset is None else 1, ()),
            num_flops_per_token=None, **data,
        )  # fmt: skip
        train = made.work.training
        return replace(made, work=train._replace(global_batch=BATCH, micro_batch=BATCH // world_size))

    made = {run: plan(*run) for run in RUNS}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{folder}:{ROOT}")
        patch.syspath_prepend(str(folder))
        patch.syspath_prepend(str(ROOT))
        for world_size in (1, 2):
            these = [one for run, one in made.items() if run[0] == world_size]
            plans.run_together(these, folder / f"world-{world_size}")
        yield folder, made
    for name in [name for name in sys.modules if name == "zoo" or name.startswith("zoo.")]:
        del sys.modules[name]


def plain_losses(
    train: TrainPlan, loss_of: Callable[[Any, dict[str, Tensor]], Tensor], num_ranks: int
) -> list[float]:
    """A loop as everybody writes it, from the same weights over the same samples: the mean over the ranks'
    means, each of a batch of its own (which is what a batch norm sees)."""
    built = build_model(train.model, seed=train.seed, device_type="cpu")
    materialize(built, train.seed, torch.device("cpu"))
    model = built.model.train()
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    dataset = open_dataset(train.data, split="train", seq_len=train.model.seq_len)
    loader = MicrobatchLoader(
        dataset, World(Mesh(), 0, torch.device("cpu")), seed=train.seed, global_batch=BATCH,
        micro_batch=BATCH // num_ranks, seq_len=train.model.seq_len,
    )  # fmt: skip
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = torch.stack([loss_of(model, one.batch) for one in loader.step(step * BATCH)]).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("run", RUNS, ids=lambda run: "-".join(map(str, run)))
def test_losses_are_those_of_a_plain_loop(trained, run):
    folder, made = trained
    world_size, _, name = run
    expected = plain_losses(made[run].work.training, FIVE[name][2], world_size)
    assert plans.losses(folder / "store", made[run]) == pytest.approx(expected, rel=1e-4)
    assert len(set(expected)) == STEPS


SHIPPED = {"images": ("num_images", "accuracy"), "tabular": ("num_rows", "coverage")}


@pytest.mark.parametrize("name", SHIPPED)
def test_the_shipped_pipelines_run(tmp_path: Path, name: str) -> None:
    cli = Cli(tmp_path, warm=True)
    cli.folder = ROOT
    small = (f"data.args.{SHIPPED[name][0]}=128", "data.batch_size=8", "optimizer.warmup_steps=1", "steps=3")
    changes = [f"train.{change}" for change in (*small, "resources.workers_per_node=1")]
    changes += [
        f"evaluate.gate={SHIPPED[name][1]} >= 0",
        "evaluate.max_tokens=64",
        "train.validate.every=2 steps",
    ]
    words = [word for change in changes for word in ("--set", change)]
    cli("run", f"pipelines/{name}/pipeline.yaml", "--run-id", "r", *words)
    assert cli.json("status", "r")["state"] == "done"
    (model,) = cli.json("models", "list")["models"]
    assert model["step"] in (2, 3)  # the better one
    assert 0 <= model["lineage"]["metrics"][SHIPPED[name][1]] <= 1
