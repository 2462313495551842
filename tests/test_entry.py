"""From a command to an exit status; groups whose commands are modules."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from btrfs_ublk.entry import ModuleGroup, run_command
from btrfs_ublk.errors import BtrfsUblkError, CapabilityError, UsageError

MODULE = """
import click

@click.command()
def command():
    click.echo(__name__)
"""


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[click.Group]:
    package = tmp_path / "nouns"
    package.mkdir()
    for name in ("__init__", "main", "two_words"):
        (package / f"{name}.py").write_text(MODULE)
    (package / "broken.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield ModuleGroup("group", package=import_module("nouns"), but=("main",))
    for name in [name for name in sys.modules if name.partition(".")[0] == "nouns"]:
        del sys.modules[name]


def test_modules_are_commands(group: click.Group) -> None:
    done = CliRunner().invoke(group, ["two-words"])
    assert (done.exit_code, done.output) == (0, "nouns.two_words\n")


@pytest.mark.parametrize("name", ["main", "__init__", "no-such", "two_words"])
def test_others_are_not(group: click.Group, name: str) -> None:
    done = CliRunner().invoke(group, [name])
    assert done.exit_code == 2 and "No such command" in done.output


def test_a_typo_has_a_suggestion(group: click.Group) -> None:
    done = CliRunner().invoke(group, ["to-words"])
    assert done.exit_code == 2
    assert "No such command 'to-words'. Did you mean 'two-words'?" in done.output


def test_a_module_is_imported_when_it_is_used(group: click.Group) -> None:
    assert CliRunner().invoke(group, ["two-words"]).exit_code == 0
    with pytest.raises(RuntimeError, match="imported"):
        CliRunner().invoke(group, ["broken"], catch_exceptions=False)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (BtrfsUblkError("no", hint="do it"), 1),
        (UsageError("no", hint="do it"), 2),
        (CapabilityError("no", hint="do it"), 3),
    ],
)
def test_the_status_tells_what_kind_of_error_it_was(
    error: BtrfsUblkError,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    @click.command()
    def failing() -> None:
        raise error

    monkeypatch.setattr(sys, "argv", ["it"])
    with pytest.raises(SystemExit) as caught:
        run_command(failing, name="it")
    assert caught.value.code == status
    assert capsys.readouterr().err == "it: error: no\n  hint: do it\n"


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


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_status_tells_which_signal_it_was(
    signum: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    @click.command()
    def interrupted() -> None:
        try:
            os.kill(os.getpid(), signum)
        except KeyboardInterrupt as error:
            error.add_note("something is left")
            raise

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in signals}
    monkeypatch.setattr(sys, "argv", ["it"])
    try:
        with pytest.raises(SystemExit) as caught:
            run_command(interrupted, name="it")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert caught.value.code == 128 + signum
    said = capsys.readouterr().err
    assert said.endswith("it: interrupted\n  note: something is left\n")
