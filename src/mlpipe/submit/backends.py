"""The backends by name: ours in a table, those of other packages by the entry point group `mlpipe.backends`.

A backend's module is imported when it is asked for by name, and must import little itself: `mlpipe submit
--help` shows the options of all in the table. Names of entry points are only looked up for `--help` and for a
name that the table does not have: it takes a look into every installed package.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mlpipe._core.errors import SubmitError

if TYPE_CHECKING:
    from mlpipe.observe.logs import Reader
    from mlpipe.spec.model import Pipeline
    from mlpipe.store.base import Store
    from mlpipe.store.runs import RunState
    from mlpipe.submit.backend import Backend
    from mlpipe.submit.delegate import Requested

TABLE = {
    "local": "mlpipe.submit.local:LocalBackend",
    "kubernetes": "mlpipe.submit.kubernetes:KubernetesBackend",
    "jenkins": "mlpipe.submit.jenkins:JenkinsBackend",
    "slurm": "mlpipe.submit.slurm:SlurmBackend",
    "rented": "mlpipe.submit.rented:RentedBackend",
}
DEFAULT = next(iter(TABLE))
GROUP = "mlpipe.backends"


def installed() -> dict[str, str]:
    """What other packages add: name -> `module:class`. The table's names stay ours."""
    from importlib.metadata import entry_points

    return {point.name: point.value for point in entry_points(group=GROUP) if point.name not in TABLE}


def load(name: str) -> type[Backend]:
    """Raises SubmitError (input) where there is none of this name, or it cannot be imported."""
    target = TABLE.get(name) or (others := installed()).get(name)
    if target is None:
        raise SubmitError(
            f"there is no backend {name!r}",
            hint=f"there are {', '.join([*TABLE, *others])}; a package adds one as an entry point of {GROUP}",
            kind="input",
        )
    module, _, attribute = target.partition(":")
    try:
        backend: type[Backend] = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise SubmitError(
            f"the backend {name!r} cannot be loaded: {error}", where=target, kind="input"
        ) from error
    return backend


def with_options(chosen: type[Backend], pipeline: Pipeline, options: Mapping[str, Any]) -> Backend:
    """Where `options` of `mlpipe submit`, without dashes, say. Raises SubmitError (input) for one that the
    backend does not have, and for one that it needs."""
    known = {option.name: option for option in chosen.options}
    if odd := sorted(options.keys() - known):
        words = f"it has {', '.join(known)}" if known else "it has none"
        raise SubmitError(f"{chosen.name} has no option {odd[0]!r}", hint=words, kind="input")
    if lacking := [
        option.name for option in known.values() if option.required and not options.get(option.name)
    ]:
        raise SubmitError(f"{chosen.name} needs {lacking[0]}", kind="input")
    given = {name: options.get(name, () if option.repeated else None) for name, option in known.items()}
    several = {name for name, value in given.items() if known[name].repeated and isinstance(value, str)}
    return chosen.of_submission(pipeline, {**given, **{name: (given[name],) for name in several}})


def of_run(run: RunState) -> Backend:
    """The one that the run was submitted to, as it was reached then."""
    return load(run.backend)(run.place)


def logs(
    store: Store,
    run: RunState,
    *,
    stage: str | None = None,
    rank: int | None = None,
    after: float | None = None,
) -> Reader:
    """Of a run, as its backend has them (`Backend.logs`); what the store has, where that is not installed."""
    try:
        backend = of_run(run)
    except SubmitError:
        from mlpipe.observe.logs import Reader

        return Reader(store, stage, rank, after)
    return backend.logs(store, stage=stage, rank=rank, after=after)


def takers(pipeline: Pipeline) -> list[str]:
    """Those of the table that can have the pipeline run, the one that its file says most for first."""
    return [name for name in reversed(TABLE) if load(name).takes(pipeline)]


def requested(store: Store, run_id: str) -> Requested | None:
    """What some backend was asked to make under this id, whether or not it has."""
    from mlpipe.submit.delegate import Delegate

    for name in _names():
        backend = load(name)
        if issubclass(backend, Delegate) and (request := backend.requested(store, run_id)) is not None:
            return request
    return None


def _names() -> Iterator[str]:
    """Of all backends; those of other packages are looked up once ours have been seen."""
    yield from TABLE
    yield from installed()


def awaited(store: Store, run_id: str) -> Requested | None:
    """The same, while the run is not there."""
    return None if store.exists(f"runs/{run_id}/run.json") else requested(store, run_id)


def give_up_driver(run_id: str, only: str | None) -> None:
    """For a driver that is about to fail of what no other driver can mend: whichever backend started it
    starts no other."""
    for name in TABLE:
        load(name).give_up_driver(run_id, only)
