"""Sizes of buckets and chunks: the trainer works in them and the planner counts with them. Standard library
only, and imports nothing: it is on the path of every worker."""

DDP_BUCKET_BYTES = 25 * 2**20  # gradients that travel together; DistributedDataParallel's default
GATHER_BUCKET_BYTES = 64 * 2**20  # updated slices that are gathered together where optimizer states are split
# fp32 logits that the loss works on at a time: what a core's cache holds (measured: 3.9 x plain's speed in
# bf16), or half a GiB
LOSS_CHUNK_ELEMENTS = {"cpu": 2**18, "cuda": 2**27}
# the same where the head's product is among it, which wants many rows
HEAD_CHUNK_ELEMENTS = {"cpu": 2**21, "cuda": 2**27}
