"""All scripts of a run, ahead: one for each stage that has a job."""

from __future__ import annotations

import time
from dataclasses import replace

from mlpipe._core.errors import PlanError, SubmitError
from mlpipe.plan.ahead import plan_ahead
from mlpipe.plan.plan import Plan
from mlpipe.plan.pods import host_bytes
from mlpipe.plan.slurm import SlurmJob, slurm_job
from mlpipe.plan.work import TrainPlan
from mlpipe.render.slurm import output_file, parts_of, script
from mlpipe.spec.model import Pipeline
from mlpipe.store.open import full_url
from mlpipe.submit.submission import Availability, Preview, Rendered, Submission

Files = dict[str, str]


def of_plan(pipeline: Pipeline, plan: Plan, part: str = "") -> str:
    """The script of one attempt, or of a part of it. Raises RenderError."""
    return script(plan, job_of(pipeline, plan), output_file(plan, part), part)


def job_of(pipeline: Pipeline, plan: Plan) -> SlurmJob:
    """What an attempt asks for. Raises PlanError."""
    job, train = slurm_job(pipeline, plan.stage, host_bytes(plan.work, plan.launch)), plan.part(TrainPlan)
    if train is not None and not train.resume:  # as a trial: another start would begin again, in its records
        job = replace(job, max_requeues=0)
    return job


def scripts(submission: Submission) -> Files:
    """File name -> script. Raises PlanError, RenderError."""
    pipeline, only = submission.pipeline, submission.stage
    run_id = submission.run_id or f"{pipeline.name[:40]}-{pipeline.digest[:8]}"
    names = [stage.name for stage in pipeline.stages]
    if only is not None and only not in names:
        raise PlanError(f"the pipeline has no stage {only!r}", hint=f"it has {', '.join(names)}")
    store_url = full_url(submission.store_url)
    width = max(2, len(str(len(names))))
    files = {}
    for number, name in enumerate(names, start=1):
        plan = plan_ahead(pipeline, name, store_url, run_id, cluster=True)
        if plan.kind.runs != "driver" and only in (None, name):
            for part in parts_of(plan):
                file = f"{number:0{width}}-{name}{'-' if part else ''}{part}.sbatch"
                files[file] = of_plan(pipeline, plan, part)
    return files


def preview(files: Files) -> Preview:
    """The very scripts, in the order in which they are sent."""
    return Preview(list(files.values()), "\n".join(files.values()).rstrip("\n"))


def rendered(submission: Submission) -> Rendered:
    """To commit: a file for each stage."""
    files = scripts(submission)
    shown = preview(files)
    return Rendered(files=files, preview=Preview({"scripts": shown.document}, shown.text))


def server_dry_run(files: Files, folder: str) -> None:
    """Raises SubmitError for what Slurm refuses, before anything is written down anywhere."""
    from mlpipe.submit.slurm import client  # which nobody needs who only renders

    for name, text in files.items():
        try:
            client.submit(text, folder, test_only=True)
        except SubmitError as error:
            error.where = error.where or name
            raise


def availability(files: Files, folder: str) -> Availability:
    """As the controller would start the jobs, were all of them submitted now: the last of them counts. Raises
    SubmitError."""
    from mlpipe.submit.slurm import client

    starts = [client.earliest_start(text, folder) for text in files.values()]
    known = [start for start in starts if start is not None]
    if len(known) < len(starts):
        return Availability(None, "Slurm does not say when its jobs would start")
    wait_seconds = max(0.0, max(known, default=0.0) - time.time())
    return Availability(wait_seconds, "by Slurm's own estimate" if files else "nothing of it needs a job")
