"""A profile in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mlpipe.observe.profiles.findings import Finding, findings, kinds_of_layers, own_seconds
from mlpipe.observe.profiles.measure import RankProfile

_MOST_LAYERS = 12
NOT_PRICED = "the planner has no price for this"


def profile_text(ranks: Sequence[RankProfile], expected: Mapping[str, str] | None = None) -> str:
    """What to change first, then where the time of the slowest rank went. `expected`: by cause, what the
    planner says of the remedy; None: it was not asked."""
    slow = max(ranks, key=own_seconds)
    lines = [
        f"steps {slow.first_step} to {slow.first_step + slow.num_steps - 1}, "
        f"{len(ranks)} rank{'s' if len(ranks) > 1 else ''}: {1000 * slow.seconds:.1f} ms a step while "
        f"profiled, of which rank {slow.rank} computes {100 * slow.busy / slow.seconds:.0f} %"
    ]
    causes = findings(ranks)
    lines += ["", "What to change"] if causes else ["", "Nothing stands out."]
    for number, one in enumerate(causes, 1):
        lines += [f"{number:2d}. {one.what}{gain_words(one)}", f"    {one.remedy}"]
        if expected is not None:
            lines.append(f"    {expected.get(one.cause, NOT_PRICED)}")
    lines += ["", f"Where the time went (rank {slow.rank})"]
    lines += _shares(
        {"computing": slow.busy, **{f"idle: {k}": v for k, v in slow.idle.items()}}, slow.seconds
    )
    if slow.communication:
        hidden = 100 * slow.hidden_communication / slow.communication
        lines.append(
            f"  communication {1000 * slow.communication:.1f} ms, {hidden:.0f} % of it behind computing"
        )
    tiny = 100 * slow.tiny_seconds / slow.seconds
    lines.append(f"  launch-bound: {slow.tiny_count:.0f} operators below 20 microseconds, {tiny:.0f} %")
    lines += ["", "By kind of operator", *_shares(slow.classes, slow.seconds)]
    layers = sorted(kinds_of_layers(slow).items(), key=lambda item: -item[1].seconds)[:_MOST_LAYERS]
    if layers:
        lines += ["", "By layer (forward, backward; without the layers in it)"]
        width = max(len(name) for name, _ in layers)
        lines += [
            f"  {name:<{width}}  {1000 * one.forward:8.2f} {1000 * one.backward:8.2f} ms "
            f"{100 * one.seconds / slow.seconds:5.1f} %  {one.operators:6.0f} operators"
            for name, one in layers
        ]
    lines += ["", "Costliest operators"]
    lines += [
        f"  {1000 * one.seconds:8.2f} ms {100 * one.seconds / slow.seconds:5.1f} %  {one.count:7.1f} x "
        f"{one.name}"
        for one in slow.operators
    ]
    return "\n".join(lines)


def gain_words(finding: Finding) -> str:
    """What it may be worth."""
    return "" if finding.gain is None else f": at most {100 * finding.gain:.0f} % of a step"


def _shares(seconds: dict[str, float], whole: float) -> list[str]:
    width = max(map(len, seconds), default=0)
    return [
        f"  {name:<{width}}  {1000 * value:8.2f} ms {100 * value / whole:5.1f} %"
        for name, value in seconds.items()
        if value >= 0.001 * whole
    ]
