"""MLflow by its REST interface (mlflow.org/docs/latest/rest-api.html), without its package.

A training is one run there, found again by its tags: a restart, and a resume elsewhere, go on in it. Values
that MLflow has are not told again, since it would keep both and can forget neither: of a step that was done
twice it shows the first.
"""

from __future__ import annotations

import base64
import json
import logging
import math
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import urllib3

from mlpipe._core.errors import MlpipeError
from mlpipe._core.records import Record, Save, Start
from mlpipe._core.retry import AwayError
from mlpipe.observe.tracking.tracker import TrackedRun, scalars

_log = logging.getLogger(__name__)
# Of one request, by MLflow's documentation: entities, parameters or tags of them, characters of a value.
_MOST_METRICS, _MOST_PARAMS, _MOST_CHARACTERS = 1000, 100, 5000
_MOST_OF_NAME = 250  # characters
_TRANSIENT = frozenset((408, 425, 429, 500, 502, 503, 504))
T = TypeVar("T")
_STATUS = {"done": "FINISHED", "saved": "KILLED", "failed": "FAILED"}


class RefusedError(MlpipeError):
    """MLflow understood and will not. `code`: its error_code."""

    kind = "infrastructure"

    def __init__(self, message: str, *, where: str, hint: str | None, code: str) -> None:
        super().__init__(message, where=where, hint=hint)
        self.code = code


class MlflowApi:
    """Its calls. Credentials come from MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and
    MLFLOW_TRACKING_PASSWORD. Raises AwayError or RefusedError."""

    def __init__(self, uri: str, environment: Mapping[str, str] | None = None) -> None:
        variables = os.environ if environment is None else environment
        self.uri = uri.rstrip("/")
        self._headers: dict[str, str] = {}
        user, password = variables.get("MLFLOW_TRACKING_USERNAME"), variables.get("MLFLOW_TRACKING_PASSWORD")
        if user and password:
            login = base64.b64encode(f"{user}:{password}".encode()).decode()
            self._headers["Authorization"] = f"Basic {login}"
        if token := variables.get("MLFLOW_TRACKING_TOKEN"):
            self._headers["Authorization"] = f"Bearer {token}"
        self._pool = urllib3.PoolManager(
            retries=False,
            timeout=urllib3.Timeout(connect=5.0, read=20.0),
            ca_certs=variables.get("MLFLOW_TRACKING_SERVER_CERT_PATH"),
        )

    def get(self, path: str, **query: str) -> dict[str, Any]:
        """The answer to a question."""
        words = "&".join(f"{name}={quote(value, safe='')}" for name, value in query.items())
        return self._call("GET", f"/api/2.0/mlflow/{path}?{words}", None)

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        """Has something done. All that is asked for here may be done twice."""
        return self._call("POST", f"/api/2.0/mlflow/{path}", json.dumps(body).encode())

    def upload(self, path: str, data: bytes) -> None:
        """An artifact, where the server takes them (`--serve-artifacts`, its default)."""
        self._call("PUT", f"/api/2.0/mlflow-artifacts/artifacts/{quote(path)}", data)

    def _call(self, method: str, path: str, body: bytes | None) -> dict[str, Any]:
        headers = {**self._headers, "Content-Type": "application/json" if method != "PUT" else "text/plain"}
        try:
            answer = self._pool.request(method, self.uri + path, body=body, headers=headers, redirect=False)
        except urllib3.exceptions.HTTPError as error:
            raise AwayError(_plain(error), applied=True) from None
        if answer.status in _TRANSIENT:
            raise AwayError(f"it answered {answer.status}", applied=True)
        try:
            document = json.loads(answer.data or b"{}")
        except ValueError:
            document = None
        if answer.status == 200 and isinstance(document, dict):
            return document
        said = document if isinstance(document, dict) else {}
        hint = None
        if answer.status in (401, 403):
            hint = "say who asks by MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and ..._PASSWORD"
        elif document is None or answer.status < 400:
            hint = "is this the address of an MLflow server?"
        message = str(said.get("message") or f"it answered {answer.status}")[:300]
        raise RefusedError(
            message, where=self.uri + path.partition("?")[0], hint=hint, code=str(said.get("error_code"))
        )

    def experiment(self, name: str) -> str:
        """Its id; made if there is none."""
        try:
            experiment = self.get("experiments/get-by-name", experiment_name=name)["experiment"]
        except RefusedError as error:
            if error.code != "RESOURCE_DOES_NOT_EXIST":
                raise
        else:
            if experiment.get("lifecycle_stage") == "deleted":
                words = f"the experiment {name!r} was deleted"
                raise RefusedError(words, where=self.uri, hint="restore it, or name another", code="deleted")
            return str(experiment["experiment_id"])
        try:
            return str(self.post("experiments/create", name=name)["experiment_id"])
        except RefusedError as error:
            if error.code != "RESOURCE_ALREADY_EXISTS":
                raise
            return self.experiment(name)  # another run was quicker

    def find_run(self, experiment: str, run_id: str, stage: str) -> dict[str, Any] | None:
        """The run of a training, with its `info` and `data`."""
        wanted = f"tags.`mlpipe.run_id` = '{run_id}' and tags.`mlpipe.stage` = '{stage}'"
        runs = self.post(
            "runs/search",
            experiment_ids=[experiment],
            filter=wanted,
            max_results=1,
            order_by=["start_time ASC"],
        ).get("runs")
        return runs[0] if runs else None


class Mlflow:
    """`settings`: `uri`, `experiment`. Without a uri MLFLOW_TRACKING_URI says where the server is."""

    name = "mlflow"

    def __init__(self, settings: Mapping[str, Any], run: TrackedRun) -> None:
        self._api = MlflowApi(uri_of(settings))
        self._experiment = settings.get("experiment") or run.pipeline
        self._run = run
        self._id = ""
        self._artifacts: str | None = None  # where the server takes files
        self._known: dict[str, int] = {}  # by metric the last step that MLflow has
        self._has_warned = False
        self.where = self._api.uri
        self.url: str | None = None

    def begin(self, start: Start) -> int:
        """Finds the run, or makes it."""
        run = self._run
        experiment = self._api.experiment(self._experiment)
        mlflow_run = self._api.find_run(experiment, run.run_id, run.stage)
        if mlflow_run is None:
            tags = {"mlpipe.run_id": run.run_id, "mlpipe.stage": run.stage, "mlpipe.store": run.store_url}
            mlflow_run = self._api.post(
                "runs/create",
                experiment_id=experiment,
                run_name=f"{run.run_id}/{run.stage}",
                start_time=_milliseconds(start.time),
                tags=_pairs(tags),
            )["run"]
        info, data = mlflow_run["info"], mlflow_run.get("data", {})
        self._id = info["run_id"]
        self._known = {one["key"]: int(one.get("step", 0)) for one in data.get("metrics", ())}
        self.url = f"{self._api.uri}/#/experiments/{experiment}/runs/{self._id}"
        target = urlsplit(info.get("artifact_uri", ""))
        self._artifacts = target.path.strip("/") if target.scheme == "mlflow-artifacts" else None
        self._api.post("runs/update", run_id=self._id, status="RUNNING")
        self._describe(start, {one["key"]: one["value"] for one in data.get("params", ())})
        return self._known.get("train/loss", 0)

    def log(self, records: Sequence[Record]) -> None:
        """In as few requests as MLflow allows."""
        metrics: list[dict[str, Any]] = [
            {"key": name, "value": _number(value), "timestamp": _milliseconds(record.time), "step": step}
            for record in records
            for name, value in _named(scalars(record)).items()
            if (step := getattr(record, "step", None) or 0) > self._known.get(name, -1)
        ]
        for first in range(0, len(metrics), _MOST_METRICS):
            self._batch(metrics=metrics[first : first + _MOST_METRICS])
        for record in records:
            if isinstance(record, Save) and record.error is None and record.key:
                self._tag({"mlpipe.checkpoint": record.key, "mlpipe.checkpoint_step": str(record.step)})
            if sample := getattr(record, "sample", None):
                self._file(f"samples/step-{getattr(record, 'step', 0)}.txt", sample)
        for one in metrics:
            self._known[one["key"]] = max(self._known.get(one["key"], -1), one["step"])

    def end(self, outcome: str) -> None:
        """Sets the run's status."""
        status = _STATUS.get(outcome, "FAILED")
        self._api.post("runs/update", run_id=self._id, status=status, end_time=_milliseconds(time.time()))

    def _describe(self, start: Start, there: Mapping[str, str]) -> None:
        """What was decided. A parameter cannot change there: what a resume decided otherwise is a tag."""
        params = _named({name: value[:_MOST_CHARACTERS] for name, value in self._run.params.items()})
        fresh = {name: value for name, value in params.items() if name not in there}
        for some in _parts(fresh.items(), _MOST_PARAMS):
            self._batch(params=_pairs(dict(some)))
        changed = {
            f"mlpipe.now.{name}": value for name, value in params.items() if there.get(name, value) != value
        }
        tags = {"mlpipe.attempt": str(self._run.attempt), "mlpipe.restart": str(start.restart)}
        if start.resumed_from:
            tags["mlpipe.resumed_from"] = start.resumed_from
        self._tag({**tags, **changed})
        self._file("pipeline.yaml", self._run.config)
        self._file(f"plan-attempt-{self._run.attempt}.json", self._run.plan)

    def _tag(self, tags: Mapping[str, str]) -> None:
        for some in _parts(_named(tags).items(), _MOST_PARAMS):
            self._batch(tags=_pairs(dict(some)))

    def _batch(self, **some: Any) -> None:
        """One that MLflow finds wrong is left out, with a word the first time: the next may be right."""
        try:
            self._api.post("runs/log-batch", run_id=self._id, **some)
        except RefusedError as error:
            if error.code != "INVALID_PARAMETER_VALUE":
                raise
            self._left_out(", ".join(some), error)

    def _left_out(self, what: str, error: RefusedError) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "mlflow at %s does not take some %s, which are left out: %s", self.where, what, error
            )

    def _file(self, name: str, text: str) -> None:
        """Left out where MLflow keeps files in a store of its own; the store of the run has them."""
        if self._artifacts is not None and text:
            try:
                self._api.upload(f"{self._artifacts}/{name}", text.encode())
            except RefusedError as error:
                self._left_out("files", error)


def uri_of(settings: Mapping[str, Any]) -> str:
    """Of the server. Raises MlpipeError (input) if nobody says."""
    uri = settings.get("uri") or os.environ.get("MLFLOW_TRACKING_URI", "")
    parts = urlsplit(uri)
    if parts.scheme in ("http", "https") and parts.hostname and parts.username is None:
        return str(uri)
    what = (
        f"MLFLOW_TRACKING_URI is {uri!r}"
        if uri and parts.username is None
        else "nothing says where MLflow is"
    )
    if parts.username is not None:
        what = "MLFLOW_TRACKING_URI holds a login"
    hint = "write `track: [{mlflow: {uri: http://mlflow.example.com:5000}}]`, or export MLFLOW_TRACKING_URI; "
    hint += "a login goes into MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
    raise MlpipeError(what, where="track: mlflow", hint=hint, kind="input")


def name_of(name: str) -> str:
    """What MLflow takes in its place: letters, digits and `_-. /` of a path without empty parts, 250 of them
    (mlflow/utils/validation.py)."""
    allowed = re.sub(r"[^\w./ -]", "_", name)[:_MOST_OF_NAME]
    return "/".join(part for part in allowed.split("/") if part not in ("", ".", "..")).lstrip("./") or "_"


def _named(values: Mapping[str, T]) -> dict[str, T]:
    """By names that MLflow takes; of two that become the same the first."""
    renamed: dict[str, T] = {}
    for name, value in values.items():
        renamed.setdefault(name_of(name), value)
    return renamed


def _pairs(values: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"key": key, "value": value[:_MOST_CHARACTERS]} for key, value in values.items()]


def _parts(items: Iterable[tuple[str, str]], size: int) -> list[list[tuple[str, str]]]:
    known = list(items)
    return [known[first : first + size] for first in range(0, len(known), size)]


def _number(value: float) -> float | str:
    """As the JSON of protocol buffers has it: what is not finite is a word."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _milliseconds(seconds: float) -> int:
    return round(1000 * seconds)


def _plain(error: Exception) -> str:
    """The innermost reason: urllib3 wraps it, with the pool and the URL."""
    while isinstance(inner := getattr(error, "reason", None), Exception):
        error = inner
    return str(error).rpartition(": ")[2]
