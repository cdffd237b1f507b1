"""The rules of the house: layers, fresh reference pages, working links, pins without addresses."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from mlpipe._core import environment

pytestmark = pytest.mark.unit
ROOT = Path(__file__).resolve().parents[2]


def _run(*argv: str) -> None:
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_imports_go_one_way() -> None:
    _run(sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()")


def test_reference_is_fresh_and_links_lead_somewhere() -> None:
    _run(sys.executable, "docs/generate.py", "--check")


def test_pins_have_hashes_and_no_addresses() -> None:
    for path in (ROOT / "requirements").glob("*.txt"):
        text = path.read_text()
        pins = re.findall(r"^[a-z0-9.-]+==(?:.*\\\n)*.*", text, flags=re.M)
        assert pins, path
        assert [pin for pin in pins if "--hash=sha256:" not in pin] == [], path
        assert "://" not in text, path


def test_every_pin_of_a_smaller_set_is_the_larger_sets() -> None:
    def pins(name: str) -> set[str]:
        lines = (ROOT / "requirements" / name).read_text().splitlines()
        return {line.rstrip(" \\") for line in lines if "==" in line and line[0].isalnum()}

    def versions(name: str) -> set[str]:
        return {pin.partition(" ;")[0] for pin in pins(name)}

    assert versions("base.txt") <= versions("train.txt") <= versions("dev.txt")


def test_every_variable_of_ours_has_one_home_and_is_documented() -> None:
    ours = {value for name, value in vars(environment).items() if name.isupper()}
    page = (ROOT / "docs/reference/environment.md").read_text()
    product, tests = page.split("Of the tests:")
    assert ours == set(re.findall(r"`(MLPIPE_[A-Z_]+)`", product))
    sources = {path: path.read_text() for path in (ROOT / "src").rglob("*.py")}
    spelled = {path.name for path, text in sources.items() if re.search(r"""["']MLPIPE_[A-Z_]+["']""", text)}
    assert spelled == {"environment.py"}
    used = {name for text in sources.values() for name in re.findall(r"MLPIPE_[A-Z][A-Z_]*[A-Z]", text)}
    assert used == ours
    texts = [path.read_text() for path in (ROOT / "tests").rglob("*.py")]
    used = {name for text in texts for name in re.findall(r"MLPIPE_[A-Z][A-Z_]*[A-Z]", text)}
    assert used - ours == set(re.findall(r"`(MLPIPE_[A-Z_]+)`", tests))


def test_every_variable_of_others_that_people_set_is_documented() -> None:
    """But those that torchrun, Slurm and a vendor of machines set, and one that is not listened to."""
    theirs = {"RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "SLURM_NODEID"}
    theirs |= {"SLURMD_NODENAME", "CONTAINER_API_KEY", "GIVE_BACK", "PATH", "JENKINS_API_EXTRA_HEADERS"}
    page = (ROOT / "docs/reference/environment.md").read_text()
    text = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    read = set(re.findall(r"""environ(?:\.get\(|\[|\.pop\()["']([A-Z][A-Z0-9_]+)["']""", text))
    assert {name for name in read if f"`{name}`" not in page} == theirs


@pytest.mark.parametrize(
    ("heading", "homes", "others"),
    [
        ("And in a pod of Kubernetes:", ("render/pod.py", "render/kubernetes.py"), {"IPC_LOCK"}),
        ("And in a job of Slurm:", ("submit/slurm/node.py",), set()),
    ],
)
def test_the_variables_of_a_place_are_all_on_their_page_and_no_others(
    heading: str, homes: tuple[str, ...], others: set[str]
) -> None:
    page = (ROOT / "docs/reference/environment.md").read_text()
    of_all, here = (
        set(re.findall(r"`([A-Z][A-Z0-9_]+)`", page.split(part)[1].partition("\n\nAnd ")[0]))
        for part in ("What a stage finds", heading)
    )
    text = "".join((ROOT / "src/mlpipe" / home).read_text() for home in homes)
    set_there = {str(getattr(environment, name)) for name in re.findall(r"environment\.([A-Z_]+)", text)}
    set_there |= {name for name in re.findall(r'"([A-Z][A-Z0-9_]{3,})"', text) if "SLURM" not in name}
    assert here <= set_there
    assert set_there - others <= of_all | here


def test_what_mlpipe_starts_of_itself_finds_no_modules_in_the_working_folder() -> None:
    """Without -P a user's types.py is taken for Python's."""
    sources = {path.name: path.read_text() for path in (ROOT / "src").rglob("*.py")}
    without = {name for name, text in sources.items() if re.search(r'(?<!"-P", )"-m"', text)}
    # of torchrun's own option, whose ranks are forks of it; a calibration says so by PYTHONSAFEPATH
    assert without == {"launch.py", "torchrun.py", "forked.py", "calibrate.py"}
    assert '"PYTHONSAFEPATH"] = "1"' in (ROOT / "src/mlpipe/cli/calibrate.py").read_text()
    assert " -P -m mlpipe.submit.rented.machine" in (ROOT / "src/mlpipe/submit/rented/order.py").read_text()


def test_adrs_are_numbered_and_listed() -> None:
    pages = sorted(path.name for path in (ROOT / "docs/adr").glob("0*.md"))
    assert [page[:4] for page in pages] == [f"{n:04d}" for n in range(1, len(pages) + 1)]
    index = (ROOT / "docs/adr/README.md").read_text()
    assert [page for page in pages if page not in index] == []
