"""Chromium without a window, told what to do over its pipe (the DevTools protocol)."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar


@dataclass(frozen=True)
class Chromium:
    """The browser, by either of the names that distributions give it."""

    name: ClassVar[str] = "chromium"
    hint: ClassVar[str] = "install the package chromium"

    @property
    def program(self) -> str | None:
        return shutil.which("chromium") or shutil.which("chromium-browser")

    def probe(self) -> str | None:
        return None if self.program else "it is not on PATH"


CHROMIUM = Chromium()
_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 10.0
#: What the browser reads and writes, see --remote-debugging-pipe.
_THEIR_INPUT, _THEIR_OUTPUT = 3, 4


class Browser:
    """One tab. Whatever takes longer than a minute raises TimeoutError."""

    def __init__(self, to_fd: int, from_fd: int) -> None:
        self._to, self._from = to_fd, from_fd
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        #: What it has asked the network, or the disk, for.
        self.requests: list[str] = []
        #: Faults that the page has, as it says itself: refused scripts and the like.
        self.complaints: list[str] = []

    def attach(self) -> None:
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        found = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def open(self, path: Path, *, width: int, dark: bool = False) -> None:
        """Show a file, as wide as a screen of so many CSS pixels."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", media="", features=[scheme])
        self._loaded = False
        self._call("Page.navigate", url=path.absolute().as_uri())
        deadline_s = time.monotonic() + _TIMEOUT_S
        while not self._loaded:
            self._take(deadline_s)

    def evaluate(self, script: str) -> Any:
        """What an expression is, as JSON."""
        done = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in done:
            raise RuntimeError(str(done["exceptionDetails"])[:2000])
        return done["result"].get("value")

    def pdf(self) -> bytes:
        """As it prints, on A4."""
        done = self._call("Page.printToPDF", paperWidth=8.27, paperHeight=11.69)
        return base64.b64decode(done["data"])

    def close(self) -> None:
        self._session = None
        self._call("Browser.close")

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        deadline_s = time.monotonic() + _TIMEOUT_S
        while True:
            answer = self._take(deadline_s)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                found: dict[str, Any] = answer["result"]
                return found

    def _take(self, deadline_s: float) -> dict[str, Any]:
        """The next message."""
        while b"\0" not in self._buffer:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not select.select([self._from], [], [], left_s)[0]:
                raise TimeoutError("the browser does not answer")
            data = os.read(self._from, 1 << 20)
            if not data:
                raise EOFError("the browser has ended")
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, parameters: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Log.entryAdded":
            self.complaints.append(parameters["entry"]["text"])
        elif method in ("Runtime.exceptionThrown", "Page.javascriptDialogOpening"):
            self.complaints.append(str(parameters))


@contextmanager
def browser(directory: Path) -> Iterator[Browser]:
    """A browser that keeps its files in ``directory``, and is gone after the block."""
    their_input, to_fd = os.pipe()
    from_fd, their_output = os.pipe()
    argv = [
        *(CHROMIUM.program or CHROMIUM.name, "--headless", "--remote-debugging-pipe"),
        f"--user-data-dir={directory / 'profile'}",
        *("--no-first-run", "--disable-gpu", "--disable-dev-shm-usage"),
        *("--disable-background-networking", "--disable-component-update"),
        *("--disable-sync", "--disable-extensions", "--disable-breakpad"),
        *("--hide-scrollbars", "--force-color-profile=srgb", "--no-zygote"),
    ]
    if os.geteuid() == 0:
        # Chromium refuses to be root in a sandbox. What it shows here is our own.
        argv.append("--no-sandbox")

    def place_pipes() -> None:
        for source, above in ((their_input, 100), (their_output, 101)):
            os.dup2(source, above)
        os.dup2(100, _THEIR_INPUT)
        os.dup2(101, _THEIR_OUTPUT)

    with (directory / "chromium.log").open("wb") as log:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | {"HOME": str(directory)},
            pass_fds=(_THEIR_INPUT, _THEIR_OUTPUT),
            preexec_fn=place_pipes,
            start_new_session=True,
        )
    os.close(their_input)
    os.close(their_output)
    made = Browser(to_fd, from_fd)
    try:
        made.attach()
        yield made
        with suppress(OSError, EOFError, TimeoutError):
            made.close()
    finally:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_TIMEOUT_S if process.poll() is None else 0)
        # Its own session, so its processes, and nobody else's.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(to_fd)
        os.close(from_fd)
