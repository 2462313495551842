"""What commands import before they do anything, and what that costs.

Each runs as in an installed package: without the loader of an editable install, which
imports more than the command itself. Instructions are those of the process in user
space, counted by the CPU (perf), or else by valgrind.

``python tests/campaigns/imports.py --help``
"""

from __future__ import annotations

import re
import resource
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import click

import btrfs_ublk
from btrfs_ublk.base.entry import run_command
from btrfs_ublk.base.process import run as run_program
from btrfs_ublk.bench.report import Document, Result, Table
from btrfs_ublk.bench.study import Column, Run, study, table
from btrfs_ublk.errors import CommandError

COMMANDS = ("--version", "--help", "volume list", "volume up --help")
_START = "import sys; sys.argv[0] = 'btrfs-ublk'; import btrfs_ublk.cli.main as main; "
_TIMEOUT_S = 300.0
#: Programs that print a command's number of instructions, and how to find it.
_COUNTERS = (
    (["perf", "stat", "-x,", "-e", "instructions:u"], r"^(\d+),,instructions"),
    (
        ["valgrind", "--tool=cachegrind", "--cache-sim=no"]
        + ["--cachegrind-out-file=/dev/null"],
        r"I +refs: +([\d,]+)",
    ),
)
_TIMES = re.compile(r"^import time: +(\d+) \| +\d+ \| +(\S+)$", re.MULTILINE)


class Starter:
    """Runs commands, with their own directory for compiled modules and volumes."""

    def __init__(self, directory: Path) -> None:
        package = Path(btrfs_ublk.__file__).parents[1]
        others = Path(click.__file__).parents[1]
        self._variables = {
            "BTRFS_UBLK_VOLUMES_DIR": str(directory / "volumes"),
            "PYTHONDONTWRITEBYTECODE": "",
            "PYTHONPATH": f"{package}:{others}",
            "PYTHONPYCACHEPREFIX": str(directory / "compiled"),
        }

    def argv(self, command: str | None) -> list[str]:
        """Return the argv of a command; None: of Python alone."""
        code = "pass" if command is None else f"{_START} main.main()"
        variables = [f"{name}={value}" for name, value in self._variables.items()]
        words = [] if command is None else command.split()
        return ["env", *variables, sys.executable, "-S", "-X", "importtime"] + [
            *("-c", code, *words)
        ]

    def imported(self, command: str | None) -> dict[str, int]:
        """Return the microseconds by module, without those of its own imports."""
        printed = run_program(self.argv(command), timeout_s=_TIMEOUT_S).stderr
        return {name: int(time_us) for time_us, name in _TIMES.findall(printed)}

    def cpu_s(self, command: str | None) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run_program(self.argv(command), timeout_s=_TIMEOUT_S)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return sum(after[:2]) - sum(before[:2])

    def instructions(self, command: str | None) -> int | None:
        """Count instructions; None if no program here can."""
        argv = self.argv(command)
        start = argv.index(sys.executable)
        for counter, place in _COUNTERS:
            if shutil.which(counter[0]) is None:
                continue
            try:
                done = run_program(
                    [*argv[:start], *counter, *argv[start:]], timeout_s=300.0
                )
            except CommandError:
                continue
            if found := re.search(place, done.stderr, re.MULTILINE):
                return int(found[1].replace(",", ""))
        return None


def measure(starter: Starter, command: str | None, *, repeats: int) -> Result:
    starter.imported(command)  # compiles modules for the first time
    imported = starter.imported(command)
    return {
        "command": command or "(Python alone)",
        "modules": len(imported),
        "of_ours": sum(name.startswith("btrfs_ublk") for name in imported),
        "instructions": starter.instructions(command),
        "cpu_s": [starter.cpu_s(command) for _ in range(repeats)],
        "slowest_us": dict(sorted(imported.items(), key=lambda x: -x[1])[:10]),
    }


def _slowest(results: Sequence[Result]) -> str:
    slowest = results[0]["slowest_us"].items()
    return ", ".join(f"{name} {us}" for name, us in list(slowest)[:3])


def tables(document: Document) -> list[Table]:
    columns = [
        Column("modules", "modules"),
        Column("ours", "of_ours"),
        Column("instructions, 10^6", "instructions", 1, 1e-6),
        Column("CPU, ms", lambda results: median(results[0]["cpu_s"]), 1, 1e3),
        Column("slowest imports, us", _slowest),
    ]
    names = {"command": lambda x: str(x["command"])}
    return [table("Starting", document["results"], names, columns, left=0)]


@study("imports", click.argument("commands", nargs=-1), repeats=11, tables=tables)
def command(run: Run, commands: Sequence[str]) -> None:
    """Start COMMANDS, such as "volume list", and count what they import."""
    with tempfile.TemporaryDirectory(dir=run.parent) as directory:
        starter = Starter(Path(directory))
        for name in (None, *(commands or COMMANDS)):
            run.add(measure(starter, name, repeats=run.repeats))


if __name__ == "__main__":
    run_command(command, name="imports.py")
