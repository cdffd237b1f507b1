"""What a folder store costs at start: nothing of S3, nothing heavy."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.unit
HEAVY = ("minio", "urllib3", "pydantic", "click", "torch", "prometheus_client")


def test_a_folder_store_imports_no_s3_client_and_nothing_heavy():
    code = (
        "import sys, mlpipe.store.open as o, mlpipe.store.catalogue, mlpipe.store.runs, mlpipe.store.outputs;"
        f"import mlpipe.store.registry; o.open_store('x'); print(sorted(set({HEAVY}) & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == "[]"
