"""Serves a Membership over TCP: a JSON object a line in both directions, one connection a rank.

A rank says the token and hello, then asks, a request at a time. Both sides say each second that they are
there: when the connection ends, or nothing comes for `LOST_SECONDS` (a stopped process, a cut cable), the
other one is lost. Who does not know the token is not heard.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import secrets
import threading
import time
from collections.abc import Callable

from mlpipe.train.replicas.membership import Membership, Message, Rank

BEAT_SECONDS = 1.0
LOST_SECONDS = 10.0
# A training that has had too few replicas for so long fails.
LONELY_SECONDS = 900.0
# A coordinator that was told to end stays so long at least: replicas may be told a little later.
ALONE_SECONDS = 20.0
# The first quorum waits so long for replicas beyond the fewest; those of another coordinator come at once.
_FIRST_SECONDS = 60.0
_INHERITED_SECONDS = 15.0
_TICK_SECONDS = 0.5
_HELLO_SECONDS = 5.0  # for a stranger to go away
_LINE_BYTES = 2**26  # scalars of a state


class Coordinator:
    """Runs in a thread of its own. `lonely_seconds`: a training that has had too few replicas for so long
    fails. `check`: called before anything is decided; does not return if this is not the one coordinator."""

    def __init__(
        self,
        membership: Membership,
        address: str,
        lonely_seconds: float,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.membership = membership
        self._check = check
        self.token = secrets.token_hex(16)  # whoever connects says it first
        self._lonely_seconds = lonely_seconds
        self._writers: dict[Rank, asyncio.StreamWriter] = {}
        self._heard: dict[Rank, float] = {}
        self._loop = asyncio.new_event_loop()
        self._began = self._lonely_since = self._ticked = time.monotonic()
        serving = asyncio.start_server(self._serve, address, 0, limit=_LINE_BYTES)
        server = self._loop.run_until_complete(serving)
        port = server.sockets[0].getsockname()[1]
        self.where = f"{self.token}@{address}:{port}"  # for the environment of ranks
        self._ticking = self._loop.create_task(self._tick())
        self._thread = threading.Thread(target=self._loop.run_forever, name="coordinator", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Nothing is decided from now on; who is connected hears of it when the process ends."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LOST_SECONDS)

    def is_hung(self) -> bool:
        """It has not looked at its clock for long: its thread is dead, or stuck."""
        return time.monotonic() - self._ticked > LOST_SECONDS

    @property
    def num_connected(self) -> int:
        """Ranks that are there."""
        return len(self._writers)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        who: Rank | None = None
        try:
            async with asyncio.timeout(_HELLO_SECONDS):
                if not hmac.compare_digest(await reader.readexactly(len(self.token)), self.token.encode()):
                    return
                hello = json.loads(await reader.readline())
            who = (hello["hello"][0], hello["hello"][1])
            if (before := self._writers.pop(who, None)) is not None:
                before.close()
            self._writers[who], self._heard[who] = writer, time.monotonic()
            writer.write(_line({}))  # who is heard knows whom it found
            self.membership.connect(*who, hello["life"])
            self.membership.inherit(*hello["heard"])
            self._send()
            while line := await reader.readline():
                self._heard[who] = time.monotonic()
                message = json.loads(line)
                if "ask" in message:
                    self.membership.receive(*who, message)
                    self._send()
        except (OSError, ValueError, LookupError, TypeError, EOFError):
            pass  # what is no rank of ours, or is gone; a timeout is an OSError
        finally:
            if who is not None and self._writers.get(who) is writer:
                self._lose(who, f"replica {who[0]} was lost")
            writer.close()

    def _lose(self, who: Rank, why: str) -> None:
        writer = self._writers.pop(who)
        writer.close()
        self.membership.disconnect(*who, why)
        self._send()

    def _send(self) -> None:
        self._check()
        for who, message in self.membership.take_replies():
            if (writer := self._writers.get(who)) is not None:
                writer.write(_line(message))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            now = self._ticked = time.monotonic()
            for writer in self._writers.values():
                writer.write(b"{}\n")
            for who in [who for who in self._writers if now - self._heard[who] > LOST_SECONDS]:
                with contextlib.suppress(KeyError):
                    self._lose(who, f"replica {who[0]} was silent for {LOST_SECONDS:.0f} s")
            if now - self._began > (_INHERITED_SECONDS if self.membership.inherited else _FIRST_SECONDS):
                self.membership.hurry()
            if self.membership.quorum is not None or not self._writers:  # in a queue nobody waits for others
                self._lonely_since = now
            elif now - self._lonely_since > self._lonely_seconds:
                self.membership.fail(
                    f"no quorum within {self._lonely_seconds:.0f} s: {self.membership.waits_for()}"
                )
            self._send()


def _line(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"
