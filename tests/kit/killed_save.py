"""Saves to a folder that are killed at a system call: `python -m kit.killed_save` reads a line of JSON for
each, (folder, step, at, when), and answers with one, (whether it was killed, system calls made).

A process of its own: to fork one that has collected tests takes fifty times as long.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kit import saver

from mlpipe.store.folder import FolderStore

_CALLS = ("open", "write", "fsync", "replace", "link", "unlink", "mkdir", "rmdir", "close")


def save_and_die(folder: str, step: int, at: int, when: str) -> tuple[bool, int]:
    """In a child: the `at`-th system call that changes files is the last."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            count = 0

            def counted(call: Callable[..., Any]) -> Callable[..., Any]:
                def wrapper(*args: Any, **kwargs: Any) -> Any:
                    nonlocal count
                    count += 1
                    if count == at and when == "before":
                        os.kill(os.getpid(), signal.SIGKILL)
                    try:
                        return call(*args, **kwargs)
                    finally:
                        if count == at:
                            os.kill(os.getpid(), signal.SIGKILL)

                return wrapper

            real_write = os.write
            for name in _CALLS:
                setattr(os, name, counted(getattr(os, name)))
            saver.save(FolderStore(Path(folder)), step)
            real_write(write, str(count).encode())
        finally:
            os._exit(1)
    os.close(write)
    with open(read, "rb") as pipe:
        calls = int(pipe.read() or 0)
    _, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status), calls


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(save_and_die(*json.loads(line))), flush=True)
