"""A headless Chromium without a network, driven over the DevTools protocol on a pipe; the standard library alone."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome", "chrome") if (path := shutil.which(name))), None
)
ANSWER_S = 120.0


class Page:
    """One page. ``problems`` collects console errors, exceptions, failed requests and requests to a network."""

    def __init__(self, profile: Path) -> None:
        """Start the browser with its profile in the folder ``profile``."""
        assert CHROMIUM is not None
        to_browser, self._out = self._pipe()
        self._in, from_browser = self._pipe()
        arguments = (
            CHROMIUM,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--disable-component-update",
            "--no-first-run",
            "--hide-scrollbars",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--user-data-dir={profile}",
            "--remote-debugging-pipe",
            "about:blank",
        )
        log = os.open(profile.with_suffix(".log"), os.O_CREAT | os.O_WRONLY, 0o644)
        actions = [(os.POSIX_SPAWN_DUP2, log, fd) for fd in (1, 2)]
        actions += [(os.POSIX_SPAWN_DUP2, to_browser, 3), (os.POSIX_SPAWN_DUP2, from_browser, 4)]
        self._pid = os.posix_spawn(CHROMIUM, arguments, os.environ, file_actions=actions, setpgroup=0)
        for fd in (to_browser, from_browser, log):
            os.close(fd)
        self._buffer, self._number, self._session = b"", 0, None
        self.problems: list[str] = []
        self._requests: dict[str, str] = {}
        (target,) = [t for t in self.send("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        self._session = self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.send("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)

    @staticmethod
    def _pipe() -> tuple[int, int]:
        """Reading and writing end, both above the numbers that the browser expects its own at."""
        ends = os.pipe()
        high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
        for end in ends:
            os.close(end)
        return high[0], high[1]

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and wait for its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        until = time.monotonic() + ANSWER_S
        while True:
            answer = self._receive(until)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._note(answer)

    def _receive(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._in], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError(f"Chromium did not answer within {ANSWER_S:g} s")
            chunk = os.read(self._in, 1 << 20)
            if not chunk:
                raise RuntimeError("Chromium ended")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(f"console: {[each.get('value', each.get('description')) for each in params['args']]}")
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(f"exception: {details.get('exception', {}).get('description', details['text'])}")
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(f"log: {params['entry']['text']}")
        elif method == "Network.requestWillBeSent":
            url = params["request"]["url"]
            self._requests[params["requestId"]] = url
            if not url.startswith(("file:", "data:", "blob:", "about:")):
                self.problems.append(f"request: {url[:200]}")
        elif method == "Network.loadingFailed":
            self.problems.append(f"failed: {self._requests.get(params['requestId'], '')[:200]} {params['errorText']}")
        elif method == "Page.javascriptDialogOpening":
            self.problems.append(f"dialog: {params['message']}")

    def open(self, path: Path) -> None:
        """Load a file and wait until it is there."""
        self.send("Page.navigate", url=path.resolve().as_uri())
        self.wait_for("document.readyState === 'complete'")

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression; a promise is waited for."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails'].get('exception', {}).get('description')}")
        return answer["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Wait until a JavaScript expression is true."""
        until = time.monotonic() + ANSWER_S
        while not self.evaluate(condition):
            if time.monotonic() > until:
                raise TimeoutError(f"never became true: {condition}")
            time.sleep(0.05)

    def resize(self, width: int, height: int, *, phone: bool = False, scale: float = 1.0) -> None:
        """Make the window this many CSS pixels."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone
        )

    def prefer(self, scheme: str) -> None:
        """``light`` or ``dark``, as the reader's system would have it."""
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def move_to(self, x: float, y: float) -> None:
        """Move the mouse there, in CSS pixels of the window."""
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, x: float, y: float) -> None:
        """Click there."""
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self, path: Path, clip: dict[str, float] | None = None) -> None:
        """Write a PNG of the window, or of a part of the page: x, y, width, height."""
        options: dict[str, Any] = {"format": "png"}
        if clip is not None:
            options |= {"clip": clip | {"scale": 1}, "captureBeyondViewport": True}
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", **options)["data"]))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the browser and all its processes."""
        os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._in)
        os.close(self._out)


def take_picture(page: Page, report: Path, picture: Path, *, scheme: str = "light") -> None:
    """Open a report at its top and write what the window shows, as the README has it."""
    page.prefer(scheme)
    page.resize(1360, 1500)
    page.open(report)
    page.wait_for("[...chartOf.values()].every(chart => !chart.near || !chart.stale)")
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    page.screenshot(picture)


if __name__ == "__main__":
    # python -m tests.chromium outputs/.../report.html docs/report.png
    with tempfile.TemporaryDirectory() as folder, Page(Path(folder) / "profile") as opened:
        take_picture(opened, Path(sys.argv[1]), Path(sys.argv[2]))
