"""The extensions that docs/how-to/extend.md shows, and a copy of mlpipe that has them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

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
    pairs = re.findall(rf"^```{language}\n# (\S+)\n(.*?)^```", text, flags=re.M | re.S)
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def extension(title: str) -> Extension:
    """Of the section with this title."""
    text = TEXT.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    ((table, change),) = blocks(text, "diff").items()
    lines = change.splitlines()
    (after,) = [line[1:] for line in lines if line.startswith(" ")]
    added = [line[1:] for line in lines if line.startswith("+")]
    assert len(added) + 1 == len(lines), "a line of the table is changed or removed"
    return Extension(blocks(text, "python"), table, after, added)


def copy_with(titles: Iterable[str], folder: Path) -> Path:
    """mlpipe's own source with these extensions, for PYTHONPATH; with its bytecode, which takes seconds."""
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("*.egg-info"))
    for one in map(extension, titles):
        table = folder / one.table
        table.write_text(table.read_text().replace(one.after, "\n".join([one.after, *one.added])))
        for path, text in one.files.items():
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_text(text)
    return folder / "src"
