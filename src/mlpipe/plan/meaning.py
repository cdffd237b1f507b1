"""What a training is about: the settings that decide which function it learns, from which samples. Whoever
goes on with a checkpoint under others goes on with something else.

Free are all that decide how it is computed (strategy, workers, precision, microbatch, ...) and how far and
fast it learns (steps, batch, the optimizer's figures).
"""

from __future__ import annotations

from typing import Any

from mlpipe.kinds.train.spec import OwnModel, PretrainedModel, Train
from mlpipe.plan.data import DataPlan, SourcePlan
from mlpipe.plan.model import ModelPlan
from mlpipe.spec.data import (
    BUCKET,
    ChatData,
    MixData,
    OwnData,
    OwnSource,
    Source,
    TokenData,
    TokenSource,
)

_FREE = {"max_seq_len"}  # of a preset: a bound on seq_len, which is compared itself


def meaning(spec: Train, model: ModelPlan, data: DataPlan, revision: str | None = None) -> dict[str, Any]:
    """By key as in the file, below the stage. Arguments as they were written: where a placeholder leads is
    another place on each machine. `data.tokens`: the digest; None before they exist. `revision`: of open
    weights, where their folder tells it."""
    settings: dict[str, Any] = {"seed": spec.seed, "model.seq_len": model.seq_len}
    if isinstance(spec.model, OwnModel):
        settings["model.entry"] = spec.model.entry
        settings |= {f"model.args.{name}": value for name, value in spec.model.args.items()}
    else:
        settings |= {f"model.{name}": value for name, value in model.build.args.items() if name not in _FREE}
    if isinstance(spec.model, PretrainedModel):
        settings["model.pretrained"] = spec.model.pretrained
        if revision is not None and revision not in spec.model.pretrained:
            settings["model.revision"] = revision
    if isinstance(spec.data, ChatData):
        mixed = {} if isinstance(spec.data.chat, str) else dict(enumerate(spec.data.chat))
        for number, one in mixed.items():
            settings |= {f"data.chat.{number}.path": one.path, f"data.chat.{number}.weight": one.weight}
        chat = None if mixed else spec.data.chat
        told = {"chat": chat, "tokenizer": spec.data.tokenizer, "template": spec.data.template}
        settings |= {f"data.{name}": value for name, value in told.items() if value is not None}
    elif isinstance(spec.data, MixData):
        for number, (source, planned) in enumerate(zip(spec.data.mix, data.sources, strict=True)):
            settings[f"data.mix.{number}.weight"] = source.weight
            settings |= _source(f"data.mix.{number}", source, planned)
    else:
        settings |= _source("data", spec.data, data.sources[0])
    if data.splits != 1:
        settings["data.splits"] = data.splits
    if data.collate is not None:
        settings["data.collate"] = data.collate
    if spec.init_from is not None:
        asked = spec.init_from.model_dump(mode="json", exclude_none=True)
        settings |= {f"init_from.{name}": value for name, value in asked.items()}
    if spec.adapter is not None:
        asked = spec.adapter.lora.model_dump(mode="json")
        # a key that is younger than the others, and not told of where it says nothing
        told = {key: value for key, value in asked.items() if key != "dora" or value}
        settings |= {f"adapter.lora.{key}": value for key, value in told.items()}
        if spec.adapter.base is not None:
            settings["adapter.base"] = spec.adapter.base
    if spec.freeze is not None:
        settings["freeze"] = list(spec.freeze)
    return settings


def _source(key: str, source: Source, planned: SourcePlan) -> dict[str, Any]:
    if isinstance(source, TokenData | TokenSource):
        in_bucket = planned.tokens if (planned.tokens or "").startswith(BUCKET) else None
        return {f"{key}.tokens": in_bucket or planned.digest}
    if not isinstance(source, OwnData | OwnSource):
        columns = {f"{key}.columns.{name}": column for name, column in (source.columns or {}).items()}
        tokenizer = {} if source.tokenizer is None else {f"{key}.tokenizer": source.tokenizer}
        return {f"{key}.{source.format}": source.path, **columns, **tokenizer}
    arguments = {f"{key}.args.{name}": value for name, value in source.args.items()}
    return {f"{key}.entry": source.entry, **arguments}
