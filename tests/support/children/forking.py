"""fork() starts main() by a fork, from within blocks that clean up.

Arguments: a file for its output, a file to keep open, "thread" to have another thread.
main() prints, as JSON, what it has of the process that forked it.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import sys
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

from btrfs_ublk.base.fork import start_by_fork
from btrfs_ublk.base.signals import deferred, interruptible

TITLE = [sys.executable, "-m", "forking.title"]


def files() -> dict[str, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # That of the list.
            found[name] = os.readlink(f"/proc/self/fd/{name}")
    return found


def main() -> int:
    handlers = {each: signal.getsignal(each) for each in signal.valid_signals()}
    came = "never"
    try:
        with interruptible(), deferred():
            os.kill(os.getpid(), signal.SIGTERM)
            came = "at once"
    except KeyboardInterrupt:
        came = "after it was deferred" if came == "at once" else "too early"
    facts = {
        "argv": sys.argv,
        "command_line": Path("/proc/self/cmdline").read_text().split("\0"),
        "name": Path("/proc/self/comm").read_text().strip(),
        "files": files(),
        "path": sys.path[0],
        "session": os.getsid(0),
        "handled": [each for each, handler in handlers.items() if callable(handler)],
        "blocked": list(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "signal_came": came,
        "environment": os.environ["FORKING"],
    }
    print(json.dumps(facts), flush=True)
    return 0


def fork() -> None:
    talk, kept = map(Path, sys.argv[1:3])
    atexit.register(print, "at exit")
    other = threading.Event()
    if sys.argv[3:] == ["thread"]:
        threading.Thread(target=other.wait).start()
    with kept.open() as file, socket.socket(), talk.with_suffix(".lock").open("w"):
        with interruptible(), ExitStack() as stack, deferred():
            stack.callback(print, "undone")
            print("not written yet", end=" ")
            print(
                start_by_fork(
                    "forking",
                    ["--option"],
                    title=TITLE,
                    talk=talk,
                    keep_open_fds=[file.fileno()],
                ),
                end=" ",
            )
    other.set()
