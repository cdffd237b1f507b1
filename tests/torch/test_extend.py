"""What docs/how-to/extend.md shows is all that it takes: each extension is new files in one place and one
line in one table, and a copy of mlpipe with all of them runs the guide's pipeline."""

from __future__ import annotations

import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from kit import console
from kit.plans import write_tokens

pytestmark = pytest.mark.torch

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/how-to/extend.md").read_text()
EXTENSIONS = ("A technique", "An optimizer", "A stage kind", "A backend")


@dataclass(frozen=True)
class Extension:
    """Texts of new files by path; of the changed file its path, the line after which it changes, and the
    lines that are added there."""

    files: dict[str, str]
    table: str
    after: str
    added: list[str]


def blocks(text: str, language: str) -> dict[str, str]:
    """By the path in the first line."""
    found = re.findall(rf"^```{language}\n# (\S+)\n(.*?)^```", text, flags=re.M | re.S)
    assert len(dict(found)) == len(found)
    return dict(found)


def extension(title: str) -> Extension:
    text = TEXT.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    ((table, change),) = blocks(text, "diff").items()
    lines = change.splitlines()
    (after,) = [line[1:] for line in lines if line.startswith(" ")]
    added = [line[1:] for line in lines if line.startswith("+")]
    assert len(added) + 1 == len(lines), "a line of the table is changed or removed"
    return Extension(blocks(text, "python"), table, after, added)


@pytest.mark.parametrize("title", EXTENSIONS)
def test_an_extension_is_new_files_in_one_place_and_one_line_in_one_table(title: str) -> None:
    found = extension(title)
    assert len(found.added) == 1
    assert len({Path(path).parent for path in found.files}) == 1
    assert len(found.files) == 1 or Path(next(iter(found.files))).name == "__init__.py"
    for path in found.files:
        assert not (ROOT / path).exists()
    assert (ROOT / found.table).read_text().splitlines().count(found.after) == 1


def test_all_of_them_run(tmp_path: Path) -> None:
    shutil.copytree(
        ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
    )
    for found in map(extension, EXTENSIONS):
        table = tmp_path / found.table
        table.write_text(table.read_text().replace(found.after, "\n".join([found.after, *found.added])))
        for path, text in found.files.items():
            (tmp_path / path).parent.mkdir(exist_ok=True)
            (tmp_path / path).write_text(text)
    write_tokens(tmp_path / "tokens")
    for path, text in blocks(TEXT, "yaml").items():
        (tmp_path / path).write_text(text)
    env = {name: value for name, value in os.environ.items() if not name.startswith("MLPIPE_")}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    env["PYTHONPATH"] = str(tmp_path / "src")
    console.run(TEXT, tmp_path, env, 600)
