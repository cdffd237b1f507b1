"""What a plan.json of an earlier mlpipe means in today's fields, where a default alone would not say it."""

from __future__ import annotations

from typing import Any

# Until the flags were fields of the plan, the trainer read them off the strategy's name.
_FLAGS_BY_NAME = {"zero1": {"shard_optimizer": True}, "zero2": {"reshard_after_forward": False}}


def of_this_version(document: Any) -> Any:
    """`document`: a plan as JSON, of any version; what does not look like one is left to the reader."""
    if not isinstance(document, dict):
        return document
    if isinstance(evaluate := document.get("evaluate"), dict):
        document = {**document, "evaluate": _with_arguments(_with_flags(evaluate))}
    return _with_arguments(_with_flags(document))


def _with_flags(holder: dict[str, Any]) -> dict[str, Any]:
    """`holder`: what has a training under `train`."""
    train = holder.get("train")
    if not isinstance(train, dict) or "shard_optimizer" in train:
        return holder
    train = {**train, **_FLAGS_BY_NAME.get(str(train.get("strategy")), {})}
    sharded = isinstance(mesh := train.get("mesh"), dict) and mesh.get("dp_shard", 1) != 1
    if train.get("compile") == "model" and (sharded or train.get("activation_checkpointing") != "none"):
        train["compile"] = "block"  # as the trainer did
    return {**holder, "train": train}


def _with_arguments(holder: dict[str, Any]) -> dict[str, Any]:
    """Until there was a choice of optimizers, AdamW's arguments stood beside those that all have."""
    train = holder.get("train")
    if not isinstance(train, dict):
        return holder
    optimizer = train.get("optimizer")
    if not isinstance(optimizer, dict) or "args" in optimizer:
        return holder
    own = ("betas", "eps", "weight_decay")
    common = {key: value for key, value in optimizer.items() if key not in own}
    args = {key: optimizer[key] for key in own if key in optimizer}
    added = {"entry": None, "args": args, "state_bytes_per_parameter": 8}
    return {**holder, "train": {**train, "optimizer": {**common, **added}}}
