"""`import mlpipe`: cheap, complete, typed."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import mlpipe

pytestmark = pytest.mark.unit
SOURCE = Path(mlpipe.__file__).parent


def modules(statement: str) -> set[str]:
    """That a new interpreter imports for it."""
    script = f"import sys; before = set(sys.modules); {statement}; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_import_costs_less_than_that_of_click() -> None:
    found = modules("import mlpipe")
    assert {name for name in found if name.startswith("mlpipe")} == {"mlpipe"}
    assert len(found) < len(modules("import click"))


def test_nothing_that_is_exported_knows_of_click_or_torch() -> None:
    found = modules(f"import mlpipe; [getattr(mlpipe, name) for name in {mlpipe.__all__}]")
    assert not {"click", "torch", "kubernetes", "jinja2", "mlpipe.cli"} & found


def test_the_stub_says_what_there_is() -> None:
    stub = ast.parse((SOURCE / "__init__.pyi").read_text())
    typed = {
        alias.asname: node.module
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }
    assert typed == mlpipe._HOMES
    for name in mlpipe._HOMES:
        assert callable(getattr(mlpipe, name)), name
    assert set(dir(mlpipe)) == set(mlpipe.__all__)
    with pytest.raises(AttributeError, match="no attribute 'lod'"):
        mlpipe.lod  # noqa: B018


def test_packages_that_are_called_stay_packages() -> None:
    import mlpipe.plan.plan
    import mlpipe.submit.backends

    assert mlpipe.plan.plan.SCHEMA_VERSION == 1
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'pipeline'"):
        mlpipe.plan()
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'pipeline'"):
        mlpipe.submit()
