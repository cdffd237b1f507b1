"""The commit that a run was started from."""

from __future__ import annotations

import subprocess

_GIT_SECONDS = 5.0


def git_commit(folder: str) -> str | None:
    """Of the checkout that `folder` lies in, with `-dirty` when it has changes; None outside of one."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", folder, *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_SECONDS,
            check=True,
            stdin=subprocess.DEVNULL,
        )
        return done.stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        return f"{commit}-dirty" if git("status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.SubprocessError):
        return None
