"""`mlpipe tune SPEC`: tries what may make a training's steps faster, here or on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from mlpipe._core.printable import as_argument
from mlpipe.cli.session import CliSession, overrides, shared

if TYPE_CHECKING:
    from mlpipe.api.tuning.decide import TuningResult
    from mlpipe.api.tuning.session import Tuned


@click.command()
@click.argument("spec", type=click.Path())
@overrides
@click.option("--stage", metavar="NAME", help="The training, if there are several.")
@click.option("--to", "place", metavar="BACKEND", help="Where trials run. Default: what the file is for.")
@click.option("--only", metavar="KINDS", help="Of changes, like strategy,micro_batch. Default: all.")
@click.option("--time", "limit", default="20 min", show_default=True, metavar="TIME", help="For all trials.")
@click.option(
    "--steps",
    type=click.IntRange(6, 1_000),
    default=12,
    show_default=True,
    help="Of a trial; a third warms up.",
)
@click.option(
    "--out", type=click.Path(dir_okay=False), default="tune.json", show_default=True, help="File to write."
)
@shared
@click.pass_obj
def command(
    session: CliSession,
    spec: str,
    overrides: tuple[str, ...],
    stage: str | None,
    place: str | None,
    only: str | None,
    limit: str,
    steps: int,
    out: str,
) -> int:
    """Try what may make a training's steps faster, one change at a time.

    Strategy, micro-batch, recomputation, compilation, readers, threads and the allocator; never the batch,
    the precision or the data. Trials are trainings of a few steps, without trackers: on this machine in a
    store of their own, or, of a file for Slurm or Kubernetes, one job there after the other.
    The same command goes on where one was stopped. Exits 0 also when there is nothing to gain.
    """
    from mlpipe._core.units import parse_seconds
    from mlpipe.api.pipeline import load
    from mlpipe.api.tuning.changes import KNOBS
    from mlpipe.api.tuning.session import Tuning
    from mlpipe.api.tuning.trials import tuned_stage, tuning_backend

    try:
        seconds = parse_seconds(limit)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--time") from None
    knobs = tuple(only.split(",")) if only else ()
    if odd := [knob for knob in knobs if knob not in KNOBS]:
        raise click.BadParameter(f"{odd[0]!r} is none of {', '.join(KNOBS)}", param_hint="--only")
    pipeline = load(spec, overrides)
    name = tuned_stage(pipeline, stage)
    try:
        backend = tuning_backend(pipeline, place)
        store = session.open_store(pipeline.spec.store) if backend.outlives_driver else None
        tuning = Tuning(pipeline, name, steps, seconds, Path(out), session, backend, store, knobs)
        result, tuned = tuning.run()
    except KeyboardInterrupt:
        session.note("stopped: the same command goes on")
        raise
    session.result(_document(result, tuned, out), _text(result, tuned, (spec, overrides), out))
    return 0


def _document(result: TuningResult, tuned: Tuned, out: str) -> dict[str, object]:
    from mlpipe.api.tuning.decide import sets_of

    return {
        "file": out,
        "stage": tuned.stage,
        "set": list(tuned.sets),
        "ratio": tuned.ratio,
        "noise_ratio": tuned.noise_ratio,
        "complete": tuned.is_complete,
        "changes": [
            {
                "set": list(row.change.sets),
                "beside": list(sets_of(row.beside)),
                "expected_ratio": row.change.expected_ratio,
                "ratio": row.ratio,
                "trials": row.num_trials,
                "verdict": row.verdict,
            }
            for row in result.rows
        ],
    }


def _text(result: TuningResult, tuned: Tuned, asked: tuple[str, tuple[str, ...]], out: str) -> str:
    """`asked`: the file, and what was changed of it by the command."""
    from shlex import quote

    from mlpipe._core.tables import aligned
    from mlpipe.api.tuning.decide import sets_of

    prefix = f"stages.{tuned.stage}."

    def short(sets: tuple[str, ...]) -> str:
        return ", ".join(item.removeprefix(prefix) for item in sets)

    rows = [("change", "step is", "expected", "trials", "verdict", "beside")]
    for row in result.rows:
        beside = short(sets_of(row.beside))
        ratio = "-" if row.ratio is None else f"{row.ratio:.3f}"
        told = f"{row.change.expected_ratio:.3f}"
        rows.append((short(row.change.sets), ratio, told, str(row.num_trials), row.verdict, beside))
    lines = aligned(rows, {0, 4, 5})
    lines.append("")
    if tuned.noise_ratio:
        lines.append(f"a trial differs from the same again by {tuned.noise_ratio:.1%} (standard deviation)")
    if not tuned.is_complete:
        lines.append("time was over before all was tried: the same command goes on")
    if not tuned.sets:
        words = "nothing to gain that is more than noise" if tuned.is_complete else "nothing is found yet"
        return "\n".join([*lines, f"{words}; trials are in {out}"])
    spec, overrides = asked
    changes = " ".join(f"--set {quote(item)}" for item in (*overrides, *tuned.sets))
    gain = f"a step takes {tuned.ratio:.3f} of its time with"
    lines.append(f"{gain} these changes, which {out} has, too:")
    return "\n".join([*lines, f"  mlpipe run {as_argument(spec)} {changes}"])
