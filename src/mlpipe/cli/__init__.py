"""The command line: one small file a verb. Here and in `train/launcher.py` an error becomes an exit code."""

from __future__ import annotations


def main() -> None:
    """The console script `mlpipe`."""
    from mlpipe.cli.app import run_app

    run_app()
