"""A page of a server in headless Chromium, driven through a pipe: what it evaluates, asks for, and logs."""

import fcntl
import json
import os
import subprocess
from base64 import b64decode
from pathlib import Path

from chromiumpages import BROWSER

FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")


class Tab:
    """A tab of a browser of its own; use it as a context.

    `requests` are the addresses that it asked for, `said` what was logged or thrown.
    """

    def __init__(self, folder: Path, width: int = 1200, *, dark: bool = False) -> None:
        self.requests, self.said, self._count = [], [], 0
        (read, out), (back, write) = os.pipe(), os.pipe()
        far = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (read, write)]  # away from 3 and 4, which Chromium uses
        command = [BROWSER, *FLAGS, f"--user-data-dir={folder / 'profile'}", "--remote-debugging-pipe", "about:blank"]
        redirected = f'exec "$@" 3<&{far[0]} 4>&{far[1]}'
        self._process = subprocess.Popen(
            ["bash", "-c", redirected, "bash", *command], pass_fds=far, stderr=subprocess.DEVNULL
        )
        for end in (read, write, *far):
            os.close(end)
        self._out, self._back, self._session = os.fdopen(out, "wb"), os.fdopen(back, "rb"), None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )

    def __enter__(self) -> "Tab":
        return self

    def __exit__(self, *others) -> None:
        self._process.terminate()
        self._process.wait(20)
        self._out.close()
        self._back.close()

    def call(self, method: str, **parameters) -> dict:
        """The result of a method of Chromium's protocol."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        session = {} if self._session is None else {"sessionId": self._session}
        self._out.write(json.dumps({**message, **session}).encode() + b"\0")
        self._out.flush()
        return self._until(lambda answer: answer.get("id") == self._count)["result"]

    def open(self, address: str) -> None:
        """Go to an address, and wait until the page has loaded."""
        self.call("Page.navigate", url=address)
        self._until(lambda answer: answer.get("method") == "Page.loadEventFired")

    def evaluate(self, script: str):
        """The value of an expression, awaited if it is a promise."""
        told = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def screenshot(self, path: Path, *, most: int = 6000) -> None:
        """Write the whole page as a PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], most), "scale": 1}
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(b64decode(shot["data"]))

    def _until(self, wanted) -> dict:
        while True:
            text = bytearray()
            while (sign := self._back.read(1)) != b"\0":
                if not sign:
                    raise RuntimeError("Chromium has ended.")
                text += sign
            answer = json.loads(text)
            assert "error" not in answer, answer
            if answer.get("method") == "Network.requestWillBeSent":
                self.requests.append(answer["params"]["request"]["url"])
            if answer.get("method") in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
                self.said.append(answer["params"])
            if wanted(answer):
                return answer
