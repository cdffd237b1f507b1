"""The page of what can be combined follows from the loader's rules and the marks of tests."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.unit
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The page's module, which reads tests of `tmp_path`."""
    monkeypatch.syspath_prepend(str(DOCS))
    monkeypatch.delitem(sys.modules, "combinations", raising=False)
    import combinations

    monkeypatch.setattr(combinations, "TESTS", tmp_path)
    return combinations


def mark(folder: Path, *names: str) -> None:
    (folder / "test_some.py").write_text(f"@pytest.mark.combines{names!r}\ndef test_it(): ...\n")


def test_what_is_marked_is_tested_and_what_is_refused_says_why(page: Any, tmp_path: Path) -> None:
    mark(tmp_path, "tp", "optimizer *")
    tests = page.tested()
    assert tests[frozenset({"tp", "optimizer lion"})] == "test_some.py"
    assert frozenset({"optimizer lion", "optimizer adamw"}) not in tests
    mark(tmp_path, "tp", "optimizer lion")
    assert "| optimizer lion | accepted |" in page.page("{}")
    assert page.why_not({"optimizer": {"name": "muon"}}, {"tp": 2}).endswith("it needs whole matrices")
    assert page.why_not({"optimizer": {"name": "lion"}}, {"tp": 2}) is None


def test_a_mark_of_what_is_refused_or_unknown_is_a_mistake(page: Any, tmp_path: Path) -> None:
    mark(tmp_path, "tp", "optimizer muon")
    with pytest.raises(ValueError, match=r"combines .*, which is refused: .*whole matrices"):
        page.page("{}")
    mark(tmp_path, "tp", "precision bf61")
    with pytest.raises(ValueError, match=r"test_some\.py:1: no such thing to combine"):
        page.tested()
