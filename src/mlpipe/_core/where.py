"""The expressions of `mlpipe list --where`: comparisons of fields with values, joined by `and`, `or`, `not`
and parentheses, such as `state == done and train.lr < 1e-3`.

    expression  = conjunction ("or" conjunction)*
    conjunction = condition ("and" condition)*
    condition   = "not" condition | "(" expression ")" | FIELD operator VALUE
    operator    = "<" | "<=" | ">" | ">=" | "==" | "=" | "!="

A field is a path of names joined by dots. A value is a number, `true`, `false`, `null`, or a text, with
quotes unless it is one word; of a field that is a time a date or a moment, as ISO 8601 has them, of this
machine's clock unless it says otherwise. Nothing is executed. What is not there (null) is neither below nor
above anything, and equals only null.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from mlpipe._core.errors import SubmitError

Lookup = Callable[[str], Any]
MAX_LENGTH = 1000
_MAX_DEPTH = 50
_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
    "==": operator.eq, "=": operator.eq, "!=": operator.ne,
}  # fmt: skip
_TOKEN = re.compile(
    r"\s*(?:(?P<operator><=|>=|==|!=|<|>|=)|(?P<paren>[()])"
    r"|(?P<text>'[^']*'|\"[^\"]*\")|(?P<word>[^\s()<>=!'\"]+))"
)
_FIELD = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*", re.ASCII)
_NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_WORDS = {"true": True, "false": False, "null": None, "none": None}
_JOINING = ("and", "or", "not")


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    at: int  # of its first character in the expression


@dataclass(frozen=True)
class Where:
    """`fields`: those that it asks for, in order. `holds(lookup)`: whether it does, of one thing; `lookup` is
    asked for no more fields than decide."""

    fields: tuple[str, ...]
    holds: Callable[[Lookup], bool]


def parse(text: str, times: Collection[str] = ()) -> Where:
    """`times`: fields that are Unix seconds. Raises SubmitError (input) with the place of the first thing
    that cannot be understood."""
    return _Parser(text, times).whole()


class _Parser:
    def __init__(self, text: str, times: Collection[str]) -> None:
        self._text = text
        self._times = times
        self._next = 0
        self._depth = 0
        self._fields: list[str] = []
        if len(text) > MAX_LENGTH:
            raise SubmitError(f"the expression is longer than {MAX_LENGTH} characters", kind="input")
        self._tokens = list(self._split())

    def whole(self) -> Where:
        holds = self._any()
        if (token := self._peek()) is not None:
            raise self._odd(token, "`and`, `or` or the end")
        return Where(tuple(dict.fromkeys(self._fields)), holds)

    def _split(self) -> list[_Token]:
        tokens, at = [], 0
        while at < len(self._text.rstrip()):
            match = _TOKEN.match(self._text, at)
            if match is None or match.lastgroup is None:
                at += len(self._text[at:]) - len(self._text[at:].lstrip())
                quote = self._text[at] in "'\""
                raise self._bad(
                    at, "a quote that is not closed" if quote else f"{self._text[at]!r} means nothing"
                )
            tokens.append(_Token(match.lastgroup, match[match.lastgroup], match.start(match.lastgroup)))
            at = match.end()
        return tokens

    def _any(self) -> Callable[[Lookup], bool]:
        parts = [self._all()]
        while self._take("or"):
            parts.append(self._all())
        return parts[0] if len(parts) == 1 else lambda lookup: any(part(lookup) for part in parts)

    def _all(self) -> Callable[[Lookup], bool]:
        parts = [self._one()]
        while self._take("and"):
            parts.append(self._one())
        return parts[0] if len(parts) == 1 else lambda lookup: all(part(lookup) for part in parts)

    def _one(self) -> Callable[[Lookup], bool]:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._bad(0, f"more than {_MAX_DEPTH} parentheses and `not`s around each other")
        condition = self._condition()
        self._depth -= 1
        return condition

    def _condition(self) -> Callable[[Lookup], bool]:
        if self._take("not"):
            inner = self._one()
            return lambda lookup: not inner(lookup)
        if self._take("("):
            inner = self._any()
            if not self._take(")"):
                raise self._odd(self._peek(), "`)`")
            return inner
        return self._comparison()

    def _comparison(self) -> Callable[[Lookup], bool]:
        token = self._pop("a field, such as `state` or `train.lr`")
        if token.kind != "word" or token.text in _JOINING or not _FIELD.fullmatch(token.text):
            raise self._odd(token, "a field, such as `state` or `train.lr`")
        sign = self._pop("one of <, <=, >, >=, ==, !=")
        if sign.kind != "operator":
            raise self._odd(sign, "one of <, <=, >, >=, ==, !=")
        given = self._pop("a value")
        if given.kind not in ("word", "text") or (given.kind == "word" and given.text in _JOINING):
            raise self._odd(given, "a value")
        field, holds = token.text, _OPERATORS[sign.text]
        value = self._time(given) if field in self._times else _value(given)
        if sign.text[0] in "<>" and (value is None or isinstance(value, bool)):
            raise self._odd(given, f"a number or a text behind {sign.text}")
        self._fields.append(field)
        return lambda lookup: _compare(holds, lookup(field), value)

    def _time(self, given: _Token) -> Any:
        value = _value(given)
        if not isinstance(value, str):
            return value
        try:
            return datetime.fromisoformat(value).timestamp()
        except (ValueError, OverflowError, OSError):
            raise self._odd(given, "a time, such as 2026-11-23 or '2026-11-23 15:30',") from None

    def _peek(self) -> _Token | None:
        return self._tokens[self._next] if self._next < len(self._tokens) else None

    def _pop(self, wanted: str) -> _Token:
        token = self._peek()
        if token is None:
            raise self._odd(None, wanted)
        self._next += 1
        return token

    def _take(self, text: str) -> bool:
        token = self._peek()
        if token is None or token.kind not in ("word", "paren") or token.text != text:
            return False
        self._next += 1
        return True

    def _odd(self, token: _Token | None, wanted: str) -> SubmitError:
        if token is None:
            return self._bad(len(self._text), f"it ends where {wanted} should follow")
        return self._bad(token.at, f"{token.text!r} where {wanted} should stand")

    def _bad(self, at: int, words: str) -> SubmitError:
        return SubmitError(
            f"column {at + 1}: {words}\n  {self._text}\n  {' ' * at}^",
            where="--where",
            hint="write comparisons joined by and, or, not: state == done and train.lr < 1e-3",
            kind="input",
        )


def _value(token: _Token) -> Any:
    if token.kind == "text":
        return token.text[1:-1]
    if _NUMBER.fullmatch(token.text):
        return float(token.text)
    return _WORDS.get(token.text.lower(), token.text)


def _compare(holds: Callable[[Any, Any], bool], actual: Any, value: Any) -> bool:
    equality = holds in (operator.eq, operator.ne)
    if actual is None or value is None:
        return equality and holds(actual, value)
    if isinstance(actual, bool) is not isinstance(value, bool):
        return holds is operator.ne
    if isinstance(actual, int | float) and isinstance(value, int | float):
        return holds(actual, value)
    if isinstance(actual, str) and isinstance(value, str):
        return holds(actual, value)
    return equality and holds(str(actual), str(value))
