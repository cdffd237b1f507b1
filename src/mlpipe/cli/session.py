"""What every verb has: where the store is, how to print, and the options that say so."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from mlpipe._core import environment

if TYPE_CHECKING:
    from mlpipe.store.base import Store

Command = TypeVar("Command", bound=Callable[..., Any])
DEFAULT_STORE = "./runs"
_SEARCH_SECONDS = 15.0  # for all stores together that may have a run


class Interrupt(KeyboardInterrupt):
    """Ctrl-C. CPython remembers a plain KeyboardInterrupt that passes through `exec` of a string (as
    dataclasses do while a module is imported): `python -m` then dies of SIGINT at its end, caught or not."""


def interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """A signal handler."""
    raise Interrupt


class Session:
    """One call of the command line. Results go to standard output (text, or one JSON document); progress,
    notes and logs go to standard error."""

    def __init__(self) -> None:
        self.json = False
        self.quiet = False
        self.debug = False
        self.store_url: str | None = None
        self.store_is_given = False  # by --store, not by a variable

    def result(self, document: Any, text: str) -> None:
        """The answer of the verb: `document` under `--output json`, else `text`."""
        click.echo(json.dumps(document, indent=2) if self.json else text, color=self._colour(sys.stdout))

    def note(self, text: str) -> None:
        """A line for a person who watches; dropped by `--quiet`."""
        if not self.quiet:
            self.complain(text)

    def complain(self, text: str) -> None:
        """A line on standard error, `--quiet` or not."""
        click.echo(text, err=True, color=self._colour(sys.stderr))

    def error_document(self, message: str, **fields: Any) -> None:
        if self.json:
            click.echo(json.dumps({"error": {"message": message, **fields}}, indent=2))

    def live(self) -> bool:
        """Whether a line that rewrites itself is welcome on standard error."""
        return sys.stderr.isatty() and not self.quiet and os.environ.get("TERM") != "dumb"

    def open_store(self, otherwise: str | None = None) -> Store:
        """`--store`, else MLPIPE_STORE, else `otherwise` (the spec's), else ./runs."""
        from mlpipe.store.open import open_store

        return open_store(self.store_url or otherwise or DEFAULT_STORE)

    def store_if_claimed(self, run_id: str, *, ignore_not_found: bool) -> Store | None:
        """As `store_of`; with `ignore_not_found` None where nobody has ever claimed the run, and says so."""
        from mlpipe.store import known

        try:
            store = self.store_of(run_id)
            if not ignore_not_found or known.is_claimed(store, run_id):
                return store
            words = f"{store.url}: no build has made run {run_id}"
        except known.NoRunError as error:
            if not ignore_not_found:
                raise
            words = f"{error.where}: {error.message}"
        self.result({"run_id": run_id, "state": None}, words)
        return None

    def store_of(self, run_id: str) -> Store:
        """The store that has the run: the one that `open_store` gives, or, unless --store named it, another
        one that this machine has used. Raises NoRunError where none has it, saying where it looked, and
        StoreError (input) where several have."""
        from mlpipe._core.errors import StoreError
        from mlpipe._core.ids import is_name
        from mlpipe.store import known

        store = self.open_store()
        if not is_name(run_id):
            raise StoreError(f"{run_id!r} is not a run id", hint="mlpipe list shows them", kind="input")
        if known.is_known(store, run_id):
            known.remember(store.url)
            return store
        others = [] if self.store_is_given else [url for url in known.stores() if url != store.url]
        stores, silent = known.find(run_id, others, timeout_seconds=_SEARCH_SECONDS)
        if not stores:
            looked = "".join(f"; not in {url} either" for url in others if url not in silent)
            looked += "".join(f"; {url} could not be asked" for url in silent)
            raise known.NoRunError(
                f"there is no run {run_id}{looked}",
                where=store.url,
                hint="mlpipe list shows the runs of a store; name another with --store",
                kind="input",
            )
        if len(stores) > 1:
            raise StoreError(
                f"several stores have a run {run_id}: {', '.join(one.url for one in stores)}",
                hint="say which with --store",
                kind="input",
            )
        self.note(f"run {run_id} is in {stores[0].url}")
        return stores[0]

    def full_store_url(self, otherwise: str | None = None) -> str:
        """Of the same store, which is not opened: a plan needs no credentials."""
        from mlpipe.store.open import full_url

        return full_url(self.store_url or otherwise or DEFAULT_STORE)

    def _colour(self, stream: Any) -> bool | None:
        """For `click.echo`: False strips colours, None leaves them to a terminal."""
        return False if os.environ.get("NO_COLOR") or not stream.isatty() else None


def _remember(name: str, convert: Callable[[Any], Any] = lambda value: value) -> Any:
    def callback(ctx: click.Context, parameter: click.Parameter, value: Any) -> None:
        session = ctx.ensure_object(Session)
        setattr(session, name, convert(value))
        if name == "store_url":
            source = ctx.get_parameter_source(parameter.name or "")
            session.store_is_given = source is click.core.ParameterSource.COMMANDLINE

    return callback


def shared(command: Command) -> Command:
    """Adds the four options that every verb takes; they end in the Session, not in the arguments."""
    for decorate in (
        click.option(
            "--debug",
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_remember("debug"),
            help="Show tracebacks.",
        ),
        click.option(
            "--quiet",
            "-q",
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_remember("quiet"),
            help="Print results only, no progress.",
        ),
        click.option(
            "--store",
            envvar=environment.STORE,
            metavar="URL",
            expose_value=False,
            callback=_remember("store_url"),
            help="A folder or s3://bucket/prefix. Default: MLPIPE_STORE, the spec's store, ./runs.",
        ),
        click.option(
            "--output",
            type=click.Choice(["text", "json"]),
            default="text",
            is_eager=True,
            expose_value=False,
            callback=_remember("json", lambda value: value == "json"),
            help="Text for people, or one JSON document.",
        ),
    ):
        command = decorate(command)
    return command


ignore_not_found = click.option(
    "--ignore-not-found", is_flag=True, help="A run that nobody has ever claimed is no error."
)
overrides = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change the spec, like stages.train.train.strategy=fsdp; KEY=null removes KEY. Repeatable.",
)
