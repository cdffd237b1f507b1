"""torchtune's recipe full_finetune_distributed under torchrun, on conversations, of which the assistant's
part is learnt.

The recipe as it comes; but its looks at the memory of a GPU would end it on a CPU, so there are none here. It
has no DDP: FSDP2 instead, in `same` without resharding behind the forward pass. torchtune 0.6.1 knows no chat
template: tokenizer and data set are components of this file, which its configuration names.

same: its greedy packing to rows of as many tokens as mlpipe's, one in a pass, as many of them a step
(gradient_accumulation_steps) as `work.batch`; constant learning rate. default: batch, accumulation, loss and
packing of its llama3_2/1B_full.yaml (4 samples a rank in a pass, padded, 8 passes a step), in fp32, since it
allows bf16 on GPUs alone.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torchtune
from omegaconf import OmegaConf
from torchtune import training
from torchtune.data import padded_collate_sft
from torchtune.datasets import PackedDataset
from torchtune.models.llama3 import llama3
from transformers import AutoTokenizer

from benchmarks.peers.work import Turns, Work, read_work

IGNORED = -100
HERE = "benchmarks.peers.torchtune_sft"


class Templated:
    """A sample's tokens by the model's chat template, and which of them are targets."""

    def __init__(self, path: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.pad_id = self.tokenizer.pad_token_id

    def __call__(self, sample: dict[str, Any]) -> dict[str, list[int]]:
        found = self.tokenizer.apply_chat_template(
            sample["messages"], return_dict=True, return_assistant_tokens_mask=True
        )
        tokens, learnt = found["input_ids"], found["assistant_masks"]
        labels = [token if on else IGNORED for token, on in zip(tokens, learnt, strict=True)]
        return {"tokens": tokens, "labels": labels}


def conversations(tokenizer: Templated, path: str, max_seq_len: int, packed: bool = False) -> Any:
    samples = [tokenizer(json.loads(line)) for line in Path(path).read_text().splitlines()]
    if not packed:
        return samples
    return PackedDataset(samples, max_seq_len=max_seq_len, padding_idx=tokenizer.pad_id)


def model(config: str) -> torch.nn.Module:
    """Of a folder of Hugging Face's layout."""
    told = json.loads(Path(config).read_text())
    return llama3(
        vocab_size=told["vocab_size"],
        num_layers=told["num_hidden_layers"],
        num_heads=told["num_attention_heads"],
        num_kv_heads=told["num_key_value_heads"],
        embed_dim=told["hidden_size"],
        max_seq_len=told["max_position_embeddings"],
        intermediate_dim=told["intermediate_size"],
        norm_eps=told["rms_norm_eps"],
        rope_base=told["rope_parameters"]["rope_theta"],
    )


def configuration(work: Work) -> Any:
    base, output = Path(work.tokens) / "base", tempfile.mkdtemp()
    same = work.settings == "same"
    dataset = {"path": str(Path(work.tokens) / "train.jsonl"), "max_seq_len": work.model["seq_len"]}
    told = {
        "output_dir": output,
        "tokenizer": {"_component_": f"{HERE}.Templated", "path": str(base)},
        "dataset": {"_component_": f"{HERE}.conversations", "packed": same, **dataset},
        "seed": work.seed,
        "shuffle": True,
        "model": {"_component_": f"{HERE}.model", "config": str(base / "config.json")},
        "checkpointer": {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": str(base),
            "checkpoint_files": ["model.safetensors"],
            "output_dir": output,
            "model_type": "LLAMA3_2",
        },
        "resume_from_checkpoint": False,
        "batch_size": 1 if same else 4,
        "gradient_accumulation_steps": work.batch if same else 8,
        "epochs": 1000,
        "max_steps_per_epoch": None,
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": work.lr, "fused": True},
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
        "clip_grad_norm": work.grad_clip if same else None,
        "device": "cpu",
        "dtype": "fp32",
        "compile": False,
        "fsdp_reshard_after_forward": not same,
        "metric_logger": {
            "_component_": "torchtune.training.metric_logging.DiskLogger",
            "log_dir": f"{output}/logs",
        },
    }
    if same:
        told["optimizer"] |= {"betas": [0.9, 0.95], "weight_decay": 0.0}
    return OmegaConf.create(told)


class InTurns:
    """The recipe's loader, whose batches come when it is this side's turn."""

    def __init__(self, recipe: Any, work: Work, held_out: list[dict[str, list[int]]]) -> None:
        self.recipe, self.held_out, self.loader = recipe, held_out, recipe._dataloader
        self.passes = recipe._gradient_accumulation_steps
        self.targets, self.num_held_out = 0, 0
        self.turns = Turns(work.socket, work.side, recipe.rank, self.validate, self.counted)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Any:
        for number, batch in enumerate(self.loader):
            if number % self.passes == 0:
                self.turns.before_step()
            self.targets += int((batch["labels"][:, 1:] != IGNORED).sum())
            yield batch

    def counted(self) -> dict[str, int]:
        count, self.targets = self.targets, 0
        return {"targets": count, "held_out": self.num_held_out}

    @torch.no_grad()
    def validate(self) -> float:
        """The mean over all targets of the held-out conversations, a sample at a time."""
        loss_sum, count = 0.0, 0
        for sample in self.held_out:
            batch = padded_collate_sft([sample])
            logits = torch.cat(self.recipe._model(batch["tokens"]), dim=1)[:, :-1].float()
            labels = batch["labels"][:, 1:]
            loss_sum += float(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"))
            count += int((labels != IGNORED).sum())
        self.num_held_out = count
        return loss_sum / count


def recipe_class() -> Any:
    """Of a file, as `tune run` has it: the folder says that it is no package."""
    path = Path(torchtune.__file__).parents[1] / "recipes" / "full_finetune_distributed.py"
    spec = importlib.util.spec_from_file_location("full_finetune_distributed", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.FullFinetuneRecipeDistributed


def main() -> None:
    work = read_work()
    for of_gpus in ("get_memory_stats", "log_memory_stats", "cleanup_before_training"):
        setattr(training, of_gpus, lambda *_, **__: {})
    told = configuration(work)
    recipe = recipe_class()(cfg=told)
    recipe.setup(cfg=told)
    folder = Path(work.tokens)
    samples = conversations(recipe._tokenizer, str(folder / "held-out.jsonl"), work.model["seq_len"])
    recipe._dataloader = InTurns(recipe, work, samples)
    recipe.train()


if __name__ == "__main__":
    main()
