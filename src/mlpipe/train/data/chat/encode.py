"""From what a line says to token ids, and which of them are learnt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlpipe._core.errors import TrainError
from mlpipe.plan.data import ChatPlan
from mlpipe.store.open import open_store
from mlpipe.train.data.chat.jsonl import BadLine, kind_of
from mlpipe.train.data.chat.template import CHATML, Messages, Span, Template
from mlpipe.train.data.tokenizer import END_OF_TEXT, load_tokenizer, tokenizer_file
from mlpipe.train.data.tokens import BUCKET

_KINDS = "'messages', 'prompt' and 'completion', or 'text'"


@dataclass(frozen=True)
class Sample:
    """Tokens of one line. `learnt`: which of them the model is to give; the others are only read."""

    ids: NDArray[np.uint32]
    learnt: NDArray[np.bool_]


@dataclass(frozen=True)
class _Spoken:
    """Before it is tokens. `spans`: of the text, what is learnt. `whole`: it is the text of a template, which
    has its special tokens already; else the tokenizer adds its own."""

    text: str
    spans: list[Span]
    whole: bool


class Encoder:
    """With the tokenizer and the template of the plan. Raises TrainError (input) for what is neither."""

    def __init__(self, plan: ChatPlan) -> None:
        path = tokenizer_file(plan.tokenizer)
        self.tokenizer = load_tokenizer(path)
        # a folder may say how long texts are to be cut or padded, which is ours to do
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        folder = path.rpartition("/")[0] or "."
        config = _config(folder)
        special = {
            name: token for name in config if name.endswith("_token") and (token := _token(config[name]))
        }
        self.end = special.get("eos_token") or END_OF_TEXT
        self.end_id = self.tokenizer.token_to_id(self.end)
        source, where = _template(plan, folder, config)
        self.template = Template(source, special, where) if source is not None else None
        self.where = where
        # of all that decides which tokens a line gives
        self.identity = json.dumps([self.tokenizer.to_str(), source, special, self.end])
        # not how many tokens there are: their ids may have gaps
        self.vocab_size = max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=0) + 1

    def spoken(self, line: dict[str, Any]) -> _Spoken:
        """Raises BadLine."""
        if "messages" in line:
            return self._conversation(_messages(line["messages"], "messages"), line.get("tools"))
        if "prompt" in line and "completion" in line:
            prompt, completion = line["prompt"], line["completion"]
            if isinstance(prompt, list) or isinstance(completion, list):
                asked = _messages(prompt, "prompt")
                messages = asked + _messages(completion, "completion")
                return self._conversation(messages, line.get("tools"), first=len(asked))
            text = _text(prompt, "prompt") + _text(completion, "completion")
            return _Spoken(text, [(len(prompt), len(text))], whole=False)
        if "text" in line:
            text = _text(line["text"], "text")
            return _Spoken(text, [(0, len(text))], whole=False)
        keys = ", ".join(map(repr, list(line)[:5])) or "nothing"
        raise BadLine(f"expected {_KINDS}, got {keys}")

    def encode(self, spoken: Sequence[_Spoken]) -> list[Sample | BadLine]:
        """Of several lines at once, by all cores."""
        samples: list[Sample | BadLine] = [BadLine("")] * len(spoken)
        for whole in (True, False):
            chosen = [i for i, one in enumerate(spoken) if one.whole is whole]
            texts = [spoken[i].text for i in chosen]
            encodings = self.tokenizer.encode_batch(texts, add_special_tokens=not whole) if texts else []
            for i, encoding in zip(chosen, encodings, strict=True):
                samples[i] = self._sample(spoken[i], encoding)
        return samples

    def _sample(self, spoken: _Spoken, encoding: Any) -> Sample | BadLine:
        ids = np.array(encoding.ids, dtype=np.uint32)
        begins, ends = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
        learnt = np.zeros(len(ids), dtype=np.bool_)
        for begin, end in spoken.spans:
            learnt |= (ends > begin) & (begins < end) & (ends > begins)
        if not spoken.whole and self.end_id is not None and (not len(ids) or ids[-1] != self.end_id):
            ids, learnt = np.append(ids, np.uint32(self.end_id)), np.append(learnt, True)
        if not learnt[1:].any():
            return BadLine("nothing in it is learnt: the assistant says nothing")
        return Sample(ids, learnt)

    def _conversation(self, messages: Messages, tools: Any, first: int = 0) -> _Spoken:
        if self.template is None:
            raise TrainError(
                "there are conversations, and the tokenizer has no chat template",
                where=self.where,
                hint="name one: data.template, a Jinja file or chatml",
                kind="input",
            )
        if not any(message["role"] == "assistant" for message in messages[first:]):
            raise BadLine("there is no message of the assistant")
        if tools is not None and not (
            isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
        ):
            raise BadLine(f"'tools' is {kind_of(tools)}, not a list of objects")
        text, spans = self.template.spoken(messages, tools, first)
        return _Spoken(_encodable(text), spans, whole=True)


def _messages(value: Any, key: str) -> Messages:
    if not isinstance(value, list):
        raise BadLine(f"'{key}' is {kind_of(value)}, not a list of messages")
    if not value:
        raise BadLine(f"'{key}' is empty")
    for number, message in enumerate(value, start=1):
        what = f"message {number} of '{key}'"
        if not isinstance(message, dict):
            raise BadLine(f"{what} is {kind_of(message)}, not an object with 'role' and 'content'")
        if not isinstance(message.get("role"), str):
            raise BadLine(f"{what} has no 'role'")
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            instead = f"{kind_of(content)}, not text" if "content" in message else "not there"
            raise BadLine(f"the 'content' of {what} is {instead}")
    return value


def _text(value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise BadLine(f"'{key}' is {kind_of(value)}, not text")
    return _encodable(value)


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadLine("half of a surrogate pair is no text") from None
    return text


def _beside(folder: str, name: str) -> str | None:
    """The text of a file in the folder of the tokenizer; None: there is none."""
    if folder.startswith(BUCKET):
        store = open_store(folder)
        return store.get(name).decode("utf-8", "replace") if store.exists(name) else None
    path = Path(folder, name)
    return path.read_text("utf-8", "replace") if path.is_file() else None


def _config(folder: str) -> dict[str, Any]:
    text = _beside(folder, "tokenizer_config.json")
    try:
        config = json.loads(text) if text is not None else {}
    except (ValueError, RecursionError) as error:
        config = error
    if isinstance(config, dict):
        return config
    raise TrainError(
        "this is no configuration of a tokenizer", where=f"{folder}/tokenizer_config.json", kind="input"
    )


def _token(value: Any) -> str | None:
    """Written as text, or as an object."""
    token = value.get("content") if isinstance(value, dict) else value
    return token if isinstance(token, str) and token else None


def _template(plan: ChatPlan, folder: str, config: dict[str, Any]) -> tuple[str | None, str]:
    """And where it was: the plan's, a file beside the tokenizer, or what its configuration says."""
    if plan.template == "chatml":
        return CHATML, "chatml"
    if plan.template is not None:
        base, _, name = plan.template.rpartition("/")
        text = _beside(base or ".", name)
        if text is None:
            raise TrainError("there is no template here", where=plan.template, kind="input")
        return text, plan.template
    if (text := _beside(folder, "chat_template.jinja")) is not None:
        return text, f"{folder}/chat_template.jinja"
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by their names
        named = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None, f"{folder}/tokenizer_config.json"
