"""`mlpipe forecast`: GPU-hours of the coming days, out of the runs of a store, and when a quota is short."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from mlpipe.cli.session import CliSession, shared

if TYPE_CHECKING:
    from mlpipe.observe.forecast import Forecast

_HISTORY_DAYS = 182
_QUOTA = re.compile(r"([^=\s]+)=([0-9]+)")


def _quotas(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, int]:
    quotas: dict[str, int] = {}
    for value in values:
        match = _QUOTA.fullmatch(value)
        if match is None:
            raise click.BadParameter(f"{value!r} is not CLASS=GPUS, like H100=512")
        if match[1] in quotas:
            raise click.BadParameter(f"{match[1]} has two")
        quotas[match[1]] = int(match[2])
    return quotas


@click.command()
@click.option(
    "--days",
    type=click.IntRange(1, 90),
    default=14,
    show_default=True,
    help="How many days are forecast, today's the first.",
)
@click.option(
    "--quota",
    "quotas",
    multiple=True,
    callback=_quotas,
    metavar="CLASS=GPUS",
    help="Say when so many GPUs of a class will be too few, like H100=512. Repeatable.",
)
@shared
@click.pass_obj
def command(session: CliSession, days: int, quotas: dict[str, int]) -> None:
    """Forecast the GPU-hours of the coming days by class of GPUs, and the day on which a quota is short.

    From the runs of the last 26 weeks, with an interval that holds 8 of 10 days. Two methods are tried on
    days of the past that they are not shown: each day as a week before, and, with mlpipe[forecast],
    Holt-Winters'; the better one is used. Below 3 weeks of history nothing is forecast. Days are UTC's.
    """
    import time

    from mlpipe.api.demand import demand
    from mlpipe.observe import demand as daily
    from mlpipe.observe import forecast as method

    now = time.time()
    today = daily.day_of(now)
    first = today - _HISTORY_DAYS
    store = session.open_store()
    found = demand(store, first * daily.DAY_SECONDS, now, session.note)
    if found.unread:
        session.note(f"{_runs(len(found.unread))} left out, which cannot be read: {_some(found.unread)}")
    hours = daily.gpu_hours_by_day(found.uses)
    methods = method.methods()
    if method.MODEL not in methods:
        session.note(f"{method.BASELINE} alone; {method.MODEL} beside it: pip install 'mlpipe[forecast]'")
    classes, blocks = [], []
    for name in sorted({*hours, *quotas}):
        of_class = {day: value for day, value in hours.get(name, {}).items() if day >= first}
        series = daily.history(of_class, today)
        so_far = of_class.get(today, 0.0)
        ahead = method.forecast(series, days, methods, so_far)
        document = {
            "class": name,
            "history_days": len(series),
            "history_gpu_hours": sum(series),
            "today_gpu_hours": so_far,
            "quota_gpus": quotas.get(name),
            "forecast": None if ahead is None else _document(ahead, today),
        }
        if name in quotas and ahead is not None:
            document["short"] = {
                "expected": _day_or_none(today, daily.short_on(ahead.days, quotas[name])),
                "possible": _day_or_none(today, daily.short_on(ahead.upper, quotas[name])),
            }
        classes.append(document)
        blocks.append("\n".join(_lines(document)))
    nothing = f"no run in {store.url} had GPUs in the last {_HISTORY_DAYS} days ({_runs(found.num_runs)})"
    session.result(
        {"store": store.url, "num_runs": found.num_runs, "unread": list(found.unread), "classes": classes},
        "\n\n".join(blocks) if hours or quotas else nothing,
    )


def _runs(number: int) -> str:
    return "1 run" if number == 1 else f"{number} runs"


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _day(number: int) -> str:
    return (date(1970, 1, 1) + timedelta(days=number)).isoformat()


def _day_or_none(today: int, ahead: int | None) -> str | None:
    return None if ahead is None else _day(today + ahead)


def _document(ahead: Forecast, today: int) -> dict[str, Any]:
    from mlpipe.observe.forecast import COVERED_RATIO

    return {
        "method": ahead.judged[0].name,
        "interval_ratio": COVERED_RATIO,
        "methods": [
            {
                "name": one.name,
                "mean_error_gpu_hours": one.mean_error,
                "error_ratio": one.error_ratio,
                "num_judged": sum(map(len, one.errors)),
            }
            for one in ahead.judged
        ],
        "days": [
            {"day": _day(today + number), "gpu_hours": value, "lower": low, "upper": high}
            for number, (value, low, high) in enumerate(
                zip(ahead.days, ahead.lower, ahead.upper, strict=True)
            )
        ],
    }


def _lines(one: dict[str, Any]) -> list[str]:
    """Of a class, from its document."""
    from mlpipe._core.tables import aligned
    from mlpipe.observe.forecast import MIN_DAYS

    known = f"{one['history_days']} whole days of history, {_hours(one['history_gpu_hours'])} GPU-hours"
    head = (
        f"{click.style(one['class'], bold=True)}: {known}, and {_hours(one['today_gpu_hours'])} today so far"
    )
    ahead = one["forecast"]
    if not one["history_days"] and not one["today_gpu_hours"]:
        return [f"{one['class']}: no run had it"]
    if ahead is None:
        return [head, f"  too short for a forecast, which needs {MIN_DAYS} days"]
    best, *others = [f"{each['name']}, off by {_percent(each['error_ratio'])}" for each in ahead["methods"]]
    held_out = f"  by {best} of the GPU-hours of days that it was not shown"
    rows = [("day", "GPU-hours", "8 of 10 days")]
    for each in ahead["days"]:
        weekday = datetime.fromisoformat(each["day"]).replace(tzinfo=UTC).strftime("%a")
        between = f"{_hours(each['lower'])} to {_hours(each['upper'])}"
        rows.append((f"{weekday} {each['day']}", _hours(each["gpu_hours"]), between))
    lines = [head, held_out + "".join(f" ({other})" for other in others)]
    lines += [f"  {line}" for line in aligned(rows, left=(0,))]
    if one["quota_gpus"] is not None:
        lines.append("  " + _quota_words(one))
    return lines


def _quota_words(one: dict[str, Any]) -> str:
    quota = f"{one['quota_gpus']} GPUs ({_hours(one['quota_gpus'] * 24)} GPU-hours a day)"
    expected, possible = one["short"]["expected"], one["short"]["possible"]
    if expected is not None:
        before = f", perhaps from {possible} on" if possible != expected else ""
        return click.style(f"{quota} will be short on {expected}{before}", fg="red")
    if possible is not None:
        return click.style(f"{quota} may be short on {possible}", fg="yellow")
    return f"{quota} will do"


def _percent(ratio: float | None) -> str:
    return "?" if ratio is None else f"{ratio:.0%}"


def _hours(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or not value else f"{value:.2g}"
