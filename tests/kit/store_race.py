"""Many writers at one store: what every store must promise, asked of a folder and of real S3 servers."""

from __future__ import annotations

import threading

from mlpipe.store.base import Store

_WRITERS = 4


def race(store: Store, *, updates: int) -> None:
    """Asserts that exactly one writer creates an object, and that no increment of a counter is lost."""
    wins = []

    def write(name: str) -> None:
        if store.put_if_absent("claim", name.encode()):
            wins.append(name)
        store.put_if_absent("counter", b"0")
        for _ in range(updates):
            while True:
                value, etag = store.get_with_etag("counter")
                if store.put_if_match("counter", str(int(value) + 1).encode(), etag):
                    break

    threads = [threading.Thread(target=write, args=(f"t{i}",), daemon=True) for i in range(_WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not any(thread.is_alive() for thread in threads), "the writers have not ended after 120 s"
    assert len(wins) == 1
    assert store.get("claim") == wins[0].encode()
    assert store.get("counter") == str(_WRITERS * updates).encode()
