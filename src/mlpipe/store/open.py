"""From a URL to a Store."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from mlpipe._core import environment
from mlpipe._core.errors import StoreError
from mlpipe._core.ids import NO_FOLDER_PATTERN

if TYPE_CHECKING:
    from mlpipe.store.base import Store

DEFAULT_STORE = "./runs"
_KINDS = "write a folder (./name, where its name has a ':'), file:///folder or s3://bucket/prefix"


def default_url(store: str | None, otherwise: str | None = None) -> str:
    """`store`, else MLPIPE_STORE, else `otherwise` (the pipeline's), else ./runs."""
    return store or os.environ.get(environment.STORE) or otherwise or DEFAULT_STORE


def full_url(url: str) -> str:
    """The `url` of the store that `open_store` would open, without credentials, and no server is asked."""
    if url.startswith("s3://"):
        return url.rstrip("/")
    from mlpipe.store.folder import FolderStore

    return FolderStore(_path_of(url)).url


def one_spelling(url: str) -> str:
    """The same of every URL of one store: a folder may have been given with `..` or through a link."""
    return url if "://" in url else os.path.realpath(url)


def open_store(url: str) -> Store:
    """A folder (`./runs`, `/data/runs`, `file:///data/runs`) or `s3://bucket/prefix`.

    Nothing is touched or contacted yet: `Store.probe` does that. Only the kind that is asked for is imported.
    Raises StoreError (input) for what is no store, such as a file.
    """
    if url.startswith("s3://"):
        from mlpipe.store.s3 import S3Store

        return S3Store.from_environment(url)
    from mlpipe.store.folder import FolderStore

    store, is_file = FolderStore(_path_of(url)), False
    with suppress(OSError):  # the store says so itself when it is used
        is_file = store.root.exists() and not store.root.is_dir()
    if is_file:
        raise StoreError("is a file; a folder is needed here", where=store.url, hint=_KINDS, kind="input")
    return store


def _path_of(url: str) -> Path:
    if url.startswith("file://"):
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost"):
            raise StoreError(f"{url!r} names another host", hint="write file:///path", kind="input")
        return Path(unquote(parts.path))
    if "://" in url or re.match(NO_FOLDER_PATTERN, url) or not url:
        raise StoreError(
            f"{url!r} is not a store",
            hint=_KINDS,
            kind="input",
        )
    from mlpipe._core.files import expand_user  # which no bucket needs

    return expand_user(url)
