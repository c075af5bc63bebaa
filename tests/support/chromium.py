"""A headless Chromium, driven through its DevTools pipe with nothing but the standard library."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NAMES = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome-headless-shell",
    "chrome",
)
SECONDS = 30.0


def find() -> str | None:
    """The browser of $PULSE_CHROMIUM, else of the path; None where there is none."""
    return os.environ.get("PULSE_CHROMIUM") or next(
        (path for name in NAMES if (path := shutil.which(name))), None
    )


class Chromium:
    """One browser with one page. ``errors`` are what its console and its security policy complained
    of, ``requests`` the addresses that it asked for."""

    def __init__(self, executable: str) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._profile = tempfile.TemporaryDirectory(
            prefix="pulse-chromium-", ignore_cleanup_errors=True
        )
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
        ]
        flags += [
            "--disable-background-networking",
            "--disable-component-update",
            "--hide-scrollbars",
        ]
        flags += ["--remote-debugging-pipe", f"--user-data-dir={self._profile.name}", "about:blank"]
        # The browser reads file descriptor 3 and writes 4.
        shell = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", shell, executable, *flags],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer = b""
        self._last = 0
        self._session: str | None = None
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(t["targetId"] for t in targets if t["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._profile.cleanup()

    def show(
        self,
        page: Path,
        *,
        width: int = 1200,
        height: int = 900,
        dark: bool = False,
        mobile: bool = False,
    ) -> None:
        """Opens a file in a window of that size, and waits until it is loaded and drawn."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=mobile,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.errors.clear()
        self.requests.clear()
        opened = self.call("Page.navigate", url=page.absolute().as_uri())
        if "errorText" in opened:
            raise RuntimeError(f"{page}: {opened['errorText']}")
        self.evaluate("new Promise(done => { const ready = () => requestAnimationFrame(() => "
                      "setTimeout(done, 50));"
                      "document.readyState === 'complete' ? ready() : addEventListener('load', "
                      "ready); })")  # fmt: skip

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page, a promise's result included."""
        done = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in done:
            raise RuntimeError(f"{expression}: {done['exceptionDetails']}")
        return done["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """The whole page as a PNG."""
        taken = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(taken["data"]))

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One DevTools command and its result."""
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        deadline = time.monotonic() + SECONDS
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == self._last:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])
            self._note(answer)

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(self._in, 1 << 20) if ready else b""
            if not chunk:
                raise TimeoutError("the browser does not answer")
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in (
            "error",
            "warning",
            "assert",
        ):
            self.errors.append(" ".join(str(arg.get("value")) for arg in params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
