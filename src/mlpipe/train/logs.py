"""Ships what the workers print, while they print it, to `logs/rank-<r>.log` in the store and to stdout
(where `kubectl logs` looks). In the store each line begins with the time at which it was shipped, UTC:
`mlpipe logs` puts the ranks' lines in order by it, and takes it away."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path

from mlpipe.store.base import LogWriter, Store


class LogShipper:
    """torchrun writes `<log_dir>/<run>/attempt_<restart>/<local rank>/{stdout,stderr}.log`."""

    def __init__(
        self,
        store: Store,
        attempt_key: str,
        log_dir: Path,
        scratch: Path,
        *,
        first_restart: int = 0,
        first_rank: int = 0,
    ) -> None:
        """`first_rank`: of this node, for workers that die before they say theirs."""
        self._store = store
        self._attempt_key = attempt_key
        self._log_dir = log_dir
        self._scratch = scratch
        self._first_restart = first_restart
        self._first_rank = first_rank
        self.rank_offset = 0  # of a replica, whose ranks count from 0: added in the names of their logs
        self._offsets: dict[Path, int] = {}
        self._writers: dict[int, LogWriter] = {}

    def ship(self) -> None:
        """Whole lines written since the last call."""
        for path in sorted(self._log_dir.glob("*/attempt_*/*/std*.log")):
            restart = self._first_restart + int(path.parent.parent.name.removeprefix("attempt_"))
            offset = self._offsets.get(path, 0)
            if path.stat().st_size == offset:
                continue
            with path.open("rb") as file:
                file.seek(offset)
                data = file.read()
            data = data[: data.rfind(b"\n") + 1]
            if data:
                self._offsets[path] = offset + len(data)
                self._write(self._global_rank(restart, int(path.parent.name)), data)

    def _global_rank(self, restart: int, local_rank: int) -> int:
        """A worker writes it beside its pid. Two nodes must never write one log: chunks would interleave."""
        try:
            rank = int((self._scratch / f"pid-{restart}-{local_rank}").read_text().split()[1])
        except (OSError, IndexError, ValueError):
            rank = self._first_rank + local_rank
        return self.rank_offset + rank

    def _write(self, rank: int, data: bytes) -> None:
        if rank not in self._writers:
            self._writers[rank] = self._store.open_log(f"{self._attempt_key}/logs/rank-{rank}.log")
        now = datetime.now(UTC).isoformat(timespec="milliseconds").removesuffix("+00:00").encode() + b"Z "
        self._writers[rank].write(b"".join(now + line for line in data.splitlines(keepends=True)))
        sys.stdout.write(
            "".join(f"[rank {rank}] {line}\n" for line in data.decode(errors="replace").splitlines())
        )
        sys.stdout.flush()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
