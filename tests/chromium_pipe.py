"""Headless Chromium that a test drives: pages, keys, clicks, requests and pictures, by the DevTools protocol over pipes."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.browser import CHROMIUM

#: Codes of the keys by which the browser itself does something: operates the control with the focus, or moves the focus.
_KEY_CODES = {" ": 32, "Tab": 9}


class Browser:
    """One page in headless Chromium.

    Args:
        folder: For files of the browser.
        width, height: Of the window.
        dark: Whether the reader prefers dark pages.

    Attributes:
        requests: Addresses that the page has asked for.
        problems: Messages of the console's errors and of uncaught exceptions.
    """

    def __init__(self, folder: Path, width: int = 1280, height: int = 900, *, dark: bool = False) -> None:
        assert CHROMIUM is not None
        self.requests: list[str] = []
        self.problems: list[str] = []
        read_end, self._to = os.pipe()
        self._from, write_end = os.pipe()
        command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                   "--remote-debugging-pipe",
                   "--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run",
                   "--disable-quic", f"--user-data-dir={folder / 'profile'}", f"--window-size={width},{height}",
                   f"--blink-settings=preferredColorScheme={0 if dark else 1}", "about:blank"]  # fmt: skip
        # Chromium reads its descriptor 3 and writes its descriptor 4.
        shell = f'exec 3<&{read_end} 4>&{write_end}; exec "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *command], pass_fds=(read_end, write_end),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(read_end)
        os.close(write_end)
        self._ids, self._buffer, self._session = itertools.count(1), b"", ""
        targets = self._call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self._call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)

    def open(self, address: str) -> None:
        """Opens an address."""
        self._call("Page.navigate", url=address)

    def evaluate(self, script: str) -> Any:
        """Returns the value of a JavaScript expression in the page; a promise is awaited."""
        reply = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    def wait(self, script: str, timeout_s: float = 30.0) -> Any:
        """Waits until an expression is true, and returns its value."""
        deadline = time.monotonic() + timeout_s
        while not (value := self._value_if_loaded(script)):
            assert time.monotonic() < deadline, f"not true within {timeout_s} s: {script}; {self.problems}"
            time.sleep(0.05)
        return value

    def _value_if_loaded(self, script: str) -> Any:
        """Returns the value of an expression; None while the page is being loaded anew."""
        try:
            return self.evaluate(script)
        except AssertionError as error:
            if "navigated" not in str(error):
                raise
            return None

    def click(self, selector: str) -> None:
        """Clicks on the middle of the first element that a selector matches, as a mouse does."""
        x, y = self._middle(selector)
        self.drag((x, y), (x, y))

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Presses the mouse at one point and releases it at another."""
        self.point(*start)
        self._mouse("mousePressed", *start, clickCount=1)
        if start != end:
            self.point(*end)
        self._mouse("mouseReleased", *end, clickCount=1)

    def point(self, x: float, y: float) -> None:
        """Moves the mouse to a point."""
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, key: str) -> None:
        """Presses a key, such as `j` or `Enter`."""
        text, code = key if len(key) == 1 else "", _KEY_CODES.get(key, 0)
        kind = "keyDown" if text else "rawKeyDown"
        self._call("Input.dispatchKeyEvent", type=kind, key=key, text=text, windowsVirtualKeyCode=code)
        self._call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def type(self, selector: str, text: str) -> None:
        """Replaces the text of a field, as typing does."""
        self.evaluate(f"document.querySelector({selector!r}).focus(); document.querySelector({selector!r}).select?.()")
        self._call("Input.insertText", text=text)

    def box(self, selector: str) -> dict[str, float]:
        """Returns left, top, width and height of an element in the window."""
        rectangle: dict[str, float] = self.evaluate(
            f"(() => {{ const e = document.querySelector({selector!r}); e.scrollIntoView({{block: 'nearest'}});"
            " const b = e.getBoundingClientRect(); return {left: b.left, top: b.top, width: b.width, height: b.height}; })()"
        )
        return rectangle

    def picture(self, path: Path) -> None:
        """Writes a picture of the window."""
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))

    def _middle(self, selector: str) -> tuple[float, float]:
        box = self.box(selector)
        return box["left"] + box["width"] / 2, box["top"] + box["height"] / 2

    def _mouse(self, kind: str, x: float, y: float, **options: Any) -> None:
        self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, **options)

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._ids)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + 60
        while True:
            reply = self._receive(deadline)
            if reply.get("id") == number:
                assert "error" not in reply, reply["error"]
                result: dict[str, Any] = reply["result"]
                return result
            self._note(reply)

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            poll = select.poll()
            poll.register(self._from, select.POLLIN)
            is_ready = poll.poll(1000 * max(0.0, deadline - time.monotonic()))
            added = os.read(self._from, 1 << 20) if is_ready else b""
            assert added, "the browser does not answer"
            self._buffer += added
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        method, facts = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(facts["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(str(facts["exceptionDetails"].get("exception", {}).get("description")))
        elif method == "Log.entryAdded" and facts["entry"]["level"] == "error":
            self.problems.append(f"{facts['entry']['text']} {facts['entry'].get('url', '')}")
