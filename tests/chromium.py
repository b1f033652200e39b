"""A headless Chromium that a test drives through a pipe (the DevTools protocol), without further packages."""

import json
import os
import shutil
import subprocess
import time

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="apt-get install chromium")

PATIENCE_S = 30.0


class Chromium:
    """One browser with one page."""

    def __init__(self, url: str, width: int, height: int):
        (ours_in, theirs_out), (theirs_in, ours_out) = os.pipe(), os.pipe()
        options = "--headless --no-sandbox --disable-gpu --remote-debugging-pipe"
        # Chromium reads commands from file 3 and writes answers to file 4.
        command = f'exec "$0" {options} 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, str(CHROMIUM)],
            pass_fds=(theirs_in, theirs_out),
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._out, self._in = ours_out, os.fdopen(ours_in, "rb")
        self._number, self._session = 0, None
        self.errors = []
        """Exceptions of the page that nothing caught, and its errors in the console."""
        target = self._send("Target.createTarget", url="about:blank")["targetId"]
        attached = self._send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Runtime", "Log", "Page"):
            self._send(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self._send("Emulation.setDeviceMetricsOverride", **size)
        self._send("Page.navigate", url=url)

    def _send(self, method, **params):
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (found := self._receive()).get("id") != self._number:
            if found["method"] in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.errors.append(found["params"])
        assert "error" not in found, found
        return found["result"]

    def _receive(self):
        text = bytearray()
        while not text.endswith(b"\0"):
            text += self._in.read(1) or b'{"method": "gone"}\0'
        return json.loads(text[:-1])

    def run(self, code):
        """The value of a JavaScript expression."""
        found = self._send(
            "Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_for(self, code):
        """The value of the expression as soon as it is true."""
        end = time.monotonic() + PATIENCE_S
        while not (found := self.run(code)):
            assert time.monotonic() < end, (code, self.errors)
            time.sleep(0.05)
        return found

    def type_into(self, selector, text):
        """Click on an element, select what is in it, and write `text` by keys."""
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        self.run(f"document.querySelector({json.dumps(selector)}).select()")
        self._send("Input.insertText", text=text)

    def press(self, key):
        """Press a key, as `ArrowUp`."""
        for kind in ("keyDown", "keyUp"):
            self._send("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def drag(self, start, end):
        """Press the mouse at a place of the window, move it to another one, and let go."""
        for kind, (x, y) in (
            ("mousePressed", start),
            ("mouseMoved", end),
            ("mouseReleased", end),
        ):
            options = {"x": x, "y": y, "button": "left", "buttons": 1, "clickCount": 1}
            self._send("Input.dispatchMouseEvent", type=kind, **options)

    def __enter__(self):
        return self

    def __exit__(self, *failure):
        self._process.terminate()
        self._process.wait()
        os.close(self._out)
        self._in.close()
