"""Servers that tests start by hand, stop, freeze and kill."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from os import PathLike
from pathlib import Path
from signal import SIGKILL, SIGSTOP, SIGTERM, raise_signal
from types import FrameType, TracebackType
from typing import Any

from btrfs_ublk.base.helpers import SERVER, helper_path
from btrfs_ublk.base.signals import interruptible
from btrfs_ublk.server import Description

#: They have nothing to lose, and SeaweedFS takes its time.
STOP_TIMEOUT_S = 2
FREEZE_TIMEOUT_S = 10
#: Its readers have frozen servers, whose devices hang; its writer opens all devices.
FROZEN_LOCK = Path("/dev/shm/btrfs-ublk-tests.frozen")


def ending_with_us(
    argv: Iterable[str | PathLike[str]], *, signal: str = "TERM"
) -> list[str | PathLike[str]]:
    """The command, which gets that signal when the thread that starts it ends, for
    whatever cause: a run of tests that is killed leaves no server (setpriv(1)).
    """
    words = ["setpriv", "--pdeathsig", signal, "--"]
    return [*(words if shutil.which("setpriv") else []), *argv]


def stop(process: subprocess.Popen[bytes]) -> None:
    """TERM, and KILL when that does nothing; it is gone afterwards."""
    process.terminate()
    try:
        process.communicate(timeout=STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def freeze(pid: int) -> None:
    """Send SIGSTOP, and wait until all threads have stopped: until then, one of them
    may still answer. A system call that a thread is in, like writing a record, ends
    before it stops. Until thaw(), nobody looks at all devices of the machine.
    """
    if not _frozen:
        _frozen.append(os.open(FROZEN_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC))
        fcntl.flock(_frozen[0], fcntl.LOCK_SH)
    os.kill(pid, SIGSTOP)
    deadline_s = time.monotonic() + FREEZE_TIMEOUT_S
    while not _has_stopped(pid):
        if time.monotonic() > deadline_s:
            break  # one of them waits in the kernel, and does nothing else
        time.sleep(0.001)


#: The descriptor of FROZEN_LOCK, if this process has frozen others.
_frozen: list[int] = []


def thaw() -> None:
    """Say that no process is left that freeze() has stopped."""
    while _frozen:
        os.close(_frozen.pop())


@contextmanager
def looking_at_all_devices() -> Iterator[None]:
    """For programs that open all devices of the machine, as btrfs check does of a file
    system with several. One that opens a device whose server is frozen would hang, and
    the whole machine's sync(2) with it. What the caller has frozen serves none by now.
    """
    thaw()
    with FROZEN_LOCK.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def unwatched() -> Iterator[None]:
    """Have no such program run meanwhile: it would read a device whose reads a test
    counts."""
    with FROZEN_LOCK.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


def _has_stopped(pid: int) -> bool:
    for task in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):  # the thread has ended
            if task.read_text().rpartition(")")[2].split()[0] not in "TtZX":
                return False
    return True


def interrupted_at_line(number: int, module: str, body: Callable[[], object]) -> bool:
    """Do something, with SIGTERM at the Nth line of a module (``image/layout.py``) that
    runs. Returns False when it was done before that."""
    left = number

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith(module):
            return None
        left -= event == "line"
        if event == "line" and left == 0:
            raise_signal(SIGTERM)
        return trace

    sys.settrace(trace)
    try:
        with interruptible():
            body()
        return False
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)


def killed_at_event(number: int, body: Callable[[], object]) -> bool:
    """Do something in a child, which is killed at its Nth audit event (sys.audit()) of
    something that is opened or changed. Returns False when it was done before that."""
    left = number

    def hook(event: str, _arguments: object) -> None:
        nonlocal left
        if event.startswith(("open", "os.", "shutil.", "fcntl.")):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), SIGKILL)

    pid = os.fork()
    if pid == 0:
        try:
            sys.addaudithook(hook)
            body()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, -SIGKILL)
    return status != 0


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on now."""
    with ExitStack() as stack:
        listeners = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            for _ in range(count)
        ]
        return [listener.getsockname()[1] for listener in listeners]


READY_TIMEOUT_S = 60
END_TIMEOUT_S = 60
REPLY_TIMEOUT_S = 20


class ControlClient:
    """One connection to the control socket."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(REPLY_TIMEOUT_S)
        self.socket.connect(str(path))
        self._file = self.socket.makefile("rb")

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()
        self.socket.close()

    def line(self) -> dict[str, Any]:
        """Return the next reply. Raises EOFError when the server has closed its end."""
        text = self._file.readline()
        if not text:
            raise EOFError("the server closed the connection")
        reply: dict[str, Any] = json.loads(text)
        return reply

    def send(self, request: dict[str, Any]) -> None:
        self.socket.sendall(json.dumps(request).encode() + b"\n")

    def request(self, name: str) -> dict[str, Any]:
        self.send({"request": name})
        return self.line()


class ServerProcess:
    """``with ServerProcess(description) as server:`` kills it at the end."""

    def __init__(
        self,
        description: Description,
        *options: str,
        front_end: str = "ublk",
        environment: dict[str, str] | None = None,
        owner: socket.socket | None = None,
    ) -> None:
        control_fds = [] if owner is None else [owner.fileno()]
        self._directory = tempfile.TemporaryDirectory(prefix="server-")
        self.socket_path = Path(self._directory.name) / "control"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.socket_path))
        self._listener.listen(64)
        self.process = subprocess.Popen(
            ending_with_us(
                [
                    helper_path(SERVER),
                    "--front-end",
                    front_end,
                    "--listen-fd",
                    str(self._listener.fileno()),
                    *(word for fd in control_fds for word in ("--control-fd", str(fd))),
                    *options,
                    "-",
                ]
            ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=[self._listener.fileno(), *control_fds],
            env=os.environ | (environment or {}),
        )
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(description.to_json())
            self.process.stdin.close()
        except BrokenPipeError:
            pass
        self.ready: dict[str, Any] = {}

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(END_TIMEOUT_S)
        for stream in (self.process.stdout, self.process.stderr, self.process.stdin):
            assert stream is not None
            if not stream.closed:
                stream.close()
        self._listener.close()
        self._directory.cleanup()

    def wait_ready(self) -> dict[str, Any]:
        """Return the ready event. If the server ends before, fail with its messages."""
        assert self.process.stdout is not None and self.process.stderr is not None
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"not ready: {self.process.stderr.read()}")
        self.ready = json.loads(line)
        assert self.ready["event"] == "ready", self.ready
        return self.ready

    @property
    def device(self) -> Path:
        return Path(self.ready["device"])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(END_TIMEOUT_S)

    def connect(self) -> ControlClient:
        return ControlClient(self.socket_path)

    def request(self, name: str) -> dict[str, Any]:
        with self.connect() as client:
            return client.request(name)

    def stop(self) -> dict[str, Any]:
        """Ask the server to stop, and return its last line."""
        assert self.request("stop") == {"reply": "stop"}
        return self.last_line(0)

    def last_line(self, status: int) -> dict[str, Any]:
        """Return the last line of a server that has to end with ``status``."""
        assert self.process.stdout is not None and self.process.stderr is not None
        line = self.process.stdout.readline()
        found = self.process.wait(END_TIMEOUT_S)
        assert found == status, (found, self.process.stderr.read())
        last: dict[str, Any] = json.loads(line)
        assert last["event"] == "stopped"
        return last

    def failure(self, status: int = 1) -> str:
        """Return messages of a server that ends with ``status`` before it is ready."""
        assert self.process.stdout is not None and self.process.stderr is not None
        assert self.process.wait(END_TIMEOUT_S) == status
        assert self.process.stdout.read() == ""
        return self.process.stderr.read()


def kill_after(process: subprocess.Popen[str], delay_s: float) -> None:
    """Kill the process after this delay, whatever it is doing then."""
    deadline_s = time.monotonic() + delay_s
    while time.monotonic() < deadline_s:
        pass  # sleep(3) is too coarse here
    process.send_signal(signal.SIGKILL)
    process.wait(END_TIMEOUT_S)


def assert_answers(server: ServerProcess) -> None:
    """It does not wait for ever for others, who misbehave."""
    assert server.request("stats")["reply"] == "stats"
