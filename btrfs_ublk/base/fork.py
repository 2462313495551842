"""Start a program of this package by a fork, without executing an interpreter: what
this process has imported is there already.

Only commands do it: they know what they have. A fork takes no other thread along, so
what these hold at that moment (a lock of malloc, say) would be held for ever.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import traceback
from collections.abc import Collection, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from btrfs_ublk.base.signals import forget_handlers

#: proc_pid_stat(5): where the command line is in memory, counted from field 3.
_ARG_START, _ARG_END = 48 - 3, 49 - 3


def start_by_fork(
    module: str,
    options: Sequence[str],
    *,
    title: Sequence[str],
    talk: Path,
    keep_open_fds: Collection[int],
) -> bool:
    """Have a process in a session of its own call the module's main(), with ``options``
    in sys.argv. Return False when this process has threads, or cannot fork.

    It has the environment, limits, namespaces and working directory of this one, as any
    child, but of its open files only ``keep_open_fds``, and its output goes to the file
    ``talk``. ``title`` is shown as its command line; False is returned when that is
    longer than ours. NB: it does not return from here, so nothing that the frames above
    undo, and nothing that ``atexit`` does, is done twice.
    """
    place = _place_of_title(title)
    if place is None or len(os.listdir("/proc/self/task")) > 1:
        return False
    sys.stdout.flush()
    sys.stderr.flush()
    mask = signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                if os.fork():
                    os._exit(0)
                # NB: garbage that is collected later would close what has its numbers.
                gc.freeze()
                _set_standard_files(talk)
                close_all_but(keep_open_fds)
                forget_handlers()
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                _set_title(place, title)
                if not sys.flags.safe_path:
                    del sys.path[0]  # The directory of the command, or the current one.
                sys.argv[:] = [module, *options]
                os._exit(import_module(module).main())
            except BaseException:
                traceback.print_exc()
            os._exit(1)
    except OSError:
        return False
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        return os.waitpid(pid, 0)[1] == 0
    except ChildProcessError:
        return True  # Whoever started us had us ignore SIGCHLD; the reply will tell.


def close_all_but(kept: Collection[int]) -> None:
    """Close all descriptors but ``kept`` and the standard ones."""
    for fd in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, *kept}:
        with suppress(OSError):
            os.close(fd)


def _set_standard_files(talk: Path) -> None:
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(os.open(talk, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), 1)
    os.dup2(1, 2)


def _place_of_title(title: Sequence[str]) -> tuple[int, int] | None:
    """Return where this process's command line is in memory, and how long; None if that
    is too short."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    return (start, end - start) if len(_encoded(title)) <= end - start else None


def _set_title(place: tuple[int, int], title: Sequence[str]) -> None:
    start, size = place
    ctypes.memmove(start, _encoded(title).ljust(size, b"\0"), size)
    # Otherwise it would have the name of the command, as "pkill btrfs-ublk" finds it.
    Path("/proc/self/comm").write_bytes(os.path.basename(os.fsencode(title[0])))


def _encoded(title: Sequence[str]) -> bytes:
    return b"".join(os.fsencode(word) + b"\0" for word in title)
