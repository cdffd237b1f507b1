"""Names and labels of a run's objects on a cluster: deterministic, valid, and never those of another run.

A run id or stage may hold what a DNS label may not, and names joined by '-' can meet ("a-b" + "c" and "a" +
"b-c"). So a name ends in a digest of its parts, after an 'x', unless it says them plainly: then its last
part is none that could be one, and the part before it has no '-'.
"""

from __future__ import annotations

import hashlib
import re

import mlpipe
from mlpipe.plan.plan import Plan

# A pod of a JobSet is named <gang>-worker-0-<index>-<5 random characters> and may have 63 characters; the
# index has at most 5 digits (the spec's bound of 100,000 nodes).
MAX_NAME = 63 - len("-worker-0-99999-abcde")
PREFIX = "mlpipe.dev"
RUN, STAGE, ATTEMPT = f"{PREFIX}/run", f"{PREFIX}/stage", f"{PREFIX}/attempt"
REPLICA = f"{PREFIX}/replica"  # label: the number of a replica of an elastic training
PULLS = f"{PREFIX}/pulls"  # label: of pods that fetch the image of this stage
SPEC_DIGEST = f"{PREFIX}/spec-digest"  # annotation: of the object itself, see `render/kubernetes.py`
PLAN = f"{PREFIX}/plan"  # annotation: of a pod that brings its plan along
VERSION = "app.kubernetes.io/version"  # label: of the mlpipe that made it
PIPELINE_DIGEST = f"{PREFIX}/pipeline-digest"  # annotation: of the resolved pipeline
QUEUE = "kueue.x-k8s.io/queue-name"  # label: Kueue's LocalQueue
_LABEL_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")


def gang_name(plan: Plan) -> str:
    """Of the Job or JobSet of this attempt, and of its Service."""
    return _name(plan.run_id, plan.stage, f"a{plan.attempt}")


def driver_name(run_id: str, stage: str | None = None) -> str:
    """Of the driver's Job: of a run, or of one stage of it that was submitted alone."""
    return _name(run_id, "driver") if stage is None else _name(run_id, stage, "driver", plain=False)


def pull_name(run_id: str, stage: str) -> str:
    """With which the Job begins that fetches the stage's image ahead."""
    return _name(run_id, stage, "pull", plain=False)


def config_name(name: str, text: str) -> str:
    """Of the ConfigMap that holds `text`, for the gang `name`."""
    return f"{name}-plan-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def labels(run_id: str, stage: str | None, attempt: int | None, component: str) -> dict[str, str]:
    """`component`: worker or driver. What is no label's value becomes one; select by what this gives."""
    values = {
        "app.kubernetes.io/name": "mlpipe",
        "app.kubernetes.io/instance": label_value(run_id),
        VERSION: label_value(mlpipe.__version__),
        "app.kubernetes.io/component": component,
        "app.kubernetes.io/part-of": "mlpipe",
        "app.kubernetes.io/managed-by": "mlpipe",
        RUN: label_value(run_id),
    }
    if stage is not None:
        values[STAGE] = label_value(stage)
    if attempt is not None:
        values[ATTEMPT] = str(attempt)
    return values


def label_value(text: str) -> str:
    """`text` where it may be the value of a label, else what is left of it and a digest of the whole."""
    if _LABEL_VALUE.fullmatch(text) and not re.search(r"\.x[0-9a-f]{8}$", text):
        return text
    return re.sub(r"[^A-Za-z0-9._-]", "-", text)[:53].strip("._-") + ".x" + _digest(text)


def _name(*parts: str, plain: bool = True) -> str:
    text = "-".join(parts)
    said = re.fullmatch(r"[a-z][a-z0-9-]*", text) and all("-" not in part for part in parts[1:])
    if plain and said and len(text) <= MAX_NAME:
        return text
    digest = f"-x{_digest(*parts)}"
    room = MAX_NAME - len(digest)
    clean = re.sub(r"[^a-z0-9]+", "-", text.lower())
    if not clean[:1].isalpha():
        clean = f"r-{clean.lstrip('-')}"
    if len(clean) > room:  # the end says the stage and the attempt
        keep = re.sub(r"[^a-z0-9]+", "-", "-".join(parts[1:]).lower())[-room // 2 :].lstrip("-")
        clean = f"{clean[: room - len(keep) - 1].rstrip('-')}-{keep}"
    return clean.rstrip("-") + digest


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:8]
