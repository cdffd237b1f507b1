"""What the keys of a store need be allowed: IAM policy documents, which AWS and MinIO both take.

Workers run code of users. They write below their run's `stages/` only, each kind of thing in its place: not
the pipeline, the run's state, a stage's plan, another run, the index or a model.
"""

from __future__ import annotations

from typing import Any, Literal

from mlpipe._core.errors import StoreError
from mlpipe._core.ids import BUCKET_RULE, is_bucket, is_name

Who = Literal["worker", "driver"]
# below runs/<run>/stages/<stage>/; of an attempt not its plan.json
_WORKERS_WRITE = (
    "checkpoints/*",
    "outputs/*",
    "tensorboard/*",
    "attempt-*/logs/*",
    "attempt-*/records/*",
    "attempt-*/postmortem/*",
    "attempt-*/profiles/*",
    "attempt-*/events.jsonl/*",
    "attempt-*/outcome*.json",
    "attempt-*/coordinator",
    "attempt-*/preflight.json",
    "attempt-*/preflight/*",
)


def policy(url: str, who: Who, run_id: str | None = None) -> dict[str, Any]:
    """The document for the store at `url`, s3://bucket/prefix. `run_id`: a worker of this run alone; None:
    of any run there. Raises StoreError (input)."""
    bucket, _, prefix = url.removeprefix("s3://").strip("/").partition("/")
    if not url.startswith("s3://") or not is_bucket(bucket):
        hint = f"give --store s3://bucket/prefix; {BUCKET_RULE}"
        raise StoreError(f"{url!r} names no bucket", hint=hint, kind="input")
    if any(sign in url for sign in "*?$"):
        raise StoreError(f"{url!r} means more than one store in a policy", kind="input")
    if run_id is not None and not is_name(run_id):
        raise StoreError(f"{run_id!r} is not a run id", hint="use a-z, 0-9, '.', '_' and '-'", kind="input")
    if who == "driver" and run_id is not None:
        raise StoreError("a driver's policy is of all runs", hint="leave --run out", kind="input")
    top = f"{prefix}/" if prefix else ""
    run = f"{top}runs/{run_id or '*'}"
    if who == "driver":
        read, write = [f"{top}*"], [f"{top}*"]
    else:
        read, write = [f"{run}/*"], [f"{run}/stages/*/{place}" for place in _WORKERS_WRITE]
    bucket_arn = f"arn:aws:s3:::{bucket}"
    return {
        "Version": "2012-10-17",
        "Statement": [
            {
                "Sid": "List",
                "Effect": "Allow",
                "Action": ["s3:ListBucket"],
                "Resource": [bucket_arn],
                "Condition": {"StringLike": {"s3:prefix": read}},
            },
            {
                "Sid": "Read",
                "Effect": "Allow",
                "Action": ["s3:GetObject"],
                "Resource": [f"{bucket_arn}/{key}" for key in read],
            },
            {
                "Sid": "Write",
                "Effect": "Allow",
                "Action": ["s3:PutObject", "s3:DeleteObject"],
                "Resource": [f"{bucket_arn}/{key}" for key in write],
            },
        ],
    }
