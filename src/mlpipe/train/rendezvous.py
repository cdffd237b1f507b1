"""`python -m mlpipe.train.rendezvous ARGUMENTS OF TORCHRUN`: torchrun on a node other than the first.

It begins when the first node listens at `--rdzv-endpoint`: torchrun itself gives up on a name that does not
resolve after a minute, and images are pulled at uneven speed. To import torchrun costs seconds, which pass
meanwhile.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time

RENDEZVOUS_SECONDS = 900.0
_POLL_SECONDS = 0.1


def main(argv: list[str]) -> int:
    from torch.distributed import run

    host, _, port = argv[argv.index("--rdzv-endpoint") + 1].rpartition(":")
    deadline = time.monotonic() + RENDEZVOUS_SECONDS
    while not _listens(host, int(port)):
        if time.monotonic() > deadline:
            words = f"node 0 did not listen at {host}:{port} within {RENDEZVOUS_SECONDS:.0f} s"
            print(f"{words}; is its pod running? `mlpipe status` says why it is not")  # noqa: T201
            return 1
        time.sleep(_POLL_SECONDS)
    run.main(argv)
    return 0


def _listens(host: str, port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection((host, port), timeout=5.0).close()
        return True
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
