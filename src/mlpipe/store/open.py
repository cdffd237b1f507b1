"""From a URL to a Store."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from mlpipe._core import environment
from mlpipe._core.errors import StoreError
from mlpipe.store.base import Store

DEFAULT_STORE = "./runs"
_KINDS = "write a folder, file:///folder or s3://bucket/prefix"


def default_url(store: str | None, otherwise: str | None = None) -> str:
    """`store`, else MLPIPE_STORE, else `otherwise` (the pipeline's), else ./runs."""
    return store or os.environ.get(environment.STORE) or otherwise or DEFAULT_STORE


def full_url(url: str) -> str:
    """The `url` of the store that `open_store` would open, without credentials, and no server is asked."""
    return url.rstrip("/") if url.startswith("s3://") else open_store(url).url


def open_store(url: str) -> Store:
    """A folder (`./runs`, `/data/runs`, `file:///data/runs`) or `s3://bucket/prefix`.

    Nothing is touched or contacted yet: `Store.probe` does that. Only the kind that is asked for is imported.
    Raises StoreError (input) for what is no store, such as a file.
    """
    if url.startswith("s3://"):
        from mlpipe.store.s3 import S3Store

        return S3Store.from_environment(url)
    if url.startswith("file://"):
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost"):
            raise StoreError(f"{url!r} names another host", hint="write file:///path", kind="input")
        return _folder(Path(unquote(parts.path)))
    if "://" in url or re.match("[A-Za-z0-9]+:/", url) or not url:
        raise StoreError(
            f"{url!r} is not a store",
            hint=_KINDS,
            kind="input",
        )
    return _folder(Path(url).expanduser())


def _folder(path: Path) -> Store:
    from mlpipe.store.folder import FolderStore

    store = FolderStore(path)
    if store.root.exists() and not store.root.is_dir():
        raise StoreError("is a file; a folder is needed here", where=store.url, hint=_KINDS, kind="input")
    return store
