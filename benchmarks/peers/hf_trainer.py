"""Hugging Face's Trainer under torchrun.

Its own defaults: fused AdamW, clipping at 1. tuned: bf16 and `use_cpu`, several processes by DDP
(https://huggingface.co/docs/transformers/perf_train_cpu; it takes Intel's MPI, here it is gloo as for all),
and torch_compile with inductor, which https://huggingface.co/docs/transformers/torch_compile finds right for
most trainings; the mode "reduce-overhead" of its example is CUDA graphs.
"""

from __future__ import annotations

import tempfile

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from benchmarks.peers.work import Work, read_work, turns, usual_loss


class WithLoss(nn.Module):
    """The form in which Trainer takes a model that is not its own."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.gpt = work.build()

    def forward(self, inputs, targets=None):
        logits = self.gpt(inputs)
        return logits if targets is None else {"loss": usual_loss(logits, targets)}


class InTurns(TrainerCallback):
    def __init__(self, work: Work) -> None:
        self.work = work
        self.waiting = None

    def on_step_begin(self, args, state, control, model=None, **kwargs) -> None:
        if self.waiting is None:

            def forward(inputs):
                with torch.autocast("cpu", torch.bfloat16, enabled=self.work.bf16):
                    return model(inputs)

            self.waiting = turns(self.work, args.process_index, args.world_size, forward)
        self.waiting.before_step()


def main() -> None:
    work = read_work()
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        ddp_backend="gloo",
        per_device_train_batch_size=work.batch,
        max_steps=1_000_000,
        learning_rate=work.lr,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        max_grad_norm=work.grad_clip,
        train_sampling_strategy="sequential",
        bf16=work.bf16,
        torch_compile=work.compiled,
        # of a model that is not its own Trainer would look for unused parameters, in "default" too
        ddp_find_unused_parameters=False,
        ddp_broadcast_buffers=None if work.settings == "default" else False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    Trainer(WithLoss(work), arguments, train_dataset=work.dataset(), callbacks=[InTurns(work)]).train()


if __name__ == "__main__":
    main()
