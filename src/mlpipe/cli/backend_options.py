"""`--to` and `--for`: a backend by its name, and the options that the backend adds to the verb."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click

from mlpipe.submit import backends
from mlpipe.submit.backend import Backend
from mlpipe.submit.submission import Option


class BackendChoice(click.ParamType):  # type: ignore[type-arg]  # of click 8.5, not of 8.1
    """The name of a backend, out of the table or of another package. `also`: other words. `offers`: which
    backends have what the verb is about."""

    name = "backend"

    def __init__(
        self, also: Sequence[str] = (), offers: Callable[[type[Backend]], bool] | None = None
    ) -> None:
        self._also, self._offers = tuple(also), offers

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        known = value in self._also or value in backends.TABLE or value in backends.installed()
        if not known or (value not in self._also and not self._has(value)):
            self.fail(f"{value!r} is not one of {', '.join(map(repr, self._names()))}.", param, ctx)
        return str(value)

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return f"[{'|'.join(self._names())}]"

    def _names(self) -> list[str]:
        return [*filter(self._has, (*backends.TABLE, *backends.installed())), *self._also]

    def _has(self, name: str) -> bool:
        return self._offers is None or self._offers(backends.load(name))


class WithBackendOptions(click.Command):
    """A verb whose parameter `chosen_by` names a backend: it has the options that the backends of the table
    add to it, and those of another one that is named. One that is given belongs to the backend that is
    named."""

    def __init__(self, *arguments: Any, chosen_by: str, verb: str, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._chosen_by, self._verb = chosen_by, verb
        self._other: str | None = None  # a backend out of the table
        self._owners: dict[str, tuple[Option, list[str]]] = {}

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Those of the verb itself, then the backends'; an option that several share is one."""
        self._owners = {}
        for name in (*backends.TABLE, *filter(None, [self._other])):
            backend = backends.load(name)
            for option in backend.options if self._verb == "submit" else backend.doctor_options:
                self._owners.setdefault(option.name, (option, []))[1].append(name)
        params = super().get_params(ctx)
        place = next(i for i, one in enumerate(params) if one.name == self._chosen_by) + 1
        return params[:place] + [_click(option) for option, _ in self._owners.values()] + params[place:]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        flag = next(one.opts[0] for one in self.params if one.name == self._chosen_by)
        self._other = next((name for name in _values(flag, args) if _is_elsewhere(name)), None)
        rest = super().parse_args(ctx, args)
        chosen = ctx.params[self._chosen_by]
        given = {name: ctx.params.pop(name) for name in self._owners}
        for name, (option, owners) in self._owners.items():
            if chosen not in owners:
                if given.pop(name):
                    ctx.fail(f"{option.flag} is for {flag} {' and '.join(owners)}")
            elif option.required and not given[name]:
                ctx.fail(f"{flag} {chosen} needs {option.flag} {option.metavar}")
        ctx.params["options"] = given
        return rest


def _values(flag: str, args: Sequence[str]) -> Iterator[str]:
    """What follows `flag`, wherever it stands."""
    for word, after in zip(args, [*args[1:], ""], strict=False):
        if word == flag:
            yield after
        elif word.startswith(f"{flag}="):
            yield word.removeprefix(f"{flag}=")


def _is_elsewhere(name: str) -> bool:
    return name not in backends.TABLE and name in backends.installed()


def _click(option: Option) -> click.Option:
    return click.Option(
        [option.flag, option.name], metavar=option.metavar, help=option.help, multiple=option.repeated
    )
