#!/usr/bin/env python3
"""Run a command for so many seconds at most, whatever it hangs in.

bounded.py SECONDS COMMAND...   (the command's exit status, or 124)

When its time is over it gets SIGTERM, and SIGKILL after GRACE_S. As timeout(1), but for
what the kernel does not let go even then: that is left behind, and what its threads
wait for is printed, since nobody could tell afterwards.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

GRACE_S = 30
_OVERDUE = 124


def _descendants(pid: int) -> Iterator[int]:
    yield pid
    for children in Path("/proc", str(pid), "task").glob("*/children"):
        for child in children.read_text().split():
            yield from _descendants(int(child))


def _tell(pid: int) -> None:
    for each in list(_descendants(pid)):
        for task in Path("/proc", str(each), "task").glob("*"):
            try:
                name = (task / "comm").read_text().strip()
                stack = (task / "stack").read_text()
            except OSError:  # it has ended
                continue
            print(f"process {each}, thread {task.name} ({name}) is in:\n{stack}")


def main(limit_s: float, argv: list[str]) -> int:
    """Returns the exit status."""
    running: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        # Ctrl-C reaches the command by itself: it is of the same process group.
        if number != signal.SIGINT:
            for process in running:
                process.send_signal(number)

    # Before it starts: what has a handler here, the command does not ignore, whatever
    # started us does (nohup, a shell's background).
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, pass_on)
    process = subprocess.Popen(argv)
    running.append(process)
    try:
        status = process.wait(limit_s)
        return status if status >= 0 else 128 - status
    except subprocess.TimeoutExpired:
        print(f"{argv[0]}: not at its end after {limit_s:g} s", flush=True)
        _tell(process.pid)
    process.terminate()
    try:
        process.wait(GRACE_S)
        return _OVERDUE
    except subprocess.TimeoutExpired:
        process.kill()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        print(f"{argv[0]}: the kernel does not let it end; it is left", flush=True)
        _tell(process.pid)
    return _OVERDUE


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
