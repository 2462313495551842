"""run() and spawn(): messages, deadlines, and children that do not outlive us."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from btrfs_ublk.base.process import run
from btrfs_ublk.kernel.users import pids_using


def test_who_has_open_what_no_path_leads_to(sparse_path: Path) -> None:
    """As the virtual file of a volume: it keeps the mount busy all the same."""
    whole, part = sparse_path / "whole", sparse_path / "a part"
    (whole / "sub").mkdir(parents=True)
    part.mkdir()
    (whole / "sub" / "file").touch()
    run(["mount", "--bind", whole / "sub", part], timeout_s=60)
    try:
        with (part / "file").open("rb") as file:
            (whole / "sub" / "file").rename(whole / "moved")
            with subprocess.Popen(["sleep", "60"], stdin=file) as process:
                users = pids_using(part)
                process.kill()
        assert users[process.pid].endswith(f"no path leads to, in the mount at {part}")
        assert set(users) == {process.pid, os.getpid()}
        assert pids_using(part) == {}
    finally:
        run(["umount", part], timeout_s=60)
