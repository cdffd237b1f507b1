"""Conversations of very different lengths, and a tokenizer that reads them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Literal

from mlpipe.plan.data import ChatFile, ChatPlan, DataPlan
from mlpipe.train.data.tokenizer import MIN_VOCAB_SIZE, train_tokenizer

SEQ_LEN = 96


def write_chat(folder: Path, num: int = 24) -> DataPlan:
    """Conversations of 10 to 200 bytes, a few longer than SEQ_LEN tokens."""
    draw = random.Random(1)
    folder.mkdir(parents=True, exist_ok=True)
    train_tokenizer([], MIN_VOCAB_SIZE).save(str(folder / "tokenizer.json"))
    for name in ("train", "validation"):
        lines = []
        for _ in range(num):
            said = "".join(draw.choice("ab ") for _ in range(draw.choice((2, 5, 10, 20, 60, 150))))
            lines.append({"prompt": draw.choice("xyz") * draw.randint(1, 9), "completion": said})
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    chat = ChatPlan(str(folder / "train.jsonl"), str(folder / "validation.jsonl"), str(folder))
    return DataPlan(None, None, None, chat=chat)


def mixed(data: DataPlan) -> DataPlan:
    """Two samples of the training's file to one of the held-out ones."""
    chat = data.chat
    assert chat is not None
    assert chat.path is not None
    assert chat.validation is not None
    mix = (ChatFile(chat.path, 2.0), ChatFile(chat.validation, 1.0))
    return data._replace(chat=chat._replace(path=None, mix=mix))


def packed(data: DataPlan, packing: Literal["best_fit", "balanced"]) -> DataPlan:
    assert data.chat is not None
    return data._replace(chat=data.chat._replace(packing=packing))
