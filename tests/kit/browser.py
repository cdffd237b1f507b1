"""Chromium without a window, over the DevTools protocol on a pipe: what a page looks like, asks for and says.

PYTHONPATH=tests python -m kit.browser PAGE.html OUT.png [WIDTH [dark]]
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.servers import ServerMissingError, die_with_parent, end

_PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
_ANSWER_SECONDS = 300.0
_MOST_PIXELS = 8000  # of a picture's height


@dataclass
class Seen:
    """`asked`: URLs besides the page's own. `said`: on the console, by scripts, or of what was refused.
    `width`: of what must be scrolled to be seen. `background`: the colour behind all, as CSS."""

    png: bytes
    asked: list[str]
    said: list[str]
    width: int
    background: str


class Browser:
    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive, self._rest, self._number = send, receive, b"", 0
        self._events: list[dict[str, Any]] = []

    def look(self, page: Path, *, width: int, dark: bool = False, most_pixels: int = _MOST_PIXELS) -> Seen:
        """The page as a window of that width shows it, from its top to its end, or to so many pixels."""
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

        def ask(method: str, **parameters: Any) -> dict[str, Any]:
            return self._ask(method, session, **parameters)

        def measure(expression: str) -> Any:
            return ask("Runtime.evaluate", expression=expression)["result"]["value"]

        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        ask("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        ask("Emulation.setEmulatedMedia", features=[scheme])
        for domain in ("Page", "Network", "Log", "Runtime"):
            ask(f"{domain}.enable")
        self._events.clear()
        ask("Page.navigate", url=page.resolve().as_uri())
        self._until("Page.loadEventFired")
        height = min(measure("document.documentElement.scrollHeight"), most_pixels)
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        shot = ask("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)["data"]
        wide = measure("document.documentElement.scrollWidth")
        background = measure("getComputedStyle(document.body).backgroundColor")
        asked, said = [], []
        for event in self._events:
            told = event["params"]
            if event["method"] == "Network.requestWillBeSent":
                asked.append(told["request"]["url"])
            elif event["method"] == "Log.entryAdded":
                said.append(told["entry"]["text"])
            elif event["method"] in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
                said.append(json.dumps(told)[:500])
        self._ask("Target.closeTarget", targetId=target)
        others = [url for url in asked if url != page.resolve().as_uri()]
        return Seen(base64.b64decode(shot), others, said, wide, background)

    def _ask(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while (answer := self._next(method)).get("id") != self._number:
            self._events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        found: dict[str, Any] = answer["result"]
        return found

    def _until(self, event: str) -> None:
        while all(one.get("method") != event for one in self._events):
            self._events.append(self._next(event))

    def _next(self, what: str) -> dict[str, Any]:
        deadline = time.monotonic() + _ANSWER_SECONDS
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._receive], [], [], max(deadline - time.monotonic(), 0.0))
            data = os.read(self._receive, 1 << 20) if ready else b""
            if not data:
                raise RuntimeError(f"Chromium did not answer {what} within {_ANSWER_SECONDS:.0f} s, or ended")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """Raises ServerMissingError without a Chromium."""
    program = next(filter(None, map(shutil.which, _PROGRAMS)), None)
    if program is None:
        raise ServerMissingError("chromium is missing: install it, to look at pages")
    # 3 and 4 are its ends of the pipes; ours are far from them
    low = [*os.pipe(), *os.pipe()]
    theirs_in, send, receive, theirs_out = (fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, 10) for one in low)

    def connect() -> None:
        die_with_parent()
        os.dup2(theirs_in, 3)
        os.dup2(theirs_out, 4)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = [
            program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--no-first-run", "--disable-background-networking", "--disable-component-update",
            "--hide-scrollbars", f"--user-data-dir={folder}", "--remote-debugging-pipe",
        ]  # fmt: skip
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(
            command, stdin=quiet, stdout=quiet, stderr=quiet, preexec_fn=connect, pass_fds=(3, 4)
        )
        try:
            for one in (*low, theirs_in, theirs_out):
                os.close(one)
            yield Browser(send, receive)
        finally:
            end(process)
            os.close(send)
            os.close(receive)


def main(arguments: list[str]) -> int:
    if not 2 <= len(arguments) <= 4:
        print(__doc__)
        return 2
    page, out, *more = arguments
    with browser() as one:
        seen = one.look(Path(page), width=int(more[0]) if more else 1200, dark="dark" in more)
    Path(out).write_bytes(seen.png)
    print(f"{out}: asked for {seen.asked}, said {seen.said}, {seen.width} pixels wide")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
