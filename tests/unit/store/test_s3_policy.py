"""The documents' form; that they do what they say: tests/services/test_s3_keys.py, on a real MinIO."""

from __future__ import annotations

import json

import pytest

from mlpipe._core.errors import StoreError
from mlpipe.store.s3_policy import policy

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("url", "run_id", "readable"),
    [
        ("s3://bkt/team/x", "r", "team/x/runs/r/*"),
        ("s3://bkt/team/x/", None, "team/x/runs/*/*"),
        ("s3://bkt", "r", "runs/r/*"),
    ],
)
def test_a_workers_policy_names_its_run(url, run_id, readable):
    listed, read, written = policy(url, "worker", run_id)["Statement"]
    assert listed["Condition"] == {"StringLike": {"s3:prefix": [readable]}}
    assert read["Resource"] == [f"arn:aws:s3:::bkt/{readable}"]
    assert all(key.startswith(f"arn:aws:s3:::bkt/{readable[:-1]}stages/*/") for key in written["Resource"])


def test_a_drivers_policy_is_all_below_the_stores_prefix_and_no_more():
    """The whole document, as IAM spells it; and where a worker may write."""
    arn = "arn:aws:s3:::bkt"
    allow = {"Effect": "Allow"}
    assert policy("s3://bkt/team", "driver") == {
        "Version": "2012-10-17",
        "Statement": [
            {
                "Sid": "List", **allow, "Action": ["s3:ListBucket"], "Resource": [arn],
                "Condition": {"StringLike": {"s3:prefix": ["team/*"]}},
            },
            {"Sid": "Read", **allow, "Action": ["s3:GetObject"], "Resource": [f"{arn}/team/*"]},
            {
                "Sid": "Write", **allow, "Action": ["s3:PutObject", "s3:DeleteObject"],
                "Resource": [f"{arn}/team/*"],
            },
        ],
    }  # fmt: skip
    below = f"{arn}/runs/*/stages/*"
    assert policy("s3://bkt", "worker")["Statement"][2]["Resource"] == [
        f"{below}/checkpoints/*", f"{below}/outputs/*", f"{below}/tensorboard/*", f"{below}/attempt-*/logs/*",
        f"{below}/attempt-*/records/*", f"{below}/attempt-*/postmortem/*",
        f"{below}/attempt-*/profiles/*", f"{below}/attempt-*/events.jsonl/*",
        f"{below}/attempt-*/outcome*.json", f"{below}/attempt-*/coordinator",
        f"{below}/attempt-*/preflight.json", f"{below}/attempt-*/preflight/*",
    ]  # fmt: skip


def test_documents_fit_where_they_go():
    """A managed policy of AWS has at most 6,144 characters without white space."""
    for who in ("worker", "driver"):
        text = json.dumps(policy(f"s3://{'b' * 63}/{'p' * 200}", who), separators=(",", ":"))
        assert len(text) <= 6144


_BUCKET = "give --store s3://bucket/prefix; a bucket's name has 3 to 63 of"
_ID = "use a-z, 0-9, '.', '_' and '-'"


@pytest.mark.parametrize(
    ("url", "who", "run_id", "words", "hint"),
    [
        ("./runs", "driver", None, "'./runs' names no bucket", _BUCKET),
        ("s3://", "driver", None, "'s3://' names no bucket", _BUCKET),
        ("s3://b", "driver", None, "'s3://b' names no bucket", _BUCKET),
        ("s3://bkt/*", "driver", None, "'s3://bkt/*' means more than one store in a policy", ""),
        ("s3://bkt/a?", "driver", None, "'s3://bkt/a?' means more than one store in a policy", ""),
        ("s3://bkt/${jwt:sub}", "worker", None, "'s3://bkt/${jwt:sub}' means more than one store", ""),
        ("s3://bkt", "worker", "../x", "'../x' is not a run id", _ID),
        ("s3://bkt", "worker", "*", "'*' is not a run id", _ID),
        ("s3://bkt", "driver", "r", "a driver's policy is of all runs", "leave --run out"),
    ],
)
def test_what_would_open_more_than_asked_is_refused(url, who, run_id, words, hint):
    with pytest.raises(StoreError) as caught:
        policy(url, who, run_id)
    assert caught.value.kind == "input"
    assert caught.value.message.startswith(words)
    assert (caught.value.hint or "").startswith(hint)
