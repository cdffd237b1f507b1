"""Hugging Face's Trainer under torchrun."""

import sys
from importlib import import_module

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Trainer, TrainingArguments

work, folder = import_module(f"benchmarks.validated.{sys.argv[1]}"), sys.argv[2]
steps, every = int(sys.argv[3]), int(sys.argv[4])


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = work.build()

    def forward(self, inputs, targets):
        logits = self.model(inputs)
        return {"loss": F.cross_entropy(logits.flatten(0, -2), targets.flatten()), "logits": logits}


def accuracy(found):
    predicted, targets = torch.tensor(found.predictions), torch.tensor(found.label_ids)
    return {"accuracy": (predicted == targets).float().mean().item()}


arguments = TrainingArguments(
    output_dir=folder, use_cpu=True, ddp_backend="gloo", per_device_train_batch_size=work.BATCH // 2,
    per_device_eval_batch_size=work.BATCH // 2, max_steps=steps, learning_rate=work.LR,
    lr_scheduler_type="constant", eval_strategy="steps", eval_steps=every, save_strategy="steps",
    save_steps=every, metric_for_best_model="accuracy", report_to="tensorboard", logging_steps=1,
    label_names=["targets"], remove_unused_columns=False, ddp_find_unused_parameters=False, disable_tqdm=True,
)  # fmt: skip
Trainer(
    WithLoss(), arguments, train_dataset=work.samples("train"), eval_dataset=work.samples("validation"),
    compute_metrics=accuracy, preprocess_logits_for_metrics=lambda logits, _: logits.argmax(-1),
).train()  # fmt: skip
