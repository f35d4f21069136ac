"""A headless Chromium for tests of pages, driven by its DevTools protocol over a pipe: no driver, no library, no open port.

Messages are JSON texts that end in a zero byte (chromedevtools.github.io/devtools-protocol); the browser reads them from
descriptor 3 and answers on descriptor 4.
"""

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SECONDS = 30.0
"""How long the browser may take for one answer: other tests run on the same cores."""


def chromium() -> str | None:
    """A browser on the path that speaks the protocol."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((found for name in names if (found := shutil.which(name))), None)


class Browser:
    """One tab of a browser.

    Attributes:
        complaints: exceptions, errors of the console, and what the page's policy refused, as they came.
        requests: addresses that the page asked for, that of the page included.
    """

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back, self._rest, self._number, self._session = to, back, b"", 0, ""
        self.complaints: list[str] = []
        self.requests: list[str] = []

    def open(self, page: Path, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Shows a file in the tab and waits until it is loaded."""
        if not self._session:
            target = self.ask("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.ask(f"{domain}.enable")
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.ask("Page.navigate", url=page.resolve().as_uri())
        self.until("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, condition: str) -> None:
        """Waits for an expression to be true."""
        end = time.monotonic() + SECONDS
        while not self.run(condition):
            assert time.monotonic() < end, f"still false: {condition}"
            time.sleep(0.02)

    def move(self, x: float, y: float, **more: Any) -> None:
        """Moves the pointer; coordinates are those of the window."""
        self.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y, **more)

    def drag(self, x: float, y: float, to: float) -> None:
        """From (x, y) to (to, y) with the left button held."""
        self.move(x, y)
        self.ask("Input.dispatchMouseEvent", type="mousePressed", x=x, y=y, button="left", buttons=1, clickCount=1)
        for part in (0.5, 1.0):
            self.move(x + (to - x) * part, y, button="left", buttons=1)
        self.ask("Input.dispatchMouseEvent", type="mouseReleased", x=to, y=y, button="left", clickCount=1)

    def picture(self, target: Path) -> None:
        """The whole page as a PNG file."""
        shot = self.ask("Page.captureScreenshot", captureBeyondViewport=True)
        target.write_bytes(base64.b64decode(shot["data"]))

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The answer to a command."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            said = self._message()
            if said.get("id") == self._number:
                assert "error" not in said, f"{method}: {said['error']}"
                return said["result"]
            self._note(said.get("method"), said.get("params", {}))

    def _note(self, method: str | None, said: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.complaints.append(str(said["exceptionDetails"].get("exception", said["exceptionDetails"])))
        elif method == "Runtime.consoleAPICalled" and said["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(said["args"]))
        elif method == "Log.entryAdded" and said["entry"]["level"] in ("error", "warning"):
            self.complaints.append(said["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(said["request"]["url"])

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert select.select([self._back], [], [], SECONDS)[0], "the browser does not answer"
            more = os.read(self._back, 2**20)
            assert more, "the browser has ended"
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser with a fresh profile; it ends with the block, and so does what it started."""
    program = chromium()
    assert program is not None
    (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # A shell moves the descriptors to where the browser looks for them, in the child alone.
        command = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        arguments = [program, *flags, f"--user-data-dir={profile}", "--remote-debugging-pipe"]
        process = subprocess.Popen(
            ["bash", "-c", command, "bash", *arguments],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            yield Browser(ours_out, ours_in)
        finally:
            os.close(ours_out)
            os.close(ours_in)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
