"""Run a command of the package from its checkout: that of .venv, which is set up first
where it is not there.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

_PROJECT = Path(__file__).resolve().parent.parent.parent


def execute(*noun: str) -> NoReturn:
    """Become ``btrfs-ublk NOUN…`` with the arguments of this script."""
    command = _PROJECT / ".venv" / "bin" / "btrfs-ublk"
    if not command.exists() or shutil.which("fio") is None:
        # What it says belongs to stderr: stdout is for results.
        setup = [str(_PROJECT / "scripts" / "setup"), "--bench"]
        status = subprocess.run(setup, stdout=sys.stderr, check=False).returncode
        if status:
            sys.exit(status)
    os.execv(command, [str(command), *noun, *sys.argv[1:]])
