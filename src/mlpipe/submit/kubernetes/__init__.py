"""The backend `kubernetes`: a stage is a JobSet, TrainJob or Job with its ConfigMap; the driver is a Job."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mlpipe._core.errors import MlpipeError, SubmitError
from mlpipe.submit.backend import Backend
from mlpipe.submit.submission import (
    Availability,
    Console,
    Finding,
    Option,
    Preview,
    Rendered,
    Submission,
    refuse_sweep,
)

if TYPE_CHECKING:
    from mlpipe.plan.hardware import Hardware
    from mlpipe.spec.model import Pipeline
    from mlpipe.store.base import Store
    from mlpipe.store.runs import Lease, RunState
    from mlpipe.submit.executor import Executor
    from mlpipe.submit.kubernetes.api import ClusterApi

_CONTEXT = Option("--context", "NAME", "Of the kubeconfig. Default: its current one.")


class KubernetesBackend(Backend):
    """A namespace of a cluster. `place`: `context` of the kubeconfig, and `namespace`; None: the current
    ones."""

    name = "kubernetes"
    options = (_CONTEXT,)
    doctor_options = (_CONTEXT, Option("--namespace", "NAME", "Default: the context's."))
    has_server_dry_run = True
    renders = True
    outlives_driver = True
    has_own_driver = True

    @classmethod
    def of_submission(cls, pipeline: Pipeline, options: Mapping[str, Any]) -> Backend:
        namespace = pipeline.kubernetes.namespace if pipeline.kubernetes else None
        return cls({"context": options.get("context"), "namespace": namespace})

    @classmethod
    def of_driver(cls, run: RunState, pipeline: Pipeline) -> Backend:
        """In its pod, where the submitter's contexts are not known."""
        return cls.of_submission(pipeline, {})

    @classmethod
    def takes(cls, pipeline: Pipeline) -> bool:
        return pipeline.image is not None

    @cached_property
    def api(self) -> ClusterApi:
        """Raises SubmitError (input)."""
        from mlpipe.submit.kubernetes.api import connect

        return connect(self.place.get("context"), self.place.get("namespace"))

    def preview(self, submission: Submission, console: Console, *, on_server: bool = False) -> Preview:
        from mlpipe.submit.kubernetes import manifests

        files = manifests.manifests(submission, console)
        if on_server:
            from mlpipe.submit.kubernetes import objects  # which imports what speaks to servers

            bodies = [body for some in files.values() for body in some]
            objects.server_dry_run(self.api, bodies, console.note)
        return manifests.preview(files)

    def check(self, submission: Submission, console: Console, *, is_new: bool) -> None:
        """A refusal by the cluster leaves no run behind."""
        self.preview(submission, console, on_server=True)
        self.place = {"context": self.api.context, "namespace": self.api.namespace}

    def availability(self, submission: Submission) -> Availability:
        from mlpipe.submit.kubernetes import availability, manifests

        _, *stages = manifests.objects(submission).values()
        return availability.availability(self.api, [body for bodies in stages for body in bodies])

    def hardware(self, pipeline: Pipeline, stage: str) -> Hardware:
        from mlpipe.plan.build import stage_hardware

        return stage_hardware(pipeline, stage, cluster=True)

    def executor(self, store: Store, run: RunState, holder: str) -> Executor:
        from mlpipe.submit.kubernetes.executor import KubernetesExecutor

        return KubernetesExecutor(store, self.api)

    def clear(self, store: Store, run: RunState, *, timeout_seconds: float) -> None:
        from mlpipe.submit.kubernetes.objects import clear, is_anothers

        if is_anothers(self.api, run.run_id, store.url):
            return
        running = [run.attempt_key(name) for name, stage in run.stages.items() if stage.state == "running"]
        clear(
            self.api,
            run.run_id,
            timeout_seconds=timeout_seconds,
            have_said=lambda: all(store.exists(f"{key}/outcome.json") for key in running),
        )

    def start_driver(self, store: Store, run: RunState, pipeline: Pipeline, only: str | None) -> None:
        from mlpipe.submit import seal
        from mlpipe.submit.kubernetes.driver_job import start_driver

        digests = seal.vouched(store, run, pipeline).digests()
        start_driver(self.api, store, run, pipeline, only=only, seal=digests)

    def driver_is_alive(self, run_id: str, only: str | None) -> bool:
        from mlpipe.submit.kubernetes.driver_job import driver_is_alive

        return driver_is_alive(self.api, run_id, only)

    def await_end_of_driver(self, store: Store, run_id: str, only: str | None) -> RunState:
        from mlpipe.submit.kubernetes.driver_job import await_end_of_driver

        return await_end_of_driver(self.api, store, run_id, only)

    def lease_is_dead(self, lease: Lease) -> bool:
        from mlpipe.submit.kubernetes.driver_job import pod_has_ended

        try:
            return bool(lease.pod) and pod_has_ended(self.api, lease.pod, lease.pod_uid)
        except SubmitError:
            return False

    def why_undriven(self, store: Store, run: RunState) -> str:
        from mlpipe.submit.kubernetes.driver_job import why_undriven

        try:
            return why_undriven(self.api, run.run_id)
        except MlpipeError as error:
            return f"its driver cannot be looked for: {error.message}"

    @classmethod
    def give_up_driver(cls, run_id: str, only: str | None) -> None:
        from mlpipe.submit.kubernetes.driver_job import give_up_driver

        give_up_driver(run_id, only)

    def doctor(self, store: Iterable[Finding]) -> Iterator[Finding]:
        from mlpipe.submit.kubernetes.doctor import examine

        yield from examine(self.place.get("context"), self.place.get("namespace"), store)

    def render(self, submission: Submission, console: Console) -> Rendered:
        from mlpipe.submit.kubernetes.manifests import rendered

        refuse_sweep(submission, "manifests")
        return rendered(submission, console)
