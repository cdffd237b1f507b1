"""All objects of a run, ahead: those of its driver, then those that the driver will send for each stage."""

from __future__ import annotations

from typing import Any

from mlpipe._core.errors import PlanError, RenderError
from mlpipe._core.yaml import documents
from mlpipe.plan.ahead import plan_ahead
from mlpipe.render.kubernetes import driver_objects, stage_objects
from mlpipe.render.lint import lint, lint_patches
from mlpipe.spec.model import Pipeline
from mlpipe.store.open import full_url
from mlpipe.submit.submission import Console, Preview, Rendered, Submission

_HEAD = (
    "# Written by `mlpipe render`, for review: change the pipeline file, not this one.\n"
    "# `mlpipe submit` creates the driver, and the driver each stage when what it needs is done.\n"
)
Files = dict[str, list[dict[str, Any]]]


def manifests(submission: Submission, console: Console) -> Files:
    """File name -> objects. Raises PlanError, and RenderError for what cannot run; what else the lint finds
    is noted."""
    files, findings = _rendered(submission)
    _tell(findings, submission.spec, console)
    return files


def objects(submission: Submission) -> Files:
    """The same, of which nothing is told: the driver's file first. Raises PlanError, RenderError."""
    return _rendered(submission)[0]


def preview(files: Files) -> Preview:
    """The very objects, in the order in which they are sent."""
    return Preview(_bodies(files), documents(_bodies(files)).rstrip("\n"))


def _bodies(files: Files) -> list[dict[str, Any]]:
    return [body for of_file in files.values() for body in of_file]


def rendered(submission: Submission, console: Console) -> Rendered:
    """To commit: a file for the driver, and one for each stage that has objects."""
    files, findings = _rendered(submission)
    _tell(findings, submission.spec, console)
    about = {"run_id": _run_id(submission), "findings": findings}
    texts = {name: documents(bodies) for name, bodies in files.items()}
    first = next(iter(texts))
    texts[first] = _without_objects(submission.pipeline) + texts[first]
    return Rendered(
        files={name: _HEAD + text for name, text in texts.items()},
        preview=Preview({**about, "objects": _bodies(files)}, "".join(texts.values()).rstrip("\n")),
        about=about,
        head=_HEAD,
    )


def _without_objects(pipeline: Pipeline) -> str:
    """A comment for whoever looks for the objects of a stage that has none."""
    names = [stage.name for stage in pipeline.stages if stage.kind.runs == "driver"]
    return "".join(
        f"# Stage {name} is done in the driver's own process, so it has no objects.\n" for name in names
    )


def _run_id(submission: Submission) -> str:
    pipeline = submission.pipeline
    return submission.run_id or f"{pipeline.name[:40]}-{pipeline.digest[:8]}"


def _rendered(submission: Submission) -> tuple[Files, list[str]]:
    """The objects, and the findings of the lint."""
    pipeline, only, run_id = submission.pipeline, submission.stage, _run_id(submission)
    names = [stage.name for stage in pipeline.stages]
    if only is not None and only not in names:
        raise PlanError(f"the pipeline has no stage {only!r}", hint=f"it has {', '.join(names)}")
    store_url = full_url(submission.store_url)
    plans = [plan_ahead(pipeline, name, store_url, run_id, cluster=True) for name in names]
    staged = [stage_objects(plan) for plan in plans]
    if plans[0].cluster is None:
        raise RenderError("the pipeline says nothing of a cluster")
    driver = driver_objects(
        run_id,
        store_url,
        plans[0].cluster,
        stage=only,
        spec_digest=pipeline.digest,
        seal=submission.digests(),
    )
    pulls = []
    if plans[0].cluster.prepull:
        from mlpipe.render.prepull import prepull_objects  # of few runs

        pulls = prepull_objects(plans, waiting(pipeline, only), pipeline.digest)
    findings = [line for plan in plans if only in (None, plan.stage) for line in lint(plan)]
    findings = list(dict.fromkeys([*findings, *lint_patches(plans, [*staged, driver])]))
    width = max(2, len(str(len(plans))))
    files = {f"{0:0{width}}-driver.yaml": [*pulls, *driver]}
    for number, (plan, bodies) in enumerate(zip(plans, staged, strict=True), start=1):
        if bodies and only in (None, plan.stage):
            files[f"{number:0{width}}-{plan.stage}.yaml"] = bodies
    return files, findings


def waiting(pipeline: Pipeline, only: str | None) -> list[str]:
    """Stages of a run that start when others have ended; of a stage alone there are none."""
    return [stage.name for stage in pipeline.stages if stage.needs and only is None]


def _tell(findings: list[str], spec: str, console: Console) -> None:
    """Raises RenderError if one of them is an error."""
    wrong = [finding.removeprefix("error: ") for finding in findings if finding.startswith("error: ")]
    for finding in findings:
        if not finding.startswith("error: "):
            console.note(finding)
    if wrong:
        raise RenderError("; ".join(wrong), where=spec)
