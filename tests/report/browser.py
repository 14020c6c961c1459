"""A headless Chromium, spoken to over a pipe (Chrome DevTools Protocol)."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PROGRAM = next((found for name in NAMES if (found := shutil.which(name))), None)
MISSING = "no Chromium was found (apt-get install chromium)"
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", "--remote-debugging-pipe"),
)
# The browser reads commands from descriptor 3 and answers on 4.
_START = """import os, sys
os.dup2(int(sys.argv[1]), 3), os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])"""
_SECONDS = 120  # until a silent browser counts as hanging


class Browser:
    """A page in a browser, and what it complained of and asked for."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._numbers = itertools.count(1)
        self._rest = b""
        self._session: str | None = None
        self.complaints: list[str] = []  # errors, warnings and violations of the policy
        self.requests: list[str] = []  # addresses
        self._loaded = False
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._answers], [], [], _SECONDS)
            assert ready, "the browser is silent"
            found = os.read(self._answers, 1 << 20)
            assert found, "the browser has exited"
            self._rest += found
        message, _, self._rest = self._rest.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def _note(self, event: dict[str, Any]) -> None:
        method, values = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])
        elif method in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.complaints.append(json.dumps(values))
        elif method == "Page.loadEventFired":
            self._loaded = True

    def open(self, page: Path, width: int = 1280, height: int = 900) -> None:
        """Open a file in a window of this size, and wait until it is drawn."""
        self.size(width, height)
        self._loaded = False
        self.send("Page.navigate", url=page.resolve().as_uri())
        while not self._loaded:
            self._note(self._next())
        self.settle()

    def size(self, width: int, height: int, is_phone: bool = False) -> None:
        """Give the window a size in pixels."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": height, "deviceScaleFactor": 1, "mobile": is_phone},
        )

    def settle(self) -> None:
        """Wait until what was begun is drawn."""
        frames = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
        self.run(f"{frames}.then(() => 0)")

    def run(self, script: str) -> Any:
        """Return the value of an expression in JavaScript."""
        options = {"returnByValue": True, "awaitPromise": True}
        found = self.send("Runtime.evaluate", expression=script, **options)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Press the mouse at a place of the window, move it, and release it there."""
        for kind, (x, y), buttons in (
            ("mouseMoved", start, 0),
            ("mousePressed", start, 1),
            ("mouseMoved", end, 1),
            ("mouseReleased", end, 0),
        ):
            self.send(
                "Input.dispatchMouseEvent",
                **{"type": kind, "x": x, "y": y, "buttons": buttons, "clickCount": 1},
                button="none" if kind == "mouseMoved" else "left",
            )
        self.settle()

    def screenshot(self, path: Path) -> None:
        """Write a PNG of the window."""
        data = self.send("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Start a browser whose files are in a folder, and end it."""
    assert PROGRAM is not None
    (reads, writes), (answers, answered) = os.pipe(), os.pipe()
    profile = f"--user-data-dir={folder / 'profile'}"
    process = subprocess.Popen(
        [sys.executable, "-c", _START, str(reads), str(answered), PROGRAM, *_FLAGS, profile],
        pass_fds=(reads, answered),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(reads)
    os.close(answered)
    try:
        yield Browser(writes, answers)
    finally:
        os.close(writes)
        os.close(answers)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
