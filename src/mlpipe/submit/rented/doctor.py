"""What is missing to rent machines, and which are rented now."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mlpipe.submit.rented import vendor
from mlpipe.submit.submission import Finding, attempt


def examine(store: Iterable[Finding]) -> Iterator[Finding]:
    """Asks the default vendor; changes nothing."""
    account = attempt("account", lambda: vendor.connect(vendor.DEFAULT))
    if isinstance(account, Finding):
        yield account
        return
    machines = attempt("machines", account.machines)
    if isinstance(machines, Finding):
        yield machines
        return
    yield Finding("account", "ok", f"{account.name} knows the key")
    ours = [one for one in machines if one.label.startswith("mlpipe/")]
    named = ", ".join(f"{one.id} ({one.label}, {one.says})" for one in ours)
    yield Finding(
        "machines",
        "warn" if ours else "ok",
        f"mlpipe has rented {named}" if ours else "none is rented by mlpipe",
        "one whose run is over or has no driver: mlpipe cancel RUN, or destroy it by hand" if ours else None,
    )
    yield from store
