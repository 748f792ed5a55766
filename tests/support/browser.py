"""Headless Chromium, driven over a pipe: enough to open a page, ask it something and hear its complaints.

with Browser(directory) as browser: browser.open(url); browser.until("document.title === 'x'")
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from transferd.runtime.compat import Self

PATIENCE_S = 60.0


def executable() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser")


class Browser:
    """One process and one tab.

    complaints: what the console said of errors, exceptions and refused content. requested: every URL it asked for.
    """

    def __init__(self, directory: Path) -> None:
        commands, self._commands = os.pipe()
        self._events, events = os.pipe()
        options = "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run"
        options += " --remote-debugging-pipe --window-size=1200,1000"
        command = f'exec "$0" {options} --user-data-dir="$1" about:blank 3<&{commands} 4>&{events}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, executable() or "chromium", str(directory)],
            pass_fds=(commands, events),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(events)
        self._numbers = itertools.count(1)
        self._unread = b""
        self._session: str | None = None
        self.complaints: list[str] = []
        self.requested: set[str] = set()
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Page", "Network"):
            self._call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(PATIENCE_S)
        os.close(self._commands)
        os.close(self._events)

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)

    def ask(self, expression: str) -> Any:
        """The value of an expression of the page; a promise is waited for. Raises AssertionError if it throws."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait for an expression of the page to be true."""
        waiting = f"""new Promise((resolve) => {{
            const look = () => (({expression}) ? resolve(true) : setTimeout(look, 20)); look(); }})"""
        assert self.ask(waiting) is True

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot")["data"]))

    def dark(self, dark: bool) -> None:
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[feature])

    def resize(self, width: int, height: int) -> None:
        """The size of the window, as a telephone has it if it is narrow."""
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        give_up = time.monotonic() + PATIENCE_S
        while True:
            answer = self._next(give_up, method)
            if answer.get("id") == number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self._heard(answer)

    def _next(self, give_up: float, method: str) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._events], [], [], max(0.0, give_up - time.monotonic()))
            assert ready, f"the browser does not answer {method}"
            piece = os.read(self._events, 65536)
            assert piece, "the browser has ended"
            self._unread += piece
        message, _, self._unread = self._unread.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def _heard(self, event: dict[str, Any]) -> None:
        method, told = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requested.add(str(told["request"]["url"]))
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(told["exceptionDetails"]))
        elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.complaints.append(str(told["entry"]["text"]))
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(told["args"]))
