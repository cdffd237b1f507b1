"""Hugging Face Accelerate under torchrun, by its quick tour.

tuned: bf16, which its guide to CPUs turns on (https://huggingface.co/docs/accelerate/usage_guides/intel_cpu),
gradients as views of DDP's buckets, and regional compilation, with the guide's `mode` and `dynamic`
(https://huggingface.co/docs/accelerate/usage_guides/compilation: about as fast as compiling the whole, and
the practical choice for training).
"""

from __future__ import annotations

from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, TorchDynamoPlugin
from torch.utils.data import DataLoader

from benchmarks.peers.work import read_work, turns, usual_loss


def main() -> None:
    work = read_work()
    more = {}
    if work.settings != "default":
        quick = DistributedDataParallelKwargs(gradient_as_bucket_view=True, broadcast_buffers=False)
        more["kwargs_handlers"] = [quick]
    if work.compiled:
        more["dynamo_plugin"] = TorchDynamoPlugin(
            backend="inductor", mode="default", dynamic=False, use_regional_compilation=True
        )
    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if work.bf16 else "no", **more)
    model = work.build()
    optimizer = work.adamw(model.parameters())
    batches = DataLoader(work.dataset(), batch_size=work.batch)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    waiting = turns(work, accelerator.process_index, accelerator.num_processes, model)
    for batch in batches:
        waiting.before_step()
        loss = usual_loss(model(batch["inputs"]), batch["targets"])
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), work.grad_clip)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
