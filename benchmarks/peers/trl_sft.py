"""TRL's SFTTrainer under torchrun, on conversations, of which the assistant's part is learnt.

same: packing (its default strategy `bfd`) to rows of as many tokens as mlpipe's, which it lays behind each
other in one without padding; so a row at a time, since attention of a CPU computes all pairs of what it gets,
and as many of them a step (gradient_accumulation_steps) as `work.batch`; no recomputation. default: SFTConfig
as it comes, but for what says which tokens are targets (assistant_only_loss): 8 samples a device, padded,
recomputed, in bf16.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from datasets import Dataset
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

from benchmarks.peers.work import Turns, Work, read_work


class CountingTrainer(SFTTrainer):
    """And how many targets were learnt on this rank."""

    targets = 0

    def compute_loss(self, model, inputs, *args, **kwargs):
        self.targets += int((inputs["labels"][:, 1:] != -100).sum())
        return super().compute_loss(model, inputs, *args, **kwargs)


class InTurns(TrainerCallback):
    def __init__(self, work: Work) -> None:
        self.work = work
        self.waiting = self.trainer = None
        self.held_out = 0

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        if self.waiting is None:
            self.waiting = Turns(
                self.work.socket, self.work.side, args.process_index, self.validate, self.counted
            )
        self.waiting.before_step()

    def counted(self) -> dict[str, int]:
        count, self.trainer.targets = self.trainer.targets, 0
        return {"targets": count, "held_out": self.held_out}

    @torch.no_grad()
    def validate(self) -> float:
        """The mean over all targets of the held-out conversations, a sample at a time."""
        trainer = self.trainer
        trainer.model.eval()
        loss_sum, count = 0.0, 0
        for sample in trainer.eval_dataset:
            inputs = trainer.data_collator([sample])
            labels = inputs.pop("labels")[:, 1:]
            with trainer.compute_loss_context_manager():
                logits = trainer.model(**inputs).logits[:, :-1].float()
            loss_sum += float(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"))
            count += int((labels != -100).sum())
        trainer.model.train()
        self.held_out = count
        return loss_sum / count


def read(path: Path) -> Dataset:
    return Dataset.from_list([json.loads(line) for line in path.read_text().splitlines()])


def main() -> None:
    work = read_work()
    folder = Path(work.tokens)
    mine = {}
    if work.settings == "same":
        mine = {
            "packing": True,
            "eval_packing": True,
            "max_length": work.model["seq_len"],
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": work.batch,
            "gradient_checkpointing": False,
            "bf16": False,
            "ddp_find_unused_parameters": False,
            "ddp_broadcast_buffers": False,
        }
    arguments = SFTConfig(
        output_dir=tempfile.mkdtemp(),
        assistant_only_loss=True,
        use_cpu=True,
        ddp_backend="gloo",
        max_steps=1_000_000,
        learning_rate=work.lr,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=work.grad_clip,
        seed=work.seed,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **mine,
    )
    turns = InTurns(work)
    trainer = CountingTrainer(
        model=str(folder / "base"),
        args=arguments,
        train_dataset=read(folder / "train.jsonl"),
        eval_dataset=read(folder / "held-out.jsonl"),
        callbacks=[turns],
    )
    turns.trainer = trainer
    trainer.train()


if __name__ == "__main__":
    main()
