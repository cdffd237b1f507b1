"""Models and data of one's own as they are found in tutorials and on the Hub, and mistakes made with them."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Tutorial(nn.Module):
    """pytorch.org/tutorials/beginner/transformer_tutorial: `init_weights` fills encoder and decoder, not the
    layers between; the positions are a buffer that the constructor computes."""

    def __init__(self, vocab_size: int = 256, dim: int = 16, num_heads: int = 2, num_layers: int = 2) -> None:
        super().__init__()
        position, pe = torch.arange(64).unsqueeze(1), torch.zeros(1, 64, dim)
        factor = torch.exp(torch.arange(0, dim, 2) * (-math.log(10000.0) / dim))
        pe[0, :, 0::2] = torch.sin(position * factor)
        pe[0, :, 1::2] = torch.cos(position * factor)
        self.register_buffer("pe", pe)
        layer = nn.TransformerEncoderLayer(dim, num_heads, 2 * dim, dropout=0.0, batch_first=True)
        self.transformer_encoder = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.encoder = nn.Embedding(vocab_size, dim)
        self.decoder = nn.Linear(dim, vocab_size)
        self.dim = dim
        self.init_weights()

    def init_weights(self) -> None:
        self.encoder.weight.data.uniform_(-0.1, 0.1)
        self.decoder.bias.data.zero_()
        self.decoder.weight.data.uniform_(-0.1, 0.1)

    def forward(self, src: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(src.shape[1], device=src.device)
        x = self.encoder(src) * math.sqrt(self.dim) + self.pe[:, : src.shape[1]]  # type: ignore[index]
        logits: Tensor = self.decoder(self.transformer_encoder(x, mask, is_causal=True))
        return logits


class Halved(nn.Module):
    """`init_weights` fills some rows and scales what the constructor gave."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.ones(4, 3))
        self.scaled = nn.Parameter(torch.full((5,), 2.0))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("flags", torch.tensor([True, False]))

    def init_weights(self) -> None:
        with torch.no_grad():
            self.rows[:2].zero_()
            self.scaled.mul_(0.5)


class Empty(nn.Module):
    def __init__(self, with_init: bool) -> None:
        super().__init__()
        self.known = nn.Parameter(torch.zeros(2))
        self.forgotten = nn.Parameter(torch.empty(3))
        if with_init:
            self.init_weights = lambda: self.known.data.fill_(1.0)


class Loaded(nn.Module):
    """With weights of its own, which a later init_weights would overwrite."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def init_weights(self) -> None:
        nn.init.zeros_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)


def loaded(path: str) -> Loaded:
    model = Loaded()
    model.load_state_dict(torch.load(path, weights_only=True))
    return model


LLAMA: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}  # fmt: skip


def from_config(**changes: Any) -> Any:
    import transformers

    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA | changes))


def gpt2(**changes: Any) -> Any:
    import transformers

    config = transformers.GPT2Config(vocab_size=256, n_layer=4, bos_token_id=0, eos_token_id=0, **changes)
    return transformers.GPT2LMHeadModel(config)


def from_pretrained(path: str) -> Any:
    import transformers  # here, since it takes seconds

    return transformers.AutoModelForCausalLM.from_pretrained(path)


class Normed(nn.Module):
    """Batch norm and a running centre that the forward uses: both are of the samples that a rank saw. A
    regression with a loss of its own."""

    def __init__(self, kind: str = "sum") -> None:
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3), nn.Tanh()) for _ in range(2)
        )
        self.register_buffer("centre", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.get_buffer("centre").lerp_(x.mean(dim=0), 0.3)
        x = x - self.get_buffer("centre")
        for layer in self.layers:
            x = x + layer(x)
        return x

    def loss(self, batch: dict[str, Tensor]) -> Any:
        x = batch["x"]
        errors = F.mse_loss(self(x), x.roll(1, dims=1) + 0.5, reduction="none").mean(dim=1)
        return (errors.sum(), len(x)) if self.kind == "sum" else errors.mean()


class Stateless(nn.Module):
    """A regression without buffers: the same on any number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def loss(self, batch: dict[str, Tensor]) -> Any:
        x = batch["x"] / 50
        return F.mse_loss(self.layer(x), x.roll(1, dims=1) + 0.5, reduction="none").mean(dim=1).sum(), len(x)


def stateless() -> Stateless:
    return Stateless()


class Points:
    """Samples without `targets`, no two alike; a batch of one number of them is no multiple of another."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(size, 3, generator=generator) * torch.arange(1, size + 1)[:, None] / size

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"x": self.x[i]}


def points(split: str, size: int = 64) -> Points:
    return Points(size if split == "train" else 37)


class Uneven:
    """A sample in the middle is longer."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        length = 5 if i == 4 else 4
        return {"inputs": torch.zeros(length, dtype=torch.int64), "targets": torch.zeros(length).long()}


def uneven(split: str) -> Uneven:
    return Uneven()


class Gives(nn.Module):
    """Its forward, or with `own` its loss, gives `what`."""

    def __init__(self, what: str, own: bool = False) -> None:
        super().__init__()
        self.what = what
        self.head = nn.Embedding(256, 256)
        if own:
            self.loss = lambda batch: self(batch["inputs"])

    def forward(self, inputs: Tensor) -> Any:
        logits = self.head(inputs)
        number = logits.float().mean()
        return {
            "logits": logits,
            "output": SimpleNamespace(logits=logits, loss=None),
            "dict": {"hidden": logits},
            "tuple": (logits, logits),
            "short": logits[:, 1:],
            "number": number,
            "loss and logits": (number, logits),
            "sum and count": (number * len(inputs), len(inputs)),
            "a loss of transformers": {"loss": number, "logits": logits},
            "nothing": None,
            "one for each": logits.mean(dim=(1, 2)),
        }[self.what]


def gives(what: str, own: bool = False) -> Gives:
    return Gives(what, own)


class LossModuleOfTorch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Embedding(256, 256)
        self.loss = nn.CrossEntropyLoss()


class Raises(nn.Module):
    """What the meta device does not show."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Embedding(256, 256)

    def forward(self, inputs: Tensor) -> Tensor:
        if inputs.is_meta:
            raise RuntimeError("not here")
        logits: Tensor = self.head(inputs) @ torch.zeros(3, 3)
        return logits


def normed(kind: str = "sum") -> Normed:
    return Normed(kind)


def tutorial() -> Tutorial:
    return Tutorial()


def halved() -> Halved:
    return Halved()


def empty(with_init: bool) -> Empty:
    return Empty(with_init)


def loss_module() -> LossModuleOfTorch:
    return LossModuleOfTorch()


def raises() -> Raises:
    return Raises()
