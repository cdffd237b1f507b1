"""`mlpipe data preview`: what of a conversation the model reads, and what it learns to say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from mlpipe._core.errors import PlanError
from mlpipe.cli.session import CliSession, overrides, shared

if TYPE_CHECKING:
    from mlpipe.plan.data import ChatPlan


@click.group()
def command() -> None:
    """Show what a training reads."""


@command.command()
@click.argument("spec", type=click.Path())
@click.option("--stage", metavar="NAME", help="Which training, if there are several.")
@click.option("--sample", metavar="N", type=click.IntRange(min=0), default=0, help="Which sample, from 0.")
@click.option(
    "--file", metavar="N", type=click.IntRange(min=0), default=0, help="Of which of those mixed, from 0."
)
@click.option("--validation", is_flag=True, help="Of the held-out file.")
@overrides
@shared
@click.pass_obj
def preview(
    session: CliSession,
    spec: str,
    stage: str | None,
    sample: int,
    file: int,
    validation: bool,
    overrides: tuple[str, ...],
) -> None:
    """Print a sample of a training on conversations; what is learnt stands between » and «.

    The whole file is tokenised, as the training would, and kept for it on this machine. Exits 2 with the
    number and the reason of each line that gives no sample."""
    plan, seq_len = _chat(spec, stage, overrides)
    from mlpipe.train.data.chat.jsonl import printable
    from mlpipe.train.data.chat.preview import preview as look

    seen = look(plan, _path(plan, file, validation), sample, seq_len)
    lengths = seen.lengths
    lines = [
        f"{seen.num_samples} samples, {seen.num_tokens} tokens, of which {seen.num_learnt} are learnt",
        f"tokens of a sample: half have up to {lengths['median']}, nine in ten up to {lengths['p90']}, "
        f"the longest {lengths['max']}",
    ]
    if seen.num_cut:
        mute = f"; nothing is left to learn of {seen.num_mute}" if seen.num_mute else ""
        lines.append(f"{seen.num_cut} are longer than seq_len {seq_len}, and are cut{mute}")
    texts = [(printable(piece.text), piece.learnt) for piece in seen.pieces]
    shown = "".join(click.style(f"»{text}«", fg="green") if learnt else text for text, learnt in texts)
    lines += ["", f"sample {sample}: {seen.num_sample_tokens} tokens", shown]
    document: dict[str, Any] = {
        "samples": seen.num_samples,
        "tokens": seen.num_tokens,
        "learnt": seen.num_learnt,
        "cut": seen.num_cut,
        "mute": seen.num_mute,
        "lengths": lengths,
        "sample": [{"text": piece.text, "learnt": piece.learnt} for piece in seen.pieces],
    }
    session.result(document, "\n".join(lines))


def _path(plan: ChatPlan, file: int, validation: bool) -> str:
    """Raises PlanError."""
    if validation:
        if plan.validation is None:
            raise PlanError("there is no held-out file", hint="write data.validation")
        return plan.validation
    if file >= len(plan.paths):
        raise PlanError(f"there is no file {file}", hint=f"there are files 0 to {len(plan.paths) - 1}")
    return plan.paths[file]


def _chat(spec: str, stage: str | None, overrides: tuple[str, ...]) -> tuple[ChatPlan, int]:
    """And `seq_len`. Raises PlanError."""
    from mlpipe.kinds.train.spec import Train
    from mlpipe.plan.references import stage_named
    from mlpipe.plan.training import data_plan, trainings
    from mlpipe.spec import placeholders
    from mlpipe.spec.load import load_pipeline

    pipeline = load_pipeline(spec, overrides=overrides)
    names = [stage] if stage is not None else list(trainings(pipeline))
    parts = [(name, part) for name in names if (part := stage_named(pipeline, name).part(Train)) is not None]
    plans = [
        (name, chat, part.model.seq_len)
        for name, part in parts
        if (chat := data_plan(part, {}).chat) is not None
    ]
    if len(plans) != 1:
        raise PlanError(
            "no stage trains on conversations"
            if not plans
            else f"{len(plans)} stages train on conversations",
            where=spec,
            hint="write data: {chat: ...}"
            if not plans
            else f"name one: --stage, of {', '.join(name for name, *_ in plans)}",
        )
    [(name, chat, seq_len)] = plans
    told = {"chat": chat.path, "validation": chat.validation, "tokenizer": chat.tokenizer}
    mixed = {f"chat.{number}.path": one.path for number, one in enumerate(chat.mix)}
    for key, path in (told | {"template": chat.template} | mixed).items():
        if path is not None and placeholders.names(path):
            raise PlanError(
                f"{path} is known in a run only",
                where=f"stages.{name}.train.data.{key}",
                hint=f"say where it is: --set stages.{name}.train.data.{key}=PATH",
            )
    return chat, seq_len
