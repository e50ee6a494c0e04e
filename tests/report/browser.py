"""A headless Chromium, driven by the DevTools protocol over a pipe: no driver, no dependency.

Chromium reads commands on file descriptor 3 and writes answers and events to 4, JSON ended by NUL
(`--remote-debugging-pipe`). Everything is bounded in time, and the browser is ended by its id.
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
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


def find_browser() -> str | None:
    """Find a Chromium: $COTERIE_CHROMIUM, or one on the path."""
    given = os.environ.get("COTERIE_CHROMIUM")
    return given or next((found for name in _NAMES if (found := shutil.which(name))), None)


class Browser:
    """One browser with one page; use it in a `with`.

    Attributes:
        events: Everything that the page's browser has said, in order.
    """

    def __init__(self, program: str, *, width: int = 1280, height: int = 900, limit: float = 120):
        self._limit, self._left, self._number = limit, b"", 0
        self._profile = tempfile.mkdtemp(prefix="browser-")
        self.events: list[dict[str, Any]] = []
        read, self._out = os.pipe()
        self._in, write = os.pipe()
        command = [program, *_FLAGS, f"--user-data-dir={self._profile}"]
        command += [f"--window-size={width},{height}", "about:blank"]
        # The shell puts the pipe's ends where the browser looks for them.
        placed = f'exec 3<&{read} 4>&{write}; exec "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", placed, "browser", *command],
            pass_fds=(read, write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(read)
        os.close(write)
        self._session: str | None = None

    def __enter__(self) -> Self:
        try:
            targets = self.call("Target.getTargets")["targetInfos"]
            page = next(one["targetId"] for one in targets if one["type"] == "page")
            told = self.call("Target.attachToTarget", targetId=page, flatten=True)
            self._session = told["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def _end(self) -> None:
        # The browser and its helpers are a session of their own.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=20)
        for end in (self._in, self._out):
            os.close(end)
        shutil.rmtree(self._profile, ignore_errors=True)

    def call(self, method: str, **settings: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self._number += 1
        command: dict[str, Any] = {"id": self._number, "method": method, "params": settings}
        if self._session is not None:
            command["sessionId"] = self._session
        os.write(self._out, json.dumps(command).encode() + b"\0")
        for message in self._messages(self._limit):
            if message.get("id") == self._number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                result: dict[str, Any] = message.get("result", {})
                return result
        raise TimeoutError(f"{method}: no answer from the browser in {self._limit:g} seconds")

    def _messages(self, limit: float) -> Iterator[dict[str, Any]]:
        """Return what the browser says, answers and events, until the time is over."""
        end = time.monotonic() + limit
        while True:
            *whole, self._left = self._left.split(b"\0")
            for number, text in enumerate(whole):
                message = json.loads(text)
                if "method" in message:
                    self.events.append(message)
                else:
                    self._left = b"\0".join([*whole[number + 1 :], self._left])
                    yield message
                    break
            else:
                wait = end - time.monotonic()
                if wait <= 0 or not select.select([self._in], [], [], wait)[0]:
                    return
                got = os.read(self._in, 1 << 20)
                if not got:
                    raise RuntimeError("the browser ended")
                self._left += got

    def open(self, page: Path) -> None:
        """Open a page from the disk and wait until it is loaded."""
        seen = len(self.events)
        self.call("Page.navigate", url=page.resolve(strict=True).as_uri())
        self.wait_for(
            "document.readyState === 'complete'",
            also=lambda: any(e["method"] == "Page.loadEventFired" for e in self.events[seen:]),
        )

    def evaluate(self, script: str) -> Any:
        """Return what JavaScript gives, as plain data."""
        told = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in told:
            raise RuntimeError(f"{script}: {told['exceptionDetails']}")
        return told["result"].get("value")

    def wait_for(self, script: str, limit: float = 120, also: Any = lambda: True) -> None:
        """Wait until JavaScript gives something true."""
        end = time.monotonic() + limit
        while not (self.evaluate(script) and also()):
            if time.monotonic() > end:
                raise TimeoutError(f"not true in {limit:g} seconds: {script}")
            time.sleep(0.05)

    def wait_for_charts(self) -> None:
        """Wait until every chart of a report is drawn, or has failed."""
        self.wait_for(
            "[...document.querySelectorAll('.chart')].every((place) => place.dataset.state)"
        )

    def resize(self, width: int, height: int, *, scale: float = 1) -> None:
        """Make the window of another size."""
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def prefer(self, scheme: str) -> None:
        """Prefer "light" or "dark"."""
        wish = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media="", features=wish)

    def hover(self, x: float, y: float) -> None:
        """Move the mouse there."""
        for place in ((x - 3, y - 3), (x, y)):
            point = {"x": place[0], "y": place[1]}
            self.call("Input.dispatchMouseEvent", type="mouseMoved", **point)

    def screenshot(self, out: Path, *, whole: bool = True) -> Path:
        """Keep a picture of the page, or of what is in the window."""
        told = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole,
                         **({"clip": self._whole()} if whole else {}))  # fmt: skip
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(base64.b64decode(told["data"]))
        return out

    def _whole(self) -> dict[str, Any]:
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}

    def pdf(self) -> bytes:
        """Print the page."""
        told = self.call("Page.printToPDF", printBackground=False, preferCSSPageSize=True)
        return base64.b64decode(told["data"])

    def complaints(self) -> list[str]:
        """Return errors of the console and exceptions so far."""
        found = []
        for event in self.events:
            method, told = event["method"], event["params"]
            if method == "Runtime.exceptionThrown":
                found.append(json.dumps(told["exceptionDetails"]))
            elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning"):
                found.append(json.dumps(told["args"]))
            elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
                found.append(told["entry"]["text"])
        return found

    def requests(self) -> list[str]:
        """Return the addresses of everything that was asked for so far."""
        asked = (e for e in self.events if e["method"] == "Network.requestWillBeSent")
        return [event["params"]["request"]["url"] for event in asked]


@contextmanager
def opened(page: Path, **settings: Any) -> Iterator[Browser]:
    """Open a page in a browser of its own, with its charts drawn.

    Raises:
        FileNotFoundError: If there is no browser.
    """
    program = find_browser()
    if program is None:
        raise FileNotFoundError("no chromium: install one, or name it by $COTERIE_CHROMIUM")
    with Browser(program, **settings) as browser:
        browser.open(page)
        browser.wait_for_charts()
        yield browser
