"""What every verb has: where the store is, how to print, and the options that say so."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from mlpipe._core import environment
from mlpipe._core.errors import Interrupt
from mlpipe._core.printable import printable

if TYPE_CHECKING:
    from pathlib import Path

    from mlpipe.store.base import Store

Command = TypeVar("Command", bound=Callable[..., Any])


def interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """A signal handler."""
    raise Interrupt


@contextmanager
def heard_or_not() -> Iterator[None]:
    """No run ends because its terminal is gone, a disk is full, or Ctrl-C has ended the `tee` behind it
    first: from then on notes are written nowhere."""
    try:
        yield
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


class CliSession:
    """One call of the command line. Results go to standard output (text, or one JSON document); progress,
    notes and logs go to standard error."""

    def __init__(self) -> None:
        self.json = False
        self.quiet = False
        self.debug = False
        self.store_url: str | None = None
        self.store_is_given = False  # by --store, not by a variable

    def result(self, document: Any, text: str, *, as_it_is: bool = False) -> None:
        """The answer of the verb: `document` under `--output json`, else `text`. `as_it_is`: a file or a pipe
        gets every sign of it; a terminal would obey some."""
        exactly = as_it_is and not sys.stdout.isatty()
        shown = json.dumps(document, indent=2) if self.json else text if exactly else printable(text)
        click.echo(shown, color=exactly or self._colour(sys.stdout))

    def note(self, text: str) -> None:
        """A line for a person who watches; dropped by `--quiet`."""
        if not self.quiet:
            self.complain(text)

    def complain(self, text: str) -> None:
        """A line on standard error, `--quiet` or not."""
        with heard_or_not():
            click.echo(printable(text), err=True, color=self._colour(sys.stderr))

    def error_document(self, message: str, **fields: Any) -> None:
        if self.json:
            click.echo(json.dumps({"error": {"message": message, **fields}}, indent=2))

    def live(self) -> bool:
        """Whether a line that rewrites itself is welcome on standard error."""
        return sys.stderr.isatty() and not self.quiet and os.environ.get("TERM") != "dumb"

    def write(self, text: str) -> None:
        """On standard error, as it stands: the line that rewrites itself."""
        with heard_or_not():
            click.echo(text, nl=False, err=True, color=True)

    def open_store(self, otherwise: str | None = None) -> Store:
        """`--store`, else MLPIPE_STORE, else `otherwise` (the spec's), else ./runs."""
        from mlpipe.store.open import default_url, open_store

        return open_store(default_url(self.store_url, otherwise))

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
        one that this machine has used. Raises what `api.stores.store_of` raises."""
        from mlpipe.api.stores import store_of

        return store_of(run_id, self.open_store(), elsewhere=not self.store_is_given, note=self.note)

    def full_store_url(self, otherwise: str | None = None) -> str:
        """Of the same store, which is not opened: a plan needs no credentials."""
        from mlpipe.store.open import default_url, full_url

        return full_url(default_url(self.store_url, otherwise))

    def _colour(self, stream: Any) -> bool | None:
        """For `click.echo`: False strips colours, None leaves them to a terminal."""
        return False if os.environ.get("NO_COLOR") or not stream.isatty() else None


def _remember(name: str, convert: Callable[[Any], Any] = lambda value: value) -> Any:
    def callback(ctx: click.Context, parameter: click.Parameter, value: Any) -> None:
        session = ctx.ensure_object(CliSession)
        setattr(session, name, convert(value))
        if name == "store_url":
            source = ctx.get_parameter_source(parameter.name or "")
            session.store_is_given = source is click.core.ParameterSource.COMMANDLINE

    return callback


def shared(command: Command) -> Command:
    """Adds the four options that every verb takes; they end in the CliSession, not in the arguments."""
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


def check_suffix(out: Path | None, *known: str) -> None:
    """By the name of a file a verb knows what to write. Raises UsageError."""
    if out is not None and out.suffix.lower() not in known:
        kinds = " or ".join(known)
        raise click.UsageError(f"--out {out}: the name says what is written: end it in {kinds}")


ignore_not_found = click.option(
    "--ignore-not-found", is_flag=True, help="A run that nobody has ever claimed is no error."
)


def _side_by_side(context: click.Context, option: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    if len(given) < 2:
        return given
    from mlpipe.spec.overrides import side_by_side

    return side_by_side(given)


overrides = click.option(
    "--set",
    "overrides",
    multiple=True,
    callback=_side_by_side,
    metavar="KEY=VALUE",
    help="Change the spec, like stages.train.train.strategy=fsdp; KEY=null removes KEY. Repeatable.",
)
