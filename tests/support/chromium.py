"""A headless Chromium, driven by its DevTools protocol over a pipe: no port, no driver."""

import base64
import fcntl
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")


def find_browser() -> str | None:
    """The path of a browser that speaks the protocol; None if there is none."""
    return next((path for name in NAMES if (path := shutil.which(name)) is not None), None)


class Chromium:
    """One browser with one page. What the page says on its console as a warning or an error, and
    whatever it throws, is in `complaints`; what it asks the network for is in `requests`."""

    def __init__(self, executable: str, profile: Path):
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        flags = [
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--no-first-run", "--disable-background-networking", "--hide-scrollbars"),
            *("--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"),
        ]
        # The protocol's pipes are the descriptors 3 and 4, which Python cannot give by number.
        high_in, high_out = (fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in (theirs_in, theirs_out))
        line = f'exec "$@" 3<&{high_in} 4>&{high_out} {high_in}<&- {high_out}>&-'
        self._process = subprocess.Popen(
            ["bash", "-c", line, "chromium", executable, *flags],
            pass_fds=(high_in, high_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (theirs_in, theirs_out, high_in, high_out):
            os.close(end)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self._seen: set[str] = set()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol, and its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def open(self, page: Path | str, width: int, height: int, *, dark: bool = False) -> None:
        """Loads a file, or an address, and waits until it stands."""
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self._seen.clear()
        self.call("Page.navigate", url=page if isinstance(page, str) else page.as_uri())
        while "Page.loadEventFired" not in self._seen:
            self._message()
        self.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 50)))")

    def resize(self, width: int, height: int) -> None:
        """Gives the page another size."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600},
        )

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def screenshot(self, path: Path, *, whole: bool = False) -> Path:
        """Screenshot of the page as a PNG."""
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(picture["data"]))
        return path

    def close(self) -> None:
        """Ends the browser."""
        self._session = None
        self.call("Browser.close")
        self._process.wait(20)
        os.close(self._in)
        os.close(self._out)

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            part = os.read(self._in, 1 << 16)
            if not part:
                raise RuntimeError(f"the browser ended with status {self._process.wait(20)}")
            self._buffer += part
        line, self._buffer = self._buffer.split(b"\0", 1)
        message = json.loads(line)
        method, inputs = message.get("method", ""), message.get("params", {})
        self._seen.add(method)
        if method == "Runtime.exceptionThrown":
            self.complaints.append(str(inputs["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and inputs["type"] in ("error", "warning"):
            self.complaints.append(str(inputs["args"]))
        elif method == "Log.entryAdded" and inputs["entry"]["level"] in ("error", "warning"):
            self.complaints.append(inputs["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(inputs["request"]["url"])
        return message
