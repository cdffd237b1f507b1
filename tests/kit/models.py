"""Users' models for the torch ring: plain PyTorch, and some that misbehave at a given forward."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, dim: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = torch.cumsum(self.norm(x), dim=1) / x.shape[1]
        return x + self.dropout(self.down(F.gelu(self.up(mixed))))


class Plain(nn.Module):
    """Tied head, dropout, a persistent buffer that changes, no `init_weights`."""

    def __init__(
        self, vocab_size: int = 256, dim: int = 32, num_blocks: int = 2, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, dim)
        self.blocks = nn.ModuleList(Block(dim, dropout) for _ in range(num_blocks))
        self.head = nn.Linear(dim, vocab_size, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("num_forwards", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.num_forwards.add_(1)
        x = self.embed(inputs)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


class Initialized(Plain):
    """The same on the meta device."""

    def init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            elif isinstance(module, nn.LayerNorm):
                nn.init.ones_(module.weight)
            if isinstance(module, nn.Linear | nn.LayerNorm) and module.bias is not None:
                nn.init.zeros_(module.bias)
        self.num_forwards.zero_()


class Sequence(nn.Module):
    """x = child(x), which a pipeline can be cut between; a head of its own."""

    def __init__(self, vocab_size: int = 256, dim: int = 32, num_blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, dim)
        self.blocks = nn.ModuleList(Block(dim, 0.0) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.embed(inputs)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class InitializedSequence(Sequence):
    """The same on the meta device."""

    def init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding | nn.LayerNorm):
                module.reset_parameters()


class WithLoss(Plain):
    def loss(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        targets = batch["targets"].flatten()
        total = F.cross_entropy(self(batch["inputs"]).flatten(0, -2).float(), targets, reduction="sum")
        return total, torch.tensor(targets.numel())


class _Overflow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, chosen: torch.Tensor, gain: float) -> torch.Tensor:
        ctx.save_for_backward(chosen)
        ctx.gain = gain
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (chosen,) = ctx.saved_tensors
        loud = (grad * ctx.gain).to(torch.float16).to(grad.dtype) / ctx.gain
        return torch.where(chosen[:, None, None], loud, grad), None, None


class Overflowing(Plain):
    """The gradients of samples whose first token is below `below` overflow fp16 where they are above 65,504 /
    `gain`; of an infinite one always. Of no dropout, and with no buffer."""

    def __init__(self, below: int = 12, gain: float = math.inf) -> None:
        super().__init__(dropout=0.0)
        del self.num_forwards
        self.below, self.gain = below, gain

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = _Overflow.apply(self.embed(inputs), inputs[:, 0] < self.below, self.gain)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


class Odd(Plain):
    """Rows that no world size divides, and a parameter with fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__(dim=30, dropout=0.0)
        self.gain = nn.Parameter(torch.tensor([0.9, 1.0, 1.1]))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) * self.gain.mean()


class Slow(Plain):
    """`seconds` a forward, as long as the file `while_file` exists; then `lame_seconds` where this is replica
    `lame`. With the seed `fails` there is none."""

    def __init__(
        self, seconds: float, while_file: str, dropout: float, lame: str, lame_seconds: float, fails: int
    ) -> None:
        super().__init__(dropout=dropout)
        if torch.initial_seed() == fails:
            raise ValueError("of this seed there is no model")
        self.seconds, self.while_file = seconds, while_file
        self.afterwards = lame_seconds if lame == os.environ.get("MLPIPE_REPLICA") else 0.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.pause()
        return super().forward(inputs)

    def pause(self) -> None:
        is_on = not self.while_file or Path(self.while_file).exists()
        time.sleep(self.seconds if is_on else self.afterwards)


class Held(Slow):
    """Not in the two steps before the first that counts (`dry_steps`), and no moment longer than
    the file is there."""

    num_passes = 0

    def pause(self) -> None:
        self.num_passes += 1
        path, end = Path(self.while_file), time.monotonic() + self.seconds
        if not path.exists():
            time.sleep(self.afterwards)
        while self.num_passes > 2 and path.exists() and time.monotonic() < end:
            time.sleep(0.05)


class Late(Plain):
    """`rank` sets its weights when the file exists, or after `seconds`."""

    def __init__(self, rank: int, until_file: str, seconds: float) -> None:
        super().__init__()
        self.rank, self.until_file, self.seconds = rank, Path(until_file), seconds

    def init_weights(self) -> None:
        end = time.monotonic() + self.seconds
        while (
            int(os.environ["RANK"]) == self.rank and not self.until_file.exists() and time.monotonic() < end
        ):
            time.sleep(0.05)
        for tensor in (*self.parameters(), *self.buffers()):
            nn.init.zeros_(tensor)


class Paced(Plain):
    """Rank `i` takes `seconds[i]` more for each sample in forward, and as long in backward."""

    def __init__(self, seconds: list[float]) -> None:
        super().__init__(dropout=0.0)
        self.seconds = seconds[int(os.environ["RANK"])]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.embed(inputs))
        seconds = len(inputs) * self.seconds
        time.sleep(seconds)
        if x.requires_grad:
            x.register_hook(lambda gradient: time.sleep(seconds))
        logits: torch.Tensor = self.head(self.blocks[1](x))
        return logits


class Lame(Plain):
    """`rank` takes `seconds` more in every forward and in every backward, in the middle of the blocks."""

    def __init__(self, seconds: float, rank: int) -> None:
        super().__init__(dropout=0.0)
        self.seconds = seconds if int(os.environ["RANK"]) == rank else 0.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.embed(inputs))
        time.sleep(self.seconds)
        if x.requires_grad:
            x.register_hook(lambda gradient: time.sleep(self.seconds))
        logits: torch.Tensor = self.head(self.blocks[1](x))
        return logits


def lose_patience() -> None:
    """The watchdog of this process waits no longer than a second from now on, whatever the plan says: who
    hangs is found at once, and a machine that stands still for a while is no hang."""
    (watching,) = (thread for thread in threading.enumerate() if thread.name == "watchdog")
    watching._target.__self__._timeout_seconds = 1.0  # type: ignore[attr-defined]


class Misbehaving(Plain):
    """At forward number `at` of this process, on `rank`, does `what` ("nan", "hang", "raise", "kill",
    "memory"). With a `counter` file it does so only as long as the file counts fewer than `times`."""

    def __init__(self, what: str, at: int, rank: int, counter: str = "", times: int = 1) -> None:
        super().__init__(dropout=0.0)
        self.what, self.at, self.rank = what, at, rank
        self.counter, self.times = counter, times
        self.seen = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        logits = super().forward(inputs)
        self.seen += 1
        if self.seen != self.at or int(os.environ["RANK"]) != self.rank:
            return logits
        if self.counter:
            path = Path(self.counter)
            done = len(path.read_text()) if path.exists() else 0
            if done >= self.times:
                return logits
            path.write_text("x" * (done + 1))
        if self.what == "nan":
            return logits * float("nan")
        if self.what == "hang":
            lose_patience()
            time.sleep(600)
        if self.what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.what == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        raise ValueError("this model does not like this batch")


def plain(**args: float) -> Plain:
    return Plain(**args)  # type: ignore[arg-type]


def initialized(**args: float) -> Initialized:
    return Initialized(**args)  # type: ignore[arg-type]


def late(rank: int, until_file: str, seconds: float) -> Late:
    return Late(rank, until_file, seconds)


def with_loss(**args: float) -> WithLoss:
    return WithLoss(**args)  # type: ignore[arg-type]


def lame(seconds: float, rank: int) -> Lame:
    return Lame(seconds, rank)


def paced(seconds: list[float]) -> Paced:
    return Paced(seconds)


def overflowing(**args: float) -> Overflowing:
    return Overflowing(**args)  # type: ignore[arg-type]


def odd() -> Odd:
    return Odd()


def slow(
    seconds: float,
    while_file: str = "",
    dropout: float = 0.1,
    lame: str = "",
    lame_seconds: float = 0.0,
    fails: int = -1,
) -> Slow:
    return Slow(seconds, while_file, dropout, lame, lame_seconds, fails)


def _once(module: types.ModuleType, name: str, answer: object) -> None:
    """What the function says when it is called next."""
    own = getattr(module, name)

    def call(*_: object, **__: object) -> object:
        setattr(module, name, own)
        return answer

    setattr(module, name, call)


def held(seconds: float, while_file: str, lame: str = "", lame_seconds: float = 0.0, fails: int = -1) -> Held:
    from mlpipe.train import flops

    # for an MFU that no test believes: what counting imports, and 0.3 s of both cores
    _once(flops, "count_flops_per_token", None)
    _once(flops, "measure_peak", 1e9)
    return Held(seconds, while_file, 0.0, lame, lame_seconds, fails)


def misbehaving(what: str, at: int, rank: int, counter: str = "", times: int = 1) -> Misbehaving:
    return Misbehaving(what, at, rank, counter, times)


def not_a_module() -> str:
    return "surprise"


class Heads(nn.Module):
    """Blocks of attention and of an MLP with biases, and a norm of each head; as many heads as `q` gives."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.ModuleDict({name: nn.Linear(32, 32) for name in "qkvo"})
        self.norm, self.head_norm = nn.LayerNorm(32), nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (self.attn[name](y).view(*x.shape[:2], -1, 8).transpose(1, 2) for name in "qkv")
        y = F.scaled_dot_product_attention(self.head_norm(q), self.head_norm(k), v, is_causal=True)
        x = x + self.attn["o"](y.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class WithHeads(nn.Module):
    """`base_model_tp_plan`: as models of `transformers` bring it."""

    base_model_prefix = "inner"

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict(
            {"embed": nn.Embedding(256, 32), "blocks": nn.ModuleList(Heads() for _ in range(2))}
        )
        self.head = nn.Linear(32, 256, bias=False)
        self.config = types.SimpleNamespace(
            base_model_tp_plan={
                **dict.fromkeys((f"blocks.*.attn.{name}" for name in "qkv"), "colwise"),
                "blocks.*.attn.o": "rowwise",
                "blocks.*.head_norm": "replicated_with_grad_allreduce",
            }
        )

    def init_weights(self) -> None:
        for module in self.modules():
            if hasattr(module, "reset_parameters"):  # whose deviations are by the shapes of the weights
                module.reset_parameters()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.inner["embed"](inputs)
        for block in self.inner["blocks"]:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def with_heads() -> WithHeads:
    return WithHeads()


PATTERNS_OF_HEADS = {
    "embed": "row", **dict.fromkeys((f"*.attn.{name}" for name in "qkv"), "column"), "*.attn.o": "row",
    "*.head_norm": "sum", "*.mlp.1": "column", "*.mlp.3": "row",
}  # fmt: skip


class SequenceOfHeads(InitializedSequence):
    """Which a pipeline can be cut between, and patterns split."""

    def __init__(self) -> None:
        super().__init__(num_blocks=0)
        self.blocks = nn.ModuleList(Heads() for _ in range(3))


class TwoInputs(nn.Module):
    def forward(self, inputs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return inputs * mask


def two_inputs() -> TwoInputs:
    return TwoInputs()


def endless(split: str) -> Iterator[int]:
    return iter(int, 1)


def not_a_set(split: str) -> int:
    return 3


def empty(split: str) -> list[str]:
    return []


def words(split: str) -> list[str]:
    return [split, "another"]


class Numbers:
    """A map-style data set that needs no files: `size` samples of 32 tokens, the same on every machine."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(20261121)
        self.tokens = torch.randint(256, (size, 33), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"inputs": self.tokens[i, :-1], "targets": self.tokens[i, 1:]}


def numbers(split: str, size: int = 512) -> Numbers:
    return Numbers(size)


class Greedy(Plain):
    """Asks for `num_bytes` more at the first forward, and touches them."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(dropout=0.0)
        self.num_bytes = num_bytes

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.kept = torch.ones(self.num_bytes, dtype=torch.uint8)
        return super().forward(inputs)


def greedy(num_bytes: int) -> Greedy:
    return Greedy(num_bytes)
