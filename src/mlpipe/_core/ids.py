"""Names and ids. A name is a path component, a label value and a bucket key at once, so it is narrow."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Sequence

NAME_PATTERN = r"[a-z0-9][a-z0-9._-]{0,62}"
BUCKET_PATTERN = r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]"  # of S3, and of the servers that speak it
# How what was meant as a URL begins, where a store's folder is asked for. No flags: JSON Schema has none.
NO_FOLDER_PATTERN = r"[sS]3:|[fF][iI][lL][eE]:|[A-Za-z0-9]+:/"
BUCKET_RULE = "a bucket's name has 3 to 63 of a-z, 0-9, '.' and '-', a letter or digit first and last"
_NAME = re.compile(NAME_PATTERN)


def is_name(text: str) -> bool:
    """Whether a run, stage, pipeline or model may be called so."""
    return _NAME.fullmatch(text) is not None


def is_bucket(text: str) -> bool:
    """Whether a bucket may be called so (BUCKET_RULE)."""
    return re.fullmatch(BUCKET_PATTERN, text) is not None


def new_run_id(pipeline_name: str) -> str:
    """`<name>-<utc time>-<4 random hex>`: sorts by start, reads well, unique enough to be claimed by a
    conditional PUT. At most 63 characters."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    return f"{pipeline_name[:40]}-{stamp}-{os.urandom(2).hex()}"


def spec_seal(pipeline_yaml: str, overrides: Sequence[str]) -> str:
    """sha256 of the text and of the overrides, joined by ':': all that the plans of a cluster's run follow
    from."""
    words = (pipeline_yaml, json.dumps(list(overrides)))
    return ":".join(hashlib.sha256(word.encode()).hexdigest() for word in words)


def new_attempt_uuid() -> str:
    """8 random hex digits: tells two writers of one step apart."""
    return os.urandom(4).hex()
