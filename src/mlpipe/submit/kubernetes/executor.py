"""Starts stages on a cluster: a gang, or an elastic training's replicas."""

from __future__ import annotations

from pathlib import Path

from mlpipe.plan.plan import Plan
from mlpipe.render.kubernetes import stage_objects
from mlpipe.store.base import Store
from mlpipe.submit.executor import Slots
from mlpipe.submit.kubernetes.api import ClusterApi
from mlpipe.submit.kubernetes.gang import Gang


class KubernetesExecutor:
    """Starts stages in the namespace of `api`. They go on when the driver dies."""

    def __init__(self, store: Store, api: ClusterApi) -> None:
        self._store = store
        self._api = api

    def capacity(self) -> Slots:
        """The cluster's scheduler knows better."""
        return Slots(cpus=2**31, gpus=2**31)

    def check(self, plan: Plan) -> None:
        """Raises RenderError for what can never run on a cluster."""
        stage_objects(plan)

    def start(self, plan: Plan, scratch: Path) -> Gang:
        if plan.launch.replicas is not None:
            from mlpipe.submit.kubernetes.replicas import ReplicaJobs

            return ReplicaJobs(self._store, self._api, plan)
        return Gang(self._store, self._api, plan)
