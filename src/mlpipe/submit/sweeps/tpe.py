"""Values that Optuna's tree-structured Parzen estimator suggests (Bergstra et al., NeurIPS 2011) from what
the trials before have found. Its study is made anew for each suggestion, out of what the store has of them:
a controller that takes over suggests what the one before it would have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mlpipe._core.errors import SubmitError
from mlpipe.spec.sweep import Choices, Interval, Sweep
from mlpipe.spec.trials import axes, rounded

Known = tuple[Mapping[str, Any], float | None]  # values of a trial; its metric, None while it runs


def suggest(sweep: Sweep, number: int, known: Iterable[Known]) -> dict[str, Any]:
    """Of the trial of this number. The first ten are drawn. Raises SubmitError (input) without Optuna."""
    try:
        import optuna
    except ImportError:
        raise SubmitError(
            "method tpe needs Optuna, which is not installed",
            hint="pip install 'mlpipe[optuna]', or write method: random",
            kind="input",
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    spread = axes(sweep)
    distributions = {key: _distribution(optuna.distributions, axis) for key, axis in spread.items()}
    study = optuna.create_study(
        direction="maximize" if sweep.metric.direction == "max" else "minimize",
        sampler=optuna.samplers.TPESampler(seed=sweep.seed + number, constant_liar=True),
    )
    for values, value in known:
        state = optuna.trial.TrialState.RUNNING if value is None else optuna.trial.TrialState.COMPLETE
        params = {key: _encoded(axis, values[key]) for key, axis in spread.items()}
        study.add_trial(
            optuna.trial.create_trial(state=state, value=value, params=params, distributions=distributions)
        )
    params = study.ask(fixed_distributions=distributions).params
    return {key: _decoded(axis, params[key]) for key, axis in spread.items()}


def _distribution(distributions: Any, axis: Choices | Interval) -> Any:
    """A choice by its number: Optuna takes no mappings."""
    if isinstance(axis, Choices):
        return distributions.CategoricalDistribution(list(range(len(axis.values))))
    kind = distributions.IntDistribution if axis.is_whole else distributions.FloatDistribution
    return kind(axis.low, axis.high, log=axis.log)


def _encoded(axis: Choices | Interval, value: Any) -> Any:
    return list(axis.values).index(value) if isinstance(axis, Choices) else value


def _decoded(axis: Choices | Interval, param: Any) -> Any:
    return axis.values[param] if isinstance(axis, Choices) else rounded(axis, param)
