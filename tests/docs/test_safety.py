"""Documents do no harm to who pastes them, also where one of their commands fails."""

import re
from pathlib import Path

import pytest
from support.documents import (  # noqa: F401  (a fixture)
    Step,
    _environment,
    nothing_of_a_failure,
    session,
    steps,
)
from support.needs import Need
from support.paths import PROJECT

from btrfs_ublk.base.capabilities import BTRFS, FUSE, LOOP, ROOT

_HOW_TO = PROJECT / "docs" / "how-to"
_ALL = [PROJECT / "README.md", *sorted((PROJECT / "docs").rglob("*.md"))]
_DOCUMENTS = [document for document in _ALL if steps(document)]
_ASSIGNED = re.compile(
    r"(?:^|[\s;(&|])(?:export |local |read |for )?(\w+)(?:=|\s+in\b)"
)
_USED = re.compile(r"\$\{?([A-Za-z_]\w*)")
#: Every login shell has them.
_OF_THE_SHELL = {"PATH", "PWD", "HOME"}


@pytest.mark.parametrize("document", _DOCUMENTS, ids=lambda path: path.stem)
def test_no_variable_is_taken_for_set(document: Path) -> None:
    known = set(_OF_THE_SHELL)
    for step in steps(document):
        # What stands in single quotes is another program's.
        text = re.sub(r"'[^']*'", "", step.command)
        known |= set(_ASSIGNED.findall(text))
        unknown = set(_USED.findall(text)) - known
        assert not unknown, f"{document}:{step.line}: where is it set?\n{step.command}"


@pytest.mark.parametrize("document", _DOCUMENTS, ids=lambda path: path.stem)
def test_no_loop_waits_for_ever(document: Path) -> None:
    for step in steps(document):
        assert not re.search(
            r"\b(until|while)\b", step.command
        ), f"{document}:{step.line}: use `for try in $(seq N)`\n{step.command}"


@pytest.mark.parametrize("document", _DOCUMENTS, ids=lambda path: path.stem)
def test_the_shell_of_who_pastes_it_stays_as_it_was(document: Path) -> None:
    """%1, and all jobs, may be others than those of the document, and so may what is in
    a directory that it has not made; a umask would count for all that is made later.
    """
    for step in steps(document):
        for harm in (r"kill %", r"\bwait$", r"rm -r /", r"^umask", "/var/cache"):
            where = f"{document}:{step.line}"
            assert not re.search(harm, step.command), f"{where}: {step.command}"


@pytest.mark.parametrize("document", _ALL, ids=lambda path: path.stem)
def test_no_volume_is_removed_through_its_mount(document: Path) -> None:
    """Mount points are below /run/btrfs-ublk, and of volumes that are just made, below
    /var/lib/btrfs-ublk.
    """
    for number, line in enumerate(document.read_text().splitlines(), 1):
        if re.search(r"/run/btrfs-ublk|/var/lib/btrfs-ublk", line):
            where = f"{document}:{number}"
            for command in re.findall(r"\brm -r[^`&|;]*", line):
                assert (
                    "--one-file-system" in command
                ), f"{where}: it deletes what is mounted there: {command}"


#: The last step of each how-to removes the directory that it has worked in.
_FAREWELL = "rm -r $work"


def _without_end(document: Path) -> list[Step]:
    found = steps(document)
    assert _FAREWELL in found[-1].command
    return found[:-1]


@pytest.mark.device
@pytest.mark.parametrize("failing", ["cp", "btrfs"])
def test_detaching_keeps_the_only_copy(
    failing: str, sparse_path: Path, need: Need
) -> None:
    """A program that always fails (a full disk, say) stands in the way of the real one.
    The data of `small` are nowhere else: in its sprout, or in the copy of that.
    """
    need(ROOT, BTRFS, LOOP, FUSE)
    environment = _environment(sparse_path)
    programs = sparse_path / "failing"
    programs.mkdir()
    (programs / failing).write_text("#!/bin/sh\nexit 1\n")
    (programs / failing).chmod(0o755)
    directory = sparse_path / "work"
    directory.mkdir()
    document = _HOW_TO / "detaching.md"
    with session(directory, sparse_path / "printed", environment=environment) as shell:
        for step in _without_end(document):
            shell.run(step, timeout_s=60)
            if step.command.startswith("export PATH"):
                shell.run(
                    Step(step.line, f"export PATH={programs}:$PATH", ""), timeout_s=60
                )
        kept = shell.run(
            Step(0, 'ls "$work"/kept.img "$sprout" 2>/dev/null; true', ""), timeout_s=60
        )
        files = [Path(line) for line in kept.splitlines() if line.startswith("/")]
        assert files, f"with a {failing} that fails, nothing was kept"
        # The copy lies in the session's own /tmp, which nobody else sees.
        sizes = shell.run(
            Step(0, f"stat --format=%s {' '.join(map(str, files))}", ""), timeout_s=60
        )
    assert str(1 << 30) in sizes.split()
