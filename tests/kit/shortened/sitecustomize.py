"""Shortens deadlines of mlpipe in processes of their own: `Cli.shorten` says which. Python imports a module
of this name at its start, also in what mlpipe starts itself; `kit/warm.py` calls it in its forks."""

import importlib
import json
import os


def shorten() -> None:
    """KIT_SHORTENED: seconds by `module:NAME`, as JSON."""
    for place, seconds in json.loads(os.environ.get("KIT_SHORTENED", "{}")).items():
        module, _, name = place.partition(":")
        names = vars(importlib.import_module(module))
        assert name in names, f"there is no {place}"
        names[name] = seconds


if __name__ == "sitecustomize":
    shorten()
