"""Of a traceback, the user's own frames."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from mlpipe._core.errors import TrainError
from mlpipe.plan.mesh import Mesh
from mlpipe.train.frames import own_frames, told

pytestmark = pytest.mark.unit


def module(folder: Path, name: str, text: str) -> ModuleType:
    path = folder / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def caught(function, *arguments) -> BaseException:
    with pytest.raises(Exception) as found:
        function(*arguments)
    found.value.__traceback__ = found.value.__traceback__.tb_next  # without the call above
    return found.value


def test_library_frames_between_the_users_are_folded(tmp_path):
    mine = module(
        tmp_path,
        "mine",
        "import json\nfrom mlpipe.plan.mesh import Mesh\n"
        "def hook(pairs):\n    return Mesh(pp=0)\n"
        "def outer():\n    return json.loads('{}', object_pairs_hook=hook)\n",
    )
    frames = own_frames(caught(mine.outer), ())
    assert [(frame.function, frame.line) for frame in frames] == [
        ("outer", "return json.loads('{}', object_pairs_hook=hook)"), ("hook", "return Mesh(pp=0)"),
    ]  # fmt: skip
    assert frames[0].num_folded == 0
    assert frames[1].num_folded >= 2  # of json
    lines = told(frames).splitlines()
    assert lines[1] == f"  | {tmp_path}/mine.py:6 in outer: return json.loads('{{}}', object_pairs_hook=hook)"
    assert lines[2] == f"  | ... {frames[1].num_folded} of libraries"
    assert lines[3] == f"  | {tmp_path}/mine.py:4 in hook: return Mesh(pp=0)"


def test_the_cause_of_ours_is_the_users(tmp_path):
    mine = module(tmp_path, "mine", "def build():\n    return 1 / 0\n")

    def wrapped() -> None:
        try:
            mine.build()
        except ZeroDivisionError as error:
            raise TrainError("failed to build the model") from error

    (*_, last) = own_frames(caught(wrapped), ())
    assert (last.function, last.line) == ("build", "return 1 / 0")


def test_an_installed_package_of_the_users_is_theirs_and_others_are_not():
    error = caught(json.loads, "{")
    assert own_frames(error, ()) == []
    assert told([]) == ""
    assert own_frames(error, {"json"})[0].function == "loads"
    assert own_frames(caught(Mesh, 0), ()) == []  # mlpipe's own


def test_of_a_deep_recursion_the_innermost_are_shown(tmp_path):
    mine = module(tmp_path, "mine", "def down(n):\n    return down(n - 1) if n else 1 / 0\n")
    lines = told(own_frames(caught(mine.down, 30), ())).splitlines()
    assert lines[1] == "  | ... 23 more of yours"
    assert len(lines) == 10
