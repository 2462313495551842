"""Programs that are forked instead of executed: they get no more than they need."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from support.paths import CHILDREN
from support.waiting import wait_until

from btrfs_ublk.base.process import run


def forked(
    tmp_path: Path, *options: str, before: Sequence[str] = ()
) -> tuple[str, Path]:
    """Return what support/children/forking.py, behind the words ``before``, prints, and
    the forked program's output."""
    talk, kept = tmp_path / "talk", tmp_path / "kept"
    kept.touch()
    done = run(
        [
            *(*before, sys.executable, "-c", "import forking; forking.fork()"),
            *(talk, kept, *options),
        ],
        timeout_s=60.0,
        env={**os.environ, "FORKING": "as given", "PYTHONPATH": str(CHILDREN)},
    )
    assert done.stderr == ""
    return done.stdout, talk


def test_a_forked_program_is_as_an_executed_one(tmp_path: Path) -> None:
    printed, talk = forked(tmp_path)
    # Once: it has left its parent's blocks to its parent.
    assert printed == "not written yet True undone\nat exit\n"
    wait_until(lambda: talk.read_text().endswith("\n"), talk.read_text)
    facts = json.loads(talk.read_text())
    assert facts["argv"] == ["forking", "--option"]
    words = [word for word in facts["command_line"] if word]
    assert words == [sys.executable, "-m", "forking.title"]
    assert facts["name"] == Path(sys.executable).name[:15]
    files = {name: facts["files"].pop(name) for name in "012"}
    assert files == {"0": os.devnull, "1": str(talk), "2": str(talk)}
    assert list(facts["files"].values()) == [str((tmp_path / "kept").resolve())]
    assert facts["session"] != os.getsid(0)
    assert facts["handled"] == facts["blocked"] == []
    assert facts["signal_came"] == "after it was deferred"
    assert facts["environment"] == "as given"
    assert facts["path"] == str(CHILDREN)  # Not the current directory.


def test_a_process_with_threads_does_not_fork(tmp_path: Path) -> None:
    printed, talk = forked(tmp_path, "thread")
    assert printed == "not written yet False undone\nat exit\n"
    assert not talk.exists()


def test_a_process_that_ignores_its_children_forks(tmp_path: Path) -> None:
    """So it was started, and the kernel does not tell it how its child has ended."""
    printed, talk = forked(tmp_path, before=["env", "--ignore-signal=CHLD"])
    assert printed == "not written yet True undone\nat exit\n"
