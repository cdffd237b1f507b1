"""Keys of the store for a rented machine, whose owner sees all that is on it: of one run, for a while.

Those that are lent by the store's token service (STS AssumeRole, with the worker's policy of `s3_policy` for
the session), or those that a user has made and exports for it. Never the driver's own.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from urllib.parse import urlsplit

from mlpipe._core import environment
from mlpipe._core.errors import SubmitError
from mlpipe.store.s3_policy import policy

_NAMES = {
    "AWS_ACCESS_KEY_ID": environment.WORKER_ACCESS_KEY_ID,
    "AWS_SECRET_ACCESS_KEY": environment.WORKER_SECRET_ACCESS_KEY,
    "AWS_SESSION_TOKEN": environment.WORKER_SESSION_TOKEN,
}
_PASSED = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_REGION", "AWS_DEFAULT_REGION")
_SHORTEST_SECONDS = 3600  # that a token service lends for
_LONGEST_AWS_SECONDS = 12 * 3600.0  # of a role whose MaxSessionDuration says so


def worker_environment(
    store_url: str, run_id: str, seconds: float, env: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """What a machine is given to reach the run in the store for `seconds`; nothing for a folder, which only a
    machine of a test can see. Raises SubmitError (input) where nobody lends keys."""
    if not store_url.startswith("s3://"):
        return {}
    passed = {name: env[name] for name in _PASSED if env.get(name)}
    own = {name: env[given] for name, given in _NAMES.items() if env.get(given)}
    if own:
        return {**passed, **own}
    return {**passed, **_lent(store_url, run_id, seconds, env)}


def longest_seconds(store_url: str, env: Mapping[str, str] = os.environ) -> float:
    """For which the store's token service lends keys at most."""
    lends = store_url.startswith("s3://") and not env.get(environment.WORKER_ACCESS_KEY_ID)
    return _LONGEST_AWS_SECONDS if lends and _is_aws(_endpoint(env)) else math.inf


def _endpoint(env: Mapping[str, str]) -> str:
    return env.get("AWS_ENDPOINT_URL_S3") or env.get("AWS_ENDPOINT_URL") or ""


def _is_aws(endpoint: str) -> bool:
    return not endpoint or (urlsplit(endpoint).hostname or "").endswith(".amazonaws.com")


def _lent(store_url: str, run_id: str, seconds: float, env: Mapping[str, str]) -> dict[str, str]:
    import urllib3
    from minio.credentials.providers import AssumeRoleProvider

    from mlpipe.store.s3_timely import timely_pool

    region = env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION") or "us-east-1"
    store = _endpoint(env)
    is_aws = _is_aws(store)
    endpoint = env.get("AWS_ENDPOINT_URL_STS") or (f"https://sts.{region}.amazonaws.com" if is_aws else store)
    hint = (
        "export keys that `mlpipe doctor --for s3-policy --of worker` describes, as "
        f"{environment.WORKER_ACCESS_KEY_ID} and {environment.WORKER_SECRET_ACCESS_KEY}; or on AWS a role, "
        f"as {environment.WORKER_ROLE_ARN}"
    )
    try:
        keys = AssumeRoleProvider(
            sts_endpoint=endpoint,
            access_key=env.get("AWS_ACCESS_KEY_ID", ""),
            secret_key=env.get("AWS_SECRET_ACCESS_KEY", ""),
            duration_seconds=max(_SHORTEST_SECONDS, int(seconds)),
            policy=json.dumps(policy(store_url, "worker", run_id)),
            region=region,
            role_arn=env.get(environment.WORKER_ROLE_ARN) if is_aws else None,
            role_session_name=f"mlpipe-{run_id}"[:64] if is_aws else None,
            http_client=timely_pool(timeout=30.0, retries=2, ca_certs=env.get("AWS_CA_BUNDLE")),
        ).retrieve()
    except (ValueError, KeyError, AttributeError, urllib3.exceptions.HTTPError) as error:
        words = str(error).partition("\n")[0][:200]
        raise SubmitError(
            f"the token service lends no keys for a machine: {words}", where=endpoint, hint=hint, kind="input"
        ) from None
    lent = zip(_NAMES, (keys.access_key, keys.secret_key, keys.session_token), strict=True)
    return {name: value for name, value in lent if value}
