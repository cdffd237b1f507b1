"""The group of verbs, loaded one by one, and the one place where an error becomes words and an exit code.

The help lines stand in `VERBS`, so that `mlpipe --help` imports click and nothing else.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import pairwise
from typing import Any, NoReturn

import click

import mlpipe
from mlpipe._core import environment
from mlpipe._core.errors import EXIT_CODES, ErrorKind, MlpipeError
from mlpipe.cli.session import CliSession, heard_or_not, interrupt

VERBS = {
    "init": "Write a starter pipeline that runs.",
    "validate": "Report every mistake in a pipeline file at once.",
    "schema": "Print the JSON Schema of pipeline files, for editors.",
    "data": "Show what a training reads.",
    "plan": "Show what will run and why: strategies compared, memory, time, cost.",
    "tune": "Try what makes a training's steps faster here, and say what to change.",
    "calibrate": "Measure what this machine can do, for better plans.",
    "render": "Write manifests to review and commit.",
    "run": "Run a pipeline here, in the foreground.",
    "submit": "Start a run in the background and print its id.",
    "sweep": "Run a pipeline for several values, and say which was the best.",
    "list": "List the runs of a store.",
    "status": "Show where a run stands.",
    "logs": "Print or follow the logs of a run.",
    "cancel": "Stop a run; what it learnt is saved first.",
    "scale": "Change how many nodes an elastic training has, while it runs.",
    "spec": "Print the pipeline of a run, as it was asked for.",
    "resume": "Go on with a run that was stopped or failed.",
    "report": "Write one HTML page about a run.",
    "compare": "Show in what runs differed, and what came of it.",
    "forecast": "Forecast GPU-hours of the coming days, and when a quota is short.",
    "profile": "Trace steps of a run as it goes, and say what would make it faster.",
    "top": "Show the runs of a store, or the ranks of one, as they go.",
    "monitor": "Start a Prometheus that scrapes the runs of this machine.",
    "exporter": "Serve the runs of a store as metrics.",
    "checkpoints": "List, verify, prune or export checkpoints.",
    "models": "List, show or promote registered models.",
    "doctor": "Say what this machine and the store lack, with remedies.",
}
_ELSEWHERE = {  # what other tools, whose users come here, call a verb
    "apply": "submit", "describe": "status", "down": "cancel", "exec": "run", "get": "list",
    "help": "--help", "kill": "cancel", "launch": "submit", "ls": "list", "ps": "list",
    "queue": "list", "start": "submit", "stop": "cancel", "version": "--version",
}  # fmt: skip
_REMEDIES = {  # of a file's name that is a mistake; all else that an OSError says is the machine's
    errno.EEXIST: "it is a file, and a folder is needed there: name another one",
    errno.ENOTDIR: "a folder in this path is a file: name another one",
    errno.EISDIR: "it is a folder: name a file in it",
    errno.ENAMETOOLONG: "choose a shorter name",
}
_SIGPIPE_EXIT = 141  # what a shell reports of any program whose reader went away


class ReaderLeft(Exception):
    """Whoever read our output closed it (`mlpipe list | head -1`)."""


@contextmanager
def _reader() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError as error:  # click would exit 1 for it, which is our code for a bug
        raise ReaderLeft from error


class LazyGroup(click.Group):
    """Commands are imported when they are called, not when they are listed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command: click.Command = import_module(f"mlpipe.cli.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            from difflib import get_close_matches

            elsewhere = [_ELSEWHERE[args[0]]] if args[0] in _ELSEWHERE else None
            close = elsewhere or get_close_matches(args[0], VERBS, n=1)
            ctx.fail(f"no such command {args[0]!r}." + (f" Did you mean {close[0]!r}?" if close else ""))
        return super().resolve_command(ctx, args)

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        with _reader():  # of --help and --version, which are done while words are read
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        word = os.environ.get(environment.CALIBRATE, "")
        if environment.is_on(word) is None:
            words = f"{environment.CALIBRATE} is {word!r}"
            raise MlpipeError(words, hint="write off, or unset it", kind="input")
        with _reader():
            return super().invoke(ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))


app = LazyGroup(
    name="mlpipe",
    help="One YAML file takes a training pipeline to a laptop, to Jenkins and to a gang of GPU pods.",
    epilog="Exit codes: 0 done, 1 a bug in mlpipe, 2 bad input, 3 the run failed, 4 infrastructure, "
    "5 cancelled, 130 Ctrl-C.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    params=[
        click.Option(
            ["--version"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            help="Print the version and exit.",
            callback=lambda ctx, _, value: _print_version(ctx) if value else None,
        )
    ],
)


def _print_version(ctx: click.Context) -> None:
    click.echo(f"mlpipe {mlpipe.__version__}")
    ctx.exit()


def run_app(args: list[str] | None = None) -> NoReturn:
    """Run one command and exit with the code that the table in `_core/errors.py` gives its outcome."""
    session, words = CliSession(), sys.argv[1:] if args is None else args
    _open_streams()
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, interrupt)
    try:
        outcome = app.main(args, prog_name="mlpipe", standalone_mode=False, obj=session)
        sys.stdout.flush()
        code = outcome if isinstance(outcome, int) else 0
    except (ReaderLeft, BrokenPipeError):
        # No message, and none from the interpreter's last flush either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = _SIGPIPE_EXIT
    except click.Abort:
        code = EXIT_CODES["interrupted"]
    except (click.ClickException, MlpipeError, Exception) as error:
        if session.debug:
            import traceback

            with heard_or_not():
                traceback.print_exc()
        # of a mistake in the command line, which click finds before it has read all of it
        session.json = session.json or "--output=json" in words or ("--output", "json") in pairwise(words)
        code = _explain(error, session)
    sys.exit(code)


def _open_streams() -> None:
    """What a caller closed (`>&-`) is nowhere, and no file of a store becomes it."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115


def _explain(error: Exception, session: CliSession) -> int:
    """The message on standard error (and a document on standard output under `--output json`)."""
    if isinstance(error, click.ClickException):
        with heard_or_not():
            error.show()
        context = getattr(error, "ctx", None)
        hint = f"{context.command_path} --help" if context else None
        session.error_document(error.format_message(), kind="input", where=None, hint=hint)
        return EXIT_CODES["input"]
    if isinstance(error, MemoryError):
        hint = "raise its limit (ulimit -v), or use a machine with more"
        error = MlpipeError("this process has no memory left", hint=hint, kind="infrastructure")
    if isinstance(error, OSError) and error.strerror:  # of a file or device, where nobody thought of one
        where, hint = error.filename and str(error.filename), _REMEDIES.get(error.errno or 0)
        kind: ErrorKind = "input" if hint else "infrastructure"
        hint = hint or "is it full, read-only or somebody else's?"
        error = MlpipeError(error.strerror, where=where, hint=hint, kind=kind)
    if isinstance(error, MlpipeError) and error.kind != "bug":
        problems = getattr(error, "problems", None)  # SpecErrors: a line each, as editors expect them
        session.complain(str(error) if problems else f"{click.style('error:', fg='red', bold=True)} {error}")
        fields: dict[str, Any] = {"where": error.where, "hint": error.hint}
        if problems:
            fields["problems"] = [problem._asdict() for problem in problems]
        session.error_document(error.message, kind=error.kind, **fields)
        return EXIT_CODES[error.kind]
    again = "" if session.debug else "; run again with --debug to see where"
    session.complain(f"a bug in mlpipe: {type(error).__name__}: {error}{again}")
    hint = "run again with --debug, and report it"
    session.error_document(f"{type(error).__name__}: {error}", kind="bug", where=None, hint=hint)
    return EXIT_CODES["bug"]
