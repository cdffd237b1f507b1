"""Chat templates of models: Jinja, in a sandbox, with what `transformers` offers them.

A model's folder is somebody else's, and so is its template: it runs sandboxed, on plain JSON, with neither
files nor attributes of Python's objects.
"""

from __future__ import annotations

import json
import re
import secrets
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mlpipe._core.errors import TrainError
from mlpipe.train.data.chat.jsonl import BadLine

Messages = list[dict[str, Any]]
Span = tuple[int, int]  # of characters
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}"
    "{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MAX_TURNS = 1000  # of an assistant, where the template is rendered for each
# what no text contains: they stand around what is generated until its place is known
_BEGIN, _END = (f"\0{secrets.token_hex(8)}{sign}\0" for sign in "<>")
_SIGNS = re.compile(f"{_BEGIN}|{_END}")


class Template:
    """`special`: tokens by the names that templates know (`bos_token`, ...). `where`: for messages. Raises
    TrainError (input) for what is no template."""

    def __init__(self, source: str, special: dict[str, str], where: str) -> None:
        self.marks = _MARKED.search(source) is not None
        self.special = special
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now}
        try:
            self._template = environment.from_string(source)
        except Exception as error:  # also of Python's compiler, which takes twenty nested blocks at the most
            raise TrainError(
                f"this is no chat template: {_words(error)}",
                where=where,
                hint="write the Jinja of a model's chat_template, or template: chatml",
                kind="input",
            ) from error

    def spoken(self, messages: Messages, tools: Any = None, first: int = 0) -> tuple[str, list[Span]]:
        """The conversation as the model sees it, and the parts of it that the assistant says in the messages
        from number `first` on: those that the template marks as generated; where it marks none, for each
        answer what it adds to a prompt for one, as TRL has it. Raises BadLine."""
        if self.marks:
            text, spans = self.render(messages, tools)
            if first:
                spans = spans[len(self.render(messages[:first], tools)[1]) :]
            return text, spans
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i >= first]
        if len(answers) > _MAX_TURNS:
            raise BadLine(f"{len(answers)} answers of the assistant are more than {_MAX_TURNS}")
        text, _ = self.render(messages, tools)
        return text, [self._span(text, messages, number, tools) for number in answers]

    def _span(self, text: str, messages: Messages, number: int, tools: Any) -> Span:
        """Of an answer in the `text` of the whole conversation."""
        prompt, _ = self.render(messages[:number], tools, prompt=True)
        answered, _ = self.render(messages[: number + 1], tools)
        if text.startswith(prompt):
            if text.startswith(answered) and len(answered) > len(prompt):
                return len(prompt), len(answered)
            # of an answer that is not the last some templates leave the reasoning away
            content = (messages[number].get("content") or "").strip()
            at, last = text.find(content, len(prompt)), answered.rfind(content)
            end = answered[last + len(content) :]
            if content and at >= 0 and last >= 0 and text.startswith(end, at + len(content)):
                return len(prompt), at + len(content) + len(end)
        raise BadLine(
            f"the template writes message {number + 1} in another way when more follow, so nobody knows "
            "which part the assistant says: give each answer its own line, or mark what is generated in the "
            "template, {% generation %}"
        )

    def render(
        self, messages: Messages, tools: Any = None, *, prompt: bool = False
    ) -> tuple[str, list[Span]]:
        """And what is marked as generated in it. `prompt`: and the beginning of an answer. Raises BadLine."""
        try:
            marked = self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=prompt,
                **self.special,
            )
        except RecursionError:
            raise BadLine("the chat template does not end") from None
        except Exception as error:  # a template may fail in any way
            raise BadLine(f"the chat template refuses it: {_words(error)}") from None
        if _BEGIN not in marked:
            return marked, []
        return _without_signs(marked)


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__


def _without_signs(marked: str) -> tuple[str, list[Span]]:
    pieces, begins, spans, length, last = [], [], [], 0, 0
    for sign in _SIGNS.finditer(marked):
        pieces.append(marked[last : sign.start()])
        length += len(pieces[-1])
        last = sign.end()
        if sign.group() == _BEGIN:
            begins.append(length)
        elif begins:
            spans.append((begins.pop(), length))
    return "".join([*pieces, marked[last:]]), spans


class _Generation(Extension):
    """The block `{% generation %}`: what stands in it is the assistant's."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_signed"), [], [], body).set_lineno(line)

    def _signed(self, caller: Any) -> str:
        return f"{_BEGIN}{caller()}{_END}"


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None) -> str:
    """Without Jinja's escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    """Always of the day that Llama's template has where nobody tells it the date: a file gives the same
    tokens on every day and every node."""
    return datetime(2024, 7, 26).strftime(form)
