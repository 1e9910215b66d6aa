"""A page in headless Chromium, driven over a pipe with its DevTools protocol: no driver and no network port."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")

READ_FD, WRITE_FD = 3, 4
"""Chromium reads commands from the first and writes answers to the second; messages end with a zero byte."""


def find_chromium() -> str | None:
    """Return Chromium's path, or None where there is none (Debian: ``apt-get install chromium``)."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class BrowserError(Exception):
    """Chromium did not start, did not answer, or refused a command."""


class Browser:
    """One Chromium with one page.

    Attributes:
        problems: Console errors, uncaught exceptions and violations of the page's policy, in order.
        requests: URLs that the page asked for, other than its own file and data inside it.
    """

    def __init__(self, chromium: str, *, timeout_s: float = 60.0) -> None:
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._timeout_s = timeout_s
        self._profile = tempfile.mkdtemp(prefix="fibc-chromium-")
        self._number = 0
        self._buffer = b""
        self._loaded = False
        self._session = ""
        commands, self._commands = _high_pipe()
        self._answers, answers = _high_pipe()
        arguments = [
            chromium,
            "--headless=new",
            "--remote-debugging-pipe",
            "--no-sandbox",  # as root, as in a container
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--force-device-scale-factor=1",
            "--hide-scrollbars",
            f"--user-data-dir={self._profile}",
            "about:blank",
        ]
        # A shell puts the pipes where Chromium looks for them; not sh, which takes descriptors of one digit only.
        script = f'exec "$@" {READ_FD}<&{commands} {WRITE_FD}>&{answers}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", *arguments],
            pass_fds=(commands, answers),
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        try:
            self._attach()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End Chromium and remove its profile."""
        os.killpg(self._process.pid, signal.SIGKILL)  # its children as well: they write into the profile
        self._process.wait()
        for handle in (self._commands, self._answers):
            os.close(handle)
        shutil.rmtree(self._profile, ignore_errors=True)

    def open(self, path: Path, *, width: int, height: int, dark: bool = False, phone: bool = False) -> float:
        """Open a file; return the seconds until it was loaded. ``problems`` and ``requests`` begin anew."""
        self.problems.clear()
        self.requests.clear()
        self.resize(width, height, phone=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self._loaded = False
        began = time.monotonic()
        self.call("Page.navigate", url=path.absolute().as_uri())
        while not self._loaded:
            self._take(self._receive(began + self._timeout_s))
        return time.monotonic() - began

    def resize(self, width: int, height: int, *, phone: bool = False) -> None:
        """Give the page another size, in CSS pixels."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)

    def evaluate(self, script: str) -> Any:
        """Return the value of a JavaScript expression; a promise is awaited.

        Raises:
            BrowserError: If it throws.
        """
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise BrowserError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait_for(self, script: str) -> float:
        """Wait until a JavaScript expression is true; return the seconds that took.

        Raises:
            BrowserError: If it does not become true.
        """
        began = time.monotonic()
        while not self.evaluate(script):
            if time.monotonic() - began > self._timeout_s:
                raise BrowserError(f"{script}: not true after {self._timeout_s:g} s")
            time.sleep(0.02)
        return time.monotonic() - began

    def screenshot(self, path: Path) -> None:
        """Write what is shown as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def call(self, method: str, **parameters: Any) -> Any:
        """Return the answer to one command of the protocol.

        Raises:
            BrowserError: If Chromium refuses it or does not answer.
        """
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + self._timeout_s
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == number:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']}")
                return answer["result"]
            self._take(answer)

    def _attach(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            read = os.read(self._answers, 1 << 20) if ready else b""
            if not read:
                raise BrowserError("chromium: does not answer")
            self._buffer += read
        message, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def _take(self, event: dict[str, Any]) -> None:
        """Take in what Chromium says of its own."""
        method, parameters = event.get("method"), event.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            self.problems.append(str(parameters["exceptionDetails"].get("exception", parameters["exceptionDetails"])))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "assert"):
            self.problems.append(str([item.get("value", item.get("description")) for item in parameters["args"]]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.problems.append(str(parameters["entry"]["text"]))
        elif method == "Network.requestWillBeSent":
            url = parameters["request"]["url"]
            if not url.startswith(("data:", "blob:")) and parameters.get("type") != "Document":
                self.requests.append(url)


def _high_pipe() -> tuple[int, int]:
    """Return a pipe whose ends lie above the descriptors that Chromium's are copied to."""
    ends = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return high[0], high[1]
