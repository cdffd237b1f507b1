"""What a folder store costs at start: nothing of S3."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.unit


def test_a_folder_store_imports_no_s3_client_and_nothing_heavy():
    code = (
        "import sys, mlpipe.store.open as o, mlpipe.store.catalogue, mlpipe.store.runs, mlpipe.store.outputs;"
        "import mlpipe.store.registry; o.open_store('x');"
        "print(sorted({'minio', 'urllib3', 'pydantic', 'click', 'torch', 'prometheus_client'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
