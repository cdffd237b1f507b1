"""A promoted model in MLflow's registry: a version there beside ours, under the same alias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlpipe._core.retry import AwayError, Tries
from mlpipe.observe.tracking.mlflow import MlflowApi, RefusedError, uri_of
from mlpipe.store.registry import Model

_SECONDS = 30.0


def register(
    settings: Mapping[str, Any], experiment: str, store_url: str, model: Model, alias: str | None
) -> str:
    """Adds `model` unless it is there, and points `alias` at it. Returns the version's page. `experiment`: of
    the run that it comes from, unless `settings` name one. Raises AwayError or MlpipeError."""
    api = MlflowApi(uri_of(settings))
    tries = Tries(_SECONDS)
    while True:
        try:
            return _register(api, settings.get("experiment") or experiment, store_url, model, alias)
        except AwayError as error:
            if not tries.again(error):
                raise


def _register(api: MlflowApi, experiment: str, store_url: str, model: Model, alias: str | None) -> str:
    lineage = model.lineage
    run = api.find_run(api.experiment(experiment), str(lineage.get("run")), str(lineage.get("stage")))
    try:
        api.post("registered-models/create", name=model.name)
    except RefusedError as error:
        if error.code != "RESOURCE_ALREADY_EXISTS":
            raise
    source = source_of(store_url, model.key)
    there = api.get("model-versions/search", filter=f"name='{model.name}'").get("model_versions", ())
    version = next((one["version"] for one in there if one.get("source") == source), None)
    if version is None:
        tags = {
            "mlpipe.version": model.version,
            "mlpipe.step": model.step,
            "mlpipe.run_id": lineage.get("run"),
        }
        version = api.post(
            "model-versions/create",
            name=model.name,
            source=source,
            tags=[{"key": key, "value": str(value)} for key, value in tags.items()],
            description=f"Version {model.version} of {store_url}: step {model.step}, {lineage.get('run')}.",
            **({"run_id": run["info"]["run_id"]} if run is not None else {}),
        )["model_version"]["version"]
    if alias is not None:
        api.post("registered-models/alias", name=model.name, alias=alias, version=str(version))
    return f"{api.uri}/#/models/{model.name}/versions/{version}"


def source_of(store_url: str, key: str) -> str:
    """Where the version lies. MLflow takes no path of a machine that is not its own, so a folder says whose
    it is."""
    return f"{store_url}/{key}" if "://" in store_url else f"mlpipe:{store_url}/{key}"
