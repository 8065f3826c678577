"""Debian's Chromium without a window, driven through its DevTools pipe: no package beside the standard library.

``with Chromium() as browser: browser.open(path); browser.click("#next")``. What the page logs as an error is in
``browser.errors``.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_SECONDS = 60.0  # for one answer, on a machine that other tests keep busy


def find_chromium() -> str | None:
    """The program, if there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Chromium:
    """One browser with one page."""

    def __init__(self, width: int = 1440, height: int = 900, scale: float = 1.0) -> None:
        self.size, self.scale = (width, height), scale
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._number = 0
        self._buffer = b""

    def __enter__(self) -> Self:
        program = find_chromium()
        assert program is not None, "no Chromium"
        self._home = tempfile.mkdtemp(prefix="amp-chromium-")
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        width, height = self.size
        command = [
            program, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--hide-scrollbars",
            "--no-first-run", "--disable-dev-shm-usage", "--disable-extensions", "--disable-background-networking",
            "--mute-audio", f"--user-data-dir={self._home}", f"--window-size={width},{height}", "about:blank",
        ]  # fmt: skip
        # the pipe is on file descriptors 3 and 4, which Popen can hand on but not number
        script = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", *command], pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self._session: str | None = None
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
            self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                      deviceScaleFactor=self.scale, mobile=False)  # fmt: skip
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            os.close(self._to)
        with contextlib.suppress(OSError):
            os.close(self._from)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(10)
        shutil.rmtree(self._home, ignore_errors=True)

    # ------------------------------------------------------------------------------------- the protocol

    def call(self, method: str, **params: Any) -> Any:
        """Call a method of the DevTools protocol and wait for its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        for answer in self._messages():
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._note(answer)
        raise AssertionError("unreachable")

    def _messages(self) -> Iterator[dict[str, Any]]:
        end = time.monotonic() + _SECONDS
        while True:
            while b"\0" in self._buffer:
                message, _, self._buffer = self._buffer.partition(b"\0")
                yield json.loads(message)
            ready, _, _ = select.select([self._from], [], [], max(end - time.monotonic(), 0))
            assert ready, f"Chromium did not answer within {_SECONDS:.0f} s"
            more = os.read(self._from, 1 << 20)
            assert more, "Chromium went away"
            self._buffer += more

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.errors.append(str(params["args"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    # ---------------------------------------------------------------------------------------- the page

    def open(self, path: Path) -> float:
        """Load a page; the seconds until it says that it is ready."""
        start = time.monotonic()
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait("document.body && document.body.dataset.ready === 'yes'")
        return time.monotonic() - start

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + _SECONDS
        while not self.run(expression):
            assert time.monotonic() < end, f"still false after {_SECONDS:.0f} s: {expression}"
            time.sleep(0.02)

    def click(self, selector: str) -> None:
        """Click the middle of the first element that a selector finds, as a mouse does."""
        where = self.run(
            f"(() => {{ const r = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
            " return [r.left + r.width / 2, r.top + Math.min(r.height / 2, 14)]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=where[0], y=where[1], button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self.call("Input.insertText", text=text)

    def key(self, name: str) -> None:
        """Press a key."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name,
                      windowsVirtualKeyCode={"Enter": 13, "ArrowLeft": 37, "ArrowRight": 39}.get(name, 0))  # fmt: skip

    def text(self, selector: str) -> str:
        """The text of an element."""
        return str(self.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    def screenshot(self, path: Path) -> None:
        """The page as a PNG."""
        data = self.call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))
