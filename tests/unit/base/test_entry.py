"""From a command to an exit status; groups whose commands are modules."""

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest

from btrfs_ublk.base.entry import print_rows, run_command
from btrfs_ublk.errors import BtrfsUblkError


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FileNotFoundError(2, "No such file or directory", "/a/b"), "/a/b: No such"),
        (PermissionError(13, "Permission denied", b"/a/b"), "/a/b: Permission"),
        (OSError(28, "No space left on device"), "No space left on device\n"),
        (TimeoutError(), "TimeoutError\n"),
        (
            UnicodeEncodeError("utf-8", "a = 1\nb = /\udcff\n", 11, 12, "surrogate"),
            r"'b = /\udcff' cannot be written in utf-8",
        ),
    ],
)
def test_errors_of_the_system_have_no_traceback(
    error: Exception,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """But for who asks what is done (-v)."""

    @click.command()
    def failing() -> None:
        error.add_note("something is left")
        raise error

    monkeypatch.setattr(sys, "argv", ["it"])
    with caplog.at_level(logging.INFO, "btrfs_ublk"), pytest.raises(SystemExit) as end:
        run_command(failing, name="it")
    assert end.value.code == 1
    told = capsys.readouterr().err
    assert told.startswith(f"it: error: {said}")
    assert told.endswith("  note: something is left\n") and "Traceback" not in told
    assert "Traceback" in caplog.text


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ("features --json > /dev/full", 1, "error: No space left on device"),
        ("--help > /dev/full", 1, "error: No space left on device"),
        ("device up x - <&-", 2, "is no JSON"),
        ("device up x - <&- >&-", 2, "is no JSON"),
        ("doctor --json >&- 2>&-", None, ""),
        ("nonsense 2>&-", 2, ""),
    ],
)
def test_streams_that_are_closed_or_full(
    words: str, status: int | None, said: str
) -> None:
    """Without a traceback, and without Python's own status 120."""
    command = f"env -u PYTHONUNBUFFERED {sys.executable} -m btrfs_ublk.cli.main {words}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.returncode == status or status is None and done.returncode in (0, 3)
    assert said in done.stderr
    assert "Traceback" not in done.stderr and "ignored" not in done.stderr


#: A sitecustomize: a signal comes in the middle of an import, in a place where Python
#: makes another exception of what it raises.
INTERRUPTED = """
import os, signal, sys

class Descriptor:
    def __set_name__(self, owner, name):
        os.kill(os.getpid(), signal.{name})

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "{module}":
            sys.meta_path.remove(self)
            type("Interrupted", (), dict(descriptor=Descriptor()))
        return None

sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize(
    ("program", "module", "signum"),
    [
        # What the command imports first, last before it can do better, and then.
        ("btrfs-ublk", "btrfs_ublk.command", signal.SIGINT),
        ("btrfs-ublk", "btrfs_ublk.cli.volume", signal.SIGHUP),
        ("btrfs_ublk.testing.range_server", "btrfs_ublk.testing", signal.SIGINT),
        ("btrfs_ublk.ops.manual", "btrfs_ublk.base.entry", signal.SIGTERM),
    ],
)
def test_a_signal_during_imports(
    tmp_path: Path, program: str, module: str, signum: signal.Signals
) -> None:
    """The status tells of it, and there is no traceback."""
    code = INTERRUPTED.format(name=signum.name, module=module)
    (tmp_path / "sitecustomize.py").write_text(code)
    argv = [sys.executable, "-m", program, "volume", "snapshots", "none"]
    if program == "btrfs-ublk":
        argv[:3] = [str(Path(sys.executable).with_name(program))]
    done = subprocess.run(
        argv,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode in (-signum, 128 + signum), done
    assert "Traceback" not in done.stderr


def test_control_characters_of_others_do_not_reach_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["test"])

    @click.command()
    def command() -> None:
        print_rows([["NAME"], ["\x1b[2Jé\t\u202e"]])
        error = BtrfsUblkError("the registry says \x1b]0;owned\x07\x9b\nand more")
        error.add_note("about \r it")
        raise error

    with pytest.raises(SystemExit):
        run_command(command, name="test")
    out, err = capsys.readouterr()
    assert out == "NAME\n\\x1b[2Jé\t\\u202e\n"
    assert err == (
        "test: error: the registry says \\x1b]0;owned\\x07\\x9b\nand more\n"
        "  note: about \\r it\n"
    )
