"""What a user allows: dollars, hours, which machines. Options of `submit`, kept in run.json as the place."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlpipe._core import environment
from mlpipe._core.errors import MlpipeError, SubmitError
from mlpipe._core.units import parse_seconds
from mlpipe.submit.rented import vendor
from mlpipe.submit.submission import Option

ANY_GPU = "any"
OPTIONS = (
    Option(
        "--max-usd",
        "USD",
        "Most that the run may cost; it saves and returns its machine before.",
        required=True,
    ),
    Option("--max-time", "DURATION", "Longest time from the first rental to the end of the last."),
    Option(
        "--gpu",
        "NAME",
        f"GPU of the catalogue to rent; repeat, or {ANY_GPU}. Default: the stage's.",
        repeated=True,
    ),
    Option("--region", "CODE", "Country of the machines, such as DE; repeat.", repeated=True),
    Option("--min-reliability", "RATIO", "Of the machines, as the vendor counts it. Default: 0.95."),
    Option("--spot", "yes|no", "Also machines that others may outbid. Default: no."),
    Option("--vendor", "NAME", f"Who rents. Default: {vendor.DEFAULT}."),
)


@dataclass(frozen=True)
class Limits:
    """`gpus`: None: each stage's own; empty: any."""

    max_usd: float
    max_seconds: float = math.inf
    gpus: tuple[str, ...] | None = None
    regions: tuple[str, ...] = ()
    min_reliability: float = 0.95
    spot: bool = False
    vendor: str = vendor.DEFAULT

    @classmethod
    def of_place(cls, place: Mapping[str, Any]) -> Limits:
        """MLPIPE_MAX_USD stands above what was asked for, so that a run can go on with more. Raises
        SubmitError (input)."""
        from mlpipe.plan.hardware import GPUS  # every `submit` imports this module, for its options

        gpus = tuple(place.get("gpu") or ())
        if unknown := sorted({*gpus} - {*GPUS, ANY_GPU}):
            raise _wrong("--gpu", ", ".join(unknown), f"{', '.join(GPUS)} or {ANY_GPU}")
        spot = place.get("spot") or "no"
        if spot not in ("yes", "no"):
            raise _wrong("--spot", spot, "yes or no")
        name = place.get("vendor") or vendor.DEFAULT
        if name not in vendor.VENDORS:
            raise _wrong("--vendor", name, ", ".join(vendor.VENDORS))
        max_time = place.get("max_time")
        try:
            seconds = parse_seconds(max_time) if max_time else math.inf
        except (MlpipeError, ValueError):
            raise _wrong("--max-time", max_time, "a duration, such as 6 h") from None
        more = os.environ.get(environment.MAX_USD)
        return cls(
            _number(environment.MAX_USD, more, math.inf)
            if more
            else _number("--max-usd", place.get("max_usd"), math.inf),
            seconds,
            None if not gpus else () if ANY_GPU in gpus else gpus,
            tuple(place.get("region") or ()),
            _number("--min-reliability", place.get("min_reliability") or "0.95", 1.0),
            spot == "yes",
            name,
        )


def _number(flag: str, text: Any, most: float) -> float:
    try:
        number = float(text)
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and 0 < number <= most):
        raise _wrong(flag, text, "a number above 0" + ("" if most == math.inf else f", {most:g} at most"))
    return number


def _wrong(flag: str, value: Any, wanted: str) -> SubmitError:
    return SubmitError(f"{flag} is {value!r}", hint=f"write {wanted}", kind="input")
