"""What is measured on a GPU: models, cases, and the plan of a case. No pydantic, no torch."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mlpipe._core.presets import PRESETS, LlamaConfig
from mlpipe._core.quantized import Base
from mlpipe.plan import memory
from mlpipe.plan.axes.axis import Layout, RankWork
from mlpipe.plan.data import DataPlan
from mlpipe.plan.entry import Entry
from mlpipe.plan.hardware import GPUS, Gpu
from mlpipe.plan.mesh import Mesh
from mlpipe.plan.model import AdapterPlan, ModelPlan
from mlpipe.plan.optimizers import OptimizerCost
from mlpipe.plan.plan import SCHEMA_VERSION, Launch, Plan
from mlpipe.plan.shapes.dense import Dense
from mlpipe.plan.shapes.shape import StepShape
from mlpipe.plan.shapes.trained import without
from mlpipe.plan.updates import OptimizerPlan
from mlpipe.plan.work import CheckpointPlan, Prediction, TrainPlan

NEVER = 10**9


@dataclass(frozen=True)
class Model:
    """`fields`: of `models.GPT2` or `LlamaConfig`. `micro_batch`: sequences a pass by the least memory (GiB)
    of a device that it needs, most first; `batch`: sequences an update. `steps`: updates a block, so that one
    takes about a second on a Hopper GPU."""

    architecture: str
    fields: dict[str, Any]
    seq_len: int
    batch: int
    micro_batch: dict[int, int]
    steps: int

    @property
    def llama(self) -> LlamaConfig | None:
        return LlamaConfig(**self.fields) if self.architecture == "llama" else None

    def num_params(self) -> int:
        if self.llama is not None:
            return self.llama.num_params()
        dim, layers = self.fields["dim"], self.fields["num_layers"]
        embeddings = (self.fields["vocab_size"] + self.fields["max_seq_len"]) * dim
        return embeddings + layers * (12 * dim * dim + 13 * dim) + 2 * dim

    def num_flops_per_token(self) -> float:
        """As `mlpipe.plan.flops` counts. Of GPT-2's parameters all take part in matmuls but positions, norms
        and biases; of Llama's the formula counts the norms, too, which changes the fifth digit."""
        if self.llama is not None:
            return Dense(self.llama).flops_per_token(self.seq_len)
        dim, layers = self.fields["dim"], self.fields["num_layers"]
        matrices = self.fields["vocab_size"] * dim + layers * 12 * dim * dim
        return float(6 * matrices + 12 * layers * dim * self.seq_len)

    def micro_batch_on(self, memory_bytes: int) -> int:
        return next(size for gib, size in self.micro_batch.items() if memory_bytes >= gib * 2**30)


def _gpt2(dim: int, layers: int, heads: int, batch: int, micro_batch: dict[int, int], steps: int) -> Model:
    fields = {
        "dim": dim,
        "num_layers": layers,
        "num_heads": heads,
        "vocab_size": 50_304,
        "max_seq_len": 1_024,
    }
    return Model("gpt2", fields, 1_024, batch, micro_batch, steps)


def _llama(preset: str, seq_len: int, batch: int, micro_batch: dict[int, int], steps: int) -> Model:
    return Model("llama", asdict(PRESETS[preset]), seq_len, batch, micro_batch, steps)


_TINY = replace(PRESETS["llama-1m"], vocab_size=256, dim=32, num_layers=2, ffn_dim=96, max_seq_len=64)
MODELS = {
    # memory of both sides at once: one set of weights and gradients, two of optimizer states
    "gpt2-124m": _gpt2(768, 12, 12, 128, {40: 32, 20: 16, 0: 4}, 4),
    "gpt2-350m": _gpt2(1_024, 24, 16, 64, {40: 16, 20: 8, 0: 2}, 3),
    "gpt2-1.5b": _gpt2(1_600, 48, 25, 64, {120: 16, 70: 8, 0: 2}, 1),
    "llama-1b": _llama("llama-1b", 4_096, 16, {120: 4, 70: 2, 0: 1}, 1),
    "llama-125m": _llama("llama-125m", 1_024, 128, {40: 32, 20: 16, 0: 4}, 4),
    "llama-350m": _llama("llama-350m", 1_024, 64, {40: 16, 20: 8, 0: 2}, 3),
}
TINY = {
    "gpt2-tiny": Model(
        "gpt2",
        {"dim": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 256, "max_seq_len": 32},
        32,
        4,
        {0: 2},
        1,
    ),
    "llama-tiny": Model("llama", asdict(_TINY), 32, 4, {0: 2}, 1),
}


@dataclass(frozen=True)
class Case:
    """One configuration, measured in a process of its own within `seconds`. `attention`: the back end of
    torch's SDPA ("auto": torch's choice). `loss`: mlpipe's own (fused when compiled), "chunked" (never
    compiled) or "usual" (F.cross_entropy of all logits). `documents`: rows hold several samples. `rank`: of
    adapters, which alone are trained; `base`: how few bits the weights beside them have. `rounds`: of ABBA
    turns."""

    model: str
    compile: bool = True
    attention: str = "auto"
    checkpointing: str = "none"
    loss: str = "own"
    float8: bool = False
    documents: bool = False
    rank: int = 0
    base: Base | None = None
    rounds: int = 2
    seconds: float = 75.0
    goal_mfu: float | None = None

    @property
    def variant(self) -> str:
        words = [] if self.compile else ["eager"]
        words += [self.attention] if self.attention != "auto" else []
        words += [f"{self.checkpointing} checkpointing"] if self.checkpointing != "none" else []
        words += [f"{self.loss} loss"] if self.loss != "own" else []
        words += ["float8"] if self.float8 else []
        words += ["packed samples"] if self.documents else []
        words += [f"LoRA, {self.base} base" if self.base else "LoRA"] if self.rank else []
        return ", ".join(words)

    @property
    def adapter(self) -> AdapterPlan | None:
        return AdapterPlan(self.rank, 2.0 * self.rank, base=self.base) if self.rank else None

    @property
    def name(self) -> str:
        return f"{self.model}, {self.variant}" if self.variant else self.model


# The most important first: what the budget does not reach is named in the results. The first of a model pays
# for its compilation; its variants find most of it in the cache.
CASES = (
    Case("gpt2-1.5b", rounds=4, seconds=150, goal_mfu=0.55),
    Case("llama-1b", rounds=3, seconds=110),
    Case("gpt2-124m", rounds=4),
    Case("gpt2-350m", rounds=3),
    Case("llama-1b", rank=16),
    Case("llama-1b", rank=16, base="int8"),
    Case("llama-1b", rank=16, base="nf4"),
    Case("llama-1b", documents=True),
    Case("gpt2-1.5b", attention="cudnn", seconds=90),
    Case("gpt2-1.5b", float8=True, seconds=90),
    Case("llama-1b", attention="cudnn"),
    Case("llama-1b", float8=True),
    Case("gpt2-124m", compile=False),
    Case("gpt2-1.5b", checkpointing="full", seconds=90),
    Case("gpt2-1.5b", checkpointing="selective", seconds=90),
    Case("gpt2-124m", loss="chunked"),
    Case("gpt2-124m", loss="usual"),
    Case("llama-125m"),
    Case("llama-350m"),
    Case("llama-1b", compile=False),
    Case("gpt2-1.5b", compile=False, seconds=90),
    Case("gpt2-124m", attention="efficient"),
    Case("gpt2-124m", attention="math"),
    Case("gpt2-124m", float8=True),
)
TINY_CASES = (
    Case("gpt2-tiny", compile=False, rounds=2, seconds=220, goal_mfu=0.55),
    Case(
        "llama-tiny",
        compile=False,
        attention="math",
        checkpointing="full",
        loss="usual",
        rounds=1,
        seconds=220,
    ),
    Case("llama-tiny", compile=False, documents=True, rank=4, base="int8", rounds=1, seconds=220),
)

# tok/s of one GPU, MFU as published or None, where from, and what is different
PUBLISHED: dict[str, tuple[float, float | None, str]] = {
    "gpt2-1.5b": (
        46_800,
        None,
        "llm.c, github.com/karpathy/llm.c scripts/run_gpt2_1558M.sh: 2.80 s an update of 1,048,576 tokens "
        "on 8 H100, so with their communication",
    ),
    "gpt2-124m": (
        524_000,
        0.46,
        "nanochat's d12 on one Hopper GPU, github.com/karpathy/nanochat dev/LOG.md: another model",
    ),
    "llama-1b": (
        42_000,
        None,
        "Hugging Face, Smol Training Playbook: Llama 1B in nanotron, a GPU of 8 H100, so with their "
        "communication",
    ),
}


def flops_of(case: Case, model: Model) -> float:
    """Of a token; of one with adapters as of the whole model. In a row with several samples attention is
    within each."""
    if model.llama is None or not case.documents:
        return model.num_flops_per_token()
    lengths = document_lengths(model.batch * model.seq_len, model.seq_len)
    seen = sum(length**2 for length in lengths) / sum(lengths)
    return Dense(model.llama).flops_per_token(round(seen))


def document_lengths(num_tokens: int, longest: int) -> list[int]:
    """Of samples that fill a row of `num_tokens`: log-normal, a seventh of `longest` in the median, the
    same in each run; the last takes what is left."""
    draw, lengths = random.Random(0), list[int]()
    while (left := num_tokens - sum(lengths)) > 0:
        length = round(longest / 7 * draw.lognormvariate(0, 0.8))
        lengths.append(min(left, longest, max(1, length)))
    return lengths


def filled_ratio(model: Model) -> float:
    """Share of tokens that are a sample's, where each such sample has a row of its own."""
    lengths = document_lengths(model.batch * model.seq_len, model.seq_len)
    return sum(lengths) / (len(lengths) * model.seq_len)


def gpu_of(name: str) -> tuple[str, Gpu] | None:
    """The catalogue's line for a device as torch names it ("NVIDIA H100 80GB HBM3"). A PCIe or NVL H100 has
    other peaks and is not there."""
    for words, entry in (("H200", "H200"), ("H100 80GB HBM3", "H100-80GB"), ("B200", "B200")):
        if words in name and "NVL" not in name:
            return entry, GPUS[entry]
    return None


def write_tokens(folder: Path, *, vocab_size: int, num_tokens: int) -> Path:
    """Token files of numbers drawn by Zipf's law, as words are: random, but not uniformly so."""
    folder.mkdir(parents=True)
    ranks = np.arange(1, vocab_size + 1)
    share = 1 / ranks / (1 / ranks).sum()
    dtype = np.uint16 if vocab_size <= 2**16 else np.uint32
    drawn = np.searchsorted(share.cumsum(), np.random.default_rng(0).random(num_tokens))
    data = np.minimum(drawn, vocab_size - 1).astype(dtype).tobytes()
    (folder / "train.bin").write_bytes(data)
    split = {
        "file": "train.bin",
        "num_tokens": num_tokens,
        "num_bytes": num_tokens,
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    manifest = {
        "format": 1,
        "dtype": np.dtype(dtype).name,
        "vocab_size": vocab_size,
        "tokenizer": None,
        "splits": {"train": split},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def predicted_bytes(case: Case, model: Model, micro_batch: int, device: str) -> int | None:
    """None: nobody knows, since the planner knows the presets alone."""
    if model.llama is None:
        return None
    shape = without(Dense(model.llama), None, case.adapter)
    assert shape is not None
    accumulation = model.batch // micro_batch
    step = StepShape(
        model.seq_len,
        micro_batch,
        accumulation,
        "bf16",
        case.checkpointing,
        compiled=case.compile,
        float8=case.float8,
    )
    work = RankWork(
        shape.parameters,
        shape.activations(step, device),
        step,
        Layout(Mesh()),
        OptimizerCost(8, "adamw"),
        overlap=device == "cuda",
    )
    return memory.estimate(work, device).total


def plan_of(
    case: Case,
    model: Model,
    folder: Path,
    *,
    device: str,
    memory_bytes: int,
    peak: float | None,
    peak_name: str,
) -> Plan:
    """Of a training that never saves, in bf16 on one device of `memory_bytes`, in mlpipe's own loop."""
    tokens = folder / f"tokens-{model.fields['vocab_size']}"
    if not tokens.exists():
        size = (model.batch + 1) * model.seq_len * 40 + 1
        write_tokens(tokens, vocab_size=model.fields["vocab_size"], num_tokens=size)
    micro_batch = model.micro_batch_on(memory_bytes)
    accumulation = model.batch // micro_batch
    needed = predicted_bytes(case, model, micro_batch, device)
    predicted = None if needed is None else Prediction(needed, 0.0, 1.0, 1.0)
    more = {}
    if case.documents:
        more["documents"] = document_lengths(micro_batch * model.seq_len, model.seq_len)
    train = TrainPlan(
        model=ModelPlan(
            build=Entry(
                "benchmarks.gpu.models:build",
                {"architecture": model.architecture, **more, **model.fields},
            ),
            preset=None,
            seq_len=model.seq_len,
            blocks=(),
        ),
        data=DataPlan(tokens=str(tokens), dataset=None, digest=None),
        optimizer=OptimizerPlan(
            "adamw",
            entry=None,
            args={"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
            state_bytes_per_parameter=8,
            lr=3e-4,
            grad_clip=1.0,
            schedule="constant",
            warmup_steps=0,
            decay_steps=0,
            min_lr_ratio=0.1,
        ),
        checkpoint=CheckpointPlan(every_steps=NEVER, every_seconds=None, keep=1, asynchronous=True),
        steps=NEVER,
        global_batch=model.batch,
        micro_batch=micro_batch,
        accumulation=accumulation,
        strategy="single",
        mesh=Mesh(),
        reason="one device",
        precision="bf16",
        activation_checkpointing=case.checkpointing,  # type: ignore[arg-type]
        compile="block" if case.compile else "off",
        deterministic=False,
        seed=1,
        hang_timeout_seconds=600.0,
        num_flops_per_token=flops_of(case, model),
        peak_flops=peak,
        peak_name=peak_name,
        resume=False,
        predicted=predicted,
        adapter=case.adapter,
        float8=case.float8,
    )
    return Plan(
        schema_version=SCHEMA_VERSION,
        run_id=case.name.replace(", ", "-").replace(" ", "-").replace(".", "-"),
        pipeline="benchmarks-gpu",
        stage="train",
        attempt=1,
        store_url=str(folder / "store"),
        spec_digest="0" * 64,
        code_digest="0" * 64,
        launch=Launch(
            num_nodes=1,
            nproc_per_node=1,
            max_restarts=0,
            device=device,  # type: ignore[arg-type]
            argv=("-m", "benchmarks.gpu.worker"),
            env={},
            timeout_seconds=None,
            shutdown_seconds=10.0,
            metrics_port=None,
        ),
        work=train,
    )
