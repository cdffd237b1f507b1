"""What a rented machine is told: a script, and what it needs to know. Pure, so that `--dry-run` shows it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Literal

from mlpipe._core import environment
from mlpipe.plan.offers import RETURN_SECONDS, reserve_seconds
from mlpipe.plan.plan import Plan

LEASE_SECONDS = 900.0  # for which a machine goes on without a sign of its driver
LAST_FIRST_BEAT_SECONDS = 1800.0  # from the order until the machine's own program is heard of

Ending = Literal["money", "time", "offer"]

_SCRIPT = """\
# the dead man's switch: whatever happens above it, the machine ends its own rental
give_back() {{ {give_back}; }}
return_machine() {{ while :; do give_back && sleep 30; sleep {pause}; done; }}
left=$(( {deadline} - $(date +%s) ))
if [ "$left" -gt {seconds} ]; then left={seconds}; fi
if [ "$left" -lt 0 ]; then left=0; fi
( sleep "$left"; return_machine ) &
"$(command -v python || command -v python3)" -P -m mlpipe.submit.rented.machine
return_machine
"""


@dataclass(frozen=True)
class Term:
    """For how long a machine is rented. `deadline`: Unix seconds; `seconds`: until then. `ending`: what of
    the run, or of the offer, is over by then."""

    deadline: float
    seconds: float
    ending: Ending


def script(give_back: str, term: Term) -> str:
    """For `sh`. Times in whole seconds; what a return takes is kept for it."""
    return _SCRIPT.format(
        give_back=give_back,
        deadline=math.floor(term.deadline - RETURN_SECONDS / 2),
        seconds=math.floor(term.seconds - RETURN_SECONDS / 2),
        pause=10,
    )


def told(plan: Plan, term: Term, cache: str, lease_seconds: float) -> dict[str, str]:
    """The variables of `machine.py`. `cache`: where inputs lie on its driver's machine."""
    document = {
        "store": plan.store_url,
        "attempt_key": plan.attempt_key,
        "save_at": term.deadline - reserve_seconds(plan),
        "save_after_seconds": term.seconds - reserve_seconds(plan),
        "lease_seconds": lease_seconds,
        "cache": cache,
    }
    return {environment.RENTAL: json.dumps(document)}
