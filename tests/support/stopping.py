"""How servers that tests start are stopped: for good, or for a while."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from os import PathLike
from pathlib import Path
from signal import SIGKILL, SIGSTOP

#: They have nothing to lose, and SeaweedFS takes its time.
STOP_TIMEOUT_S = 2
FREEZE_TIMEOUT_S = 10


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
    before it stops.
    """
    os.kill(pid, SIGSTOP)
    deadline_s = time.monotonic() + FREEZE_TIMEOUT_S
    while not _has_stopped(pid):
        if time.monotonic() > deadline_s:
            break  # one of them waits in the kernel, and does nothing else
        time.sleep(0.001)


def _has_stopped(pid: int) -> bool:
    for task in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):  # the thread has ended
            if task.read_text().rpartition(")")[2].split()[0] not in "TtZX":
                return False
    return True


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
