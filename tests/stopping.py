"""How servers of others, which tests start, end."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from os import PathLike

#: They have nothing to lose, and SeaweedFS takes its time.
STOP_TIMEOUT_S = 2


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
