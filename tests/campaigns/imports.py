"""What commands cost: their imports, instructions, CPU time, and time on the clock.

Each runs as in an installed package: without the loader of an editable install, which
imports more than the command itself. Instructions are those of the process in user
space, counted by the CPU (perf), or else by valgrind. With --volumes, volumes are also
brought up and down. In ``scripts/vm --icount``, 1 ms on the clock is a million
instructions of everything: kernel, servers, and the daemon included.

``python tests/campaigns/imports.py --help``
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import sys
import tempfile
import venv
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median
from time import monotonic

import click

import btrfs_ublk
from btrfs_ublk.base.entry import run_command
from btrfs_ublk.base.helpers import HELPERS, helper_path
from btrfs_ublk.base.process import run as run_program
from btrfs_ublk.base.process import spawn
from btrfs_ublk.bench.environment import VM_VARIABLE
from btrfs_ublk.bench.report import Document, Result, Table
from btrfs_ublk.bench.study import Column, Run, study, table
from btrfs_ublk.errors import CapabilityError, CommandError

COMMANDS = ("--version", "--help", "volume list", "volume up --help")
_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
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
    """Runs commands of an installed package, which consists of links in ``directory``;
    compiled modules, devices and volumes are there too."""

    def __init__(self, directory: Path) -> None:
        self._python = directory / "venv/bin/python"
        venv.create(directory / "venv", symlinks=True)
        packages = directory / f"venv/lib/python{_VERSION}/site-packages"
        packages.joinpath("others.pth").write_text(f"{Path(click.__file__).parents[1]}")
        helpers = packages / "btrfs_ublk/libexec"
        helpers.mkdir(parents=True)
        for name in HELPERS:
            with suppress(CapabilityError):  # Not all are built everywhere.
                helpers.joinpath(name).symlink_to(helper_path(name))
        for path in Path(btrfs_ublk.__file__).parent.iterdir():
            if path.name not in ("__pycache__", "libexec"):
                (packages / "btrfs_ublk" / path.name).symlink_to(path)
        self._variables = {
            "BTRFS_UBLK_RUN_DIR": str(directory / "run"),
            "BTRFS_UBLK_VOLUMES_DIR": str(directory / "volumes"),
            "PYTHONDONTWRITEBYTECODE": "",
            "PYTHONPATH": "",
            "PYTHONPYCACHEPREFIX": str(directory / "compiled"),
        }

    def argv(self, command: str | None, *options: str) -> list[str]:
        """Return the argv of a command; None: of Python alone."""
        code = "pass" if command is None else f"{_START} main.main()"
        variables = [f"{name}={value}" for name, value in self._variables.items()]
        words = [] if command is None else command.split()
        # NB: without -P, Python would import the package from the current directory.
        python = [str(self._python), "-P", *options, "-c"]
        return ["env", *variables, *python, code, *words]

    def took_s(self, *commands: str | None) -> float:
        """Run commands, all at once, and return seconds until the last has ended."""
        began_s = monotonic()
        with ExitStack() as stack:
            running = [stack.enter_context(spawn(self.argv(x))) for x in commands]
            for each in running:
                if each.wait(_TIMEOUT_S) != 0:
                    raise CommandError(each.failure("failed"))
        return monotonic() - began_s

    def imported(self, command: str | None) -> dict[str, int]:
        """Return the microseconds by module, without those of its own imports."""
        argv = self.argv(command, "-X", "importtime")
        printed = run_program(argv, timeout_s=_TIMEOUT_S).stderr
        return {name: int(time_us) for time_us, name in _TIMES.findall(printed)}

    def cpu_s(self, command: str | None) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run_program(self.argv(command), timeout_s=_TIMEOUT_S)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return sum(after[:2]) - sum(before[:2])

    def instructions(self, command: str | None) -> int | None:
        """Count instructions; None if no program here can, or the clock counts them."""
        if os.environ.get(VM_VARIABLE) == "icount":
            return None
        argv = self.argv(command)
        start = argv.index(str(self._python))
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
        "clock_s": [starter.took_s(command) for _ in range(repeats)],
        "slowest_us": dict(sorted(imported.items(), key=lambda x: -x[1])[:10]),
    }


def measure_volumes(
    starter: Starter, count: int, *, front_end: str, repeats: int
) -> list[Result]:
    """Bring ``count`` volumes that exist up and down, all at once."""
    names = [f"v{number}" for number in range(count)]
    up = [f"volume up {name} --front-end {front_end}" for name in names]
    down = [f"volume down {name}" for name in names]
    times: dict[str, list[float]] = {"up": [], "down": []}
    try:
        for turn in range(repeats + 1):
            up_s, down_s = starter.took_s(*up), starter.took_s(*down)
            if turn:  # The first one has made the volumes.
                times["up"].append(up_s)
                times["down"].append(down_s)
    finally:
        for name in names:
            for remove in (f"volume down {name}", f"volume remove --yes {name}"):
                with suppress(CommandError):  # It was not made, after an error.
                    starter.took_s(remove)
    return [
        {"command": f"volume {verb}", "volumes": count, "clock_s": taken}
        for verb, taken in times.items()
    ]


def _slowest(results: Sequence[Result]) -> str:
    slowest = results[0]["slowest_us"].items()
    return ", ".join(f"{name} {us}" for name, us in list(slowest)[:3])


def _instructions(results: Sequence[Result]) -> float | str:
    counted = results[0]["instructions"]
    return "" if counted is None else counted / 1e6


_CLOCK = (
    Column("clock, ms", lambda results: median(results[0]["clock_s"]), 1, 1e3),
    Column("least", lambda results: min(results[0]["clock_s"]), 1, 1e3),
)


def tables(document: Document) -> list[Table]:
    columns = [
        Column("modules", "modules"),
        Column("ours", "of_ours"),
        Column("instructions, 10^6", _instructions),
        Column("CPU, ms", lambda results: median(results[0]["cpu_s"]), 1, 1e3),
        *(_CLOCK if "clock_s" in document["results"][0] else ()),
        Column("slowest imports, us", _slowest),
    ]
    names = {"command": lambda x: str(x["command"])}
    starts = [each for each in document["results"] if "volumes" not in each]
    made = [table("Starting", starts, names, columns, left=0)] if starts else []
    volumes = [each for each in document["results"] if "volumes" in each]
    if volumes:
        names |= {"at once": lambda x: str(x["volumes"])}
        made.append(table("Volumes that exist", volumes, names, _CLOCK))
    return made


@study(
    "imports",
    click.argument("commands", nargs=-1),
    click.option(
        *("--volumes", "counts"),
        type=click.IntRange(min=1),
        multiple=True,
        metavar="N",
        help="Bring N volumes up and down, at once; start only COMMANDS besides.",
    ),
    click.option(
        *("--front-end", "front_end"),
        type=click.Choice(["fuse", "ublk"]),
        default="fuse",
        show_default=True,
        help="Of the volumes.",
    ),
    repeats=11,
    tables=tables,
)
def command(
    run: Run, commands: Sequence[str], counts: Sequence[int], front_end: str
) -> None:
    """Start COMMANDS, such as "volume list", and count what they import."""
    with tempfile.TemporaryDirectory(dir=run.parent) as directory:
        starter = Starter(Path(directory))
        for name in (None, *(commands or COMMANDS)) if commands or not counts else ():
            run.add(measure(starter, name, repeats=run.repeats))
        for count in counts:
            run.add(
                *measure_volumes(
                    starter, count, front_end=front_end, repeats=run.repeats
                )
            )


if __name__ == "__main__":
    run_command(command, name="imports.py")
