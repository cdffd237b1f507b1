"""A process that begins warm is what a new interpreter would be, as far as it and others can see."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from kit.command_runs import until
from kit.warm import Popen

pytestmark = pytest.mark.unit

LOOKS = """
import json, os, signal, sys, threading
from pathlib import Path

def shown(name):
    return Path(f"/proc/self/{name}").read_bytes().rstrip(b"\\0").decode()

print(json.dumps({
    "argv": sys.argv, "cmdline": shown("cmdline"), "path": sys.path[:2], "folder": os.getcwd(),
    "environ": sorted(set(shown("environ").split("\\0")) - {f"LC_CTYPE={os.environ.get('LC_CTYPE')}"}),
    "own": os.environ["OWN"], "absent": os.environ.get("PADDING"), "name": __name__,
    "leads": os.getsid(0) == os.getpid(), "input": sys.stdin.read(), "threads": threading.active_count(),
    "fds": sorted(os.listdir("/proc/self/fd"))[:3], "tty": sys.stdout.isatty(),
    "signals": [str(signal.getsignal(one)) for one in (2, 13, 15, 17)],
}))
print("an error", file=sys.stderr)
import atexit
atexit.register(print, "at exit")
sys.exit(sys.argv[1] if sys.argv[1] == "words" else int(sys.argv[1]))
"""


@pytest.mark.parametrize("code", ["0", "7", "words"])
def test_it_finds_and_leaves_what_a_new_interpreter_would(tmp_path: Path, code: str) -> None:
    (tmp_path / "looks.py").write_text(LOOKS)
    own = {"OWN": "a b", "PYTHONPATH": str(tmp_path), "PATH": os.environ["PATH"]}
    seen = []
    for make in (lambda *a, **k: subprocess.Popen(*a, **k), lambda *a, **k: Popen("cli", *a, **k)):
        process = make(
            [sys.executable, "-m", "looks", code, "b c"],
            env=own, cwd=tmp_path, text=True, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        seen.append((*process.communicate("given", timeout=300), process.returncode))
    assert seen[1] == seen[0]
    assert '"own": "a b"' in seen[0][0]


def test_it_may_die_with_another_process(tmp_path: Path) -> None:
    (tmp_path / "sleeps.py").write_text("import time\ntime.sleep(600)\n")
    with subprocess.Popen(["sleep", "600"]) as other:
        process = Popen(
            "cli", [sys.executable, "-m", "sleeps"], cwd=tmp_path, dies_with=(other.pid, signal.SIGTERM)
        )
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        other.kill()
    assert process.wait(300) == -signal.SIGTERM
    late = Popen("cli", [sys.executable, "-m", "sleeps"], cwd=tmp_path, dies_with=(other.pid, signal.SIGKILL))
    assert late.wait(300) == -signal.SIGKILL


def test_its_end_is_told(tmp_path: Path) -> None:
    (tmp_path / "sleeps.py").write_text("import time\nopen('begun', 'w').close()\ntime.sleep(600)\n")
    for signum in (signal.SIGKILL, signal.SIGINT):
        (tmp_path / "begun").unlink(missing_ok=True)
        process = Popen("cli", [sys.executable, "-m", "sleeps"], cwd=tmp_path, stderr=subprocess.DEVNULL)
        until((tmp_path / "begun").exists, "its begin")
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.send_signal(signum)
        assert process.wait(300) == -signum
        assert not Path(f"/proc/{process.pid}").exists()
