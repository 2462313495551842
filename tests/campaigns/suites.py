"""Runs fsx, fio and stress-ng on a sprout whose server is killed, and on plain btrfs.

``python tests/campaigns/suites.py --help``. fsx works on clones of virtual data, fio
verifies what it has written, and stress-ng runs its classes io and filesystem; each
does the same on a plain btrfs beside, where nothing is killed. Afterwards both file
systems are scrubbed and checked. What fails on the sprout only is a failure; what is
not installed is skipped, with the reason. fsx is a program of fstests, of which
--fstests names a built copy: https://git.kernel.org/pub/scm/fs/xfs/xfstests-dev.git
"""

from __future__ import annotations

import functools
import os
import random
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import campaign
import click

from btrfs_ublk.base.capabilities import BTRFS, FUSE, LOOP, ROOT, UBLK, require
from btrfs_ublk.base.entry import run_command
from btrfs_ublk.base.process import run
from btrfs_ublk.bench import options
from btrfs_ublk.bench.report import Document, Result, Table
from btrfs_ublk.device.state import device_directory
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.kernel.temporary import tempdir
from btrfs_ublk.server import BlockServer, FrontEndName
from btrfs_ublk.server.description import ZeroSegment
from btrfs_ublk.units import GIB, MIB, TIB
from btrfs_ublk.volume import (
    VolumeDefinition,
    VolumeFile,
    down_volume,
    remove_volume,
    up_volume,
)
from btrfs_ublk.volume.store import volume_directory

NAME = "suites"
_VIRTUAL_BYTES = 4 * MIB
_FIO_BYTES = 32 * MIB
_IMAGE_BYTES = 4 * GIB
_TIMEOUT_S = 900.0
_KILL_EVERY_S = (0.5, 2.0)
#: What uses other places than the directory that it is given, or syncs all of the host.
_EXCLUDED = ("bind-mount", "binderfs", "io", "procfs", "rawdev")
_STARTED = re.compile(r"dispatching hogs: (.*)")
_FAILED = re.compile(r"\(([a-z0-9-]+)\) terminated with an error")

_run = functools.partial(run, timeout_s=_TIMEOUT_S)

#: What a suite says of one place: names of tests that passed, and that failed.
Outcome = tuple[set[str], set[str]]


class Suites:
    """The suites, for a directory of a file system. Each gets its own."""

    def __init__(self, fsx: Path, *, seed: int, operations: int, each_s: int) -> None:
        self._fsx, self._seed = fsx, seed
        self._operations, self._each_s = operations, each_s
        self.missing = {
            "fsx": None if os.access(fsx, os.X_OK) else f"no program {fsx}: --fstests",
            **{
                name: None if shutil.which(name) else f"no program {name}"
                for name in ("fio", "stress-ng")
            },
        }
        self.all: dict[str, Callable[[Path], Outcome]] = {
            "fsx": self._run_fsx,
            "fio": self._run_fio,
            "stress-ng": self._run_stress_ng,
        }

    def _run_fsx(self, top: Path) -> Outcome:
        """Read and write buffered and mapped, directly, and by io_uring."""
        passed: set[str] = set()
        failed: set[str] = set()
        direct = ["-Z", "-R", "-W", "-r4096", "-w4096", "-t4096"]
        for name, words in {"mapped": [], "direct": direct, "uring": ["-U"]}.items():
            clone = top / f"clone-{name}"
            # Virtual data have no checksums, and clones must be like them.
            clone.touch()
            _run(["chattr", "+C", clone])
            _run(["cp", "--reflink=always", top.parent / "virtual", clone])
            argv: list[str | Path] = [self._fsx, "-q", "-k", *words]
            argv += [f"-S{self._seed}", f"-N{self._operations}", "-P", top, clone]
            done = self._started(argv, top)
            (failed if done.returncode else passed).add(name)
        return passed, failed

    def _run_fio(self, top: Path) -> Outcome:
        passed: set[str] = set()
        failed: set[str] = set()
        for engine, direct in (("psync", 1), ("psync", 0), ("mmap", 0), ("libaio", 1)):
            name = f"{engine}, {'direct' if direct else 'buffered'}"
            argv = ["fio", f"--directory={top}", f"--name={engine}-{direct}"]
            argv += [f"--size={_FIO_BYTES}", "--rw=randwrite", "--bsrange=4k-64k"]
            argv += [f"--ioengine={engine}", f"--direct={direct}", "--iodepth=16"]
            argv += ["--verify=crc32c", "--verify_fatal=1", "--verify_backlog=256"]
            done = self._started([*argv, f"--randseed={self._seed}"], top)
            (failed if done.returncode else passed).add(name)
        return passed, failed

    def _run_stress_ng(self, top: Path) -> Outcome:
        passed: set[str] = set()
        failed: set[str] = set()
        for name in ("io", "filesystem"):
            argv = ["stress-ng", "--class", name, "--sequential", "1", "--verify"]
            argv += ["--timeout", f"{self._each_s}s", "--temp-path", str(top)]
            done = self._started([*argv, "--exclude", ",".join(_EXCLUDED)], top)
            if (started := _STARTED.search(done.stdout)) is None:
                raise BtrfsUblkError(f"stress-ng says: {done.stdout[-500:]}")
            failed |= set(_FAILED.findall(done.stdout))
            passed |= set(re.findall(r"\d+ ([a-z0-9-]+)", started[1]))
        return passed - failed, failed

    def _started(
        self, argv: Sequence[str | Path], top: Path
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            argv,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            cwd=top,
        )
        if done.returncode:
            options.progress(f"{Path(argv[0]).name}: {done.stdout[-1000:]}")
        return done


@contextmanager
def _killing(chances: random.Random) -> Iterator[list[int]]:
    """Kill the volume's server again and again. Yields the processes killed."""
    killed: list[int] = []
    end = threading.Event()

    def kill() -> None:
        while not end.wait(chances.uniform(*_KILL_EVERY_S)):
            state = device_directory(NAME).state()
            if state.status == "serving" and state.server is not None:
                with suppress(ProcessLookupError):
                    os.kill(state.server.pid, signal.SIGKILL)
                    killed.append(state.server.pid)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield killed
    finally:
        end.set()
        thread.join()


def _make_plain(directory: Path, stack: ExitStack) -> Path:
    """A btrfs of the kernel's own, with a file as large as the virtual one."""
    image, mount = directory / "plain.img", directory / "plain"
    mount.mkdir()
    with image.open("xb") as file:
        file.truncate(_IMAGE_BYTES)
    _run(["mkfs.btrfs", "--quiet", image])
    _run(["mount", "-o", "loop", image, mount])
    stack.callback(_run, ["umount", mount])
    _run(["chattr", "+C", mount])
    (mount / "virtual").write_bytes(random.Random(1).randbytes(_VIRTUAL_BYTES))
    return mount


def _scrubbed(mount: Path) -> list[str]:
    done = _run(["btrfs", "scrub", "start", "-B", mount], ok_statuses=range(256))
    said = done.stdout + done.stderr
    return [] if "no errors found" in said else [f"scrub: {said[-500:]}"]


def _checked(front_end: FrontEndName) -> list[str]:
    """What ``btrfs check`` says against the volume, which is down."""
    volume = volume_directory(NAME)
    seed = volume.seed()
    zeroes = ZeroSegment(offset=0, length=seed.virtual_data.size)
    with BlockServer(seed.description([zeroes]), front_end=front_end):
        done = _run(
            ["btrfs", "check", "--readonly", volume.sprout_image],
            ok_statuses=range(256),
        )
    said = done.stdout + done.stderr
    return [f"btrfs check: {said[-500:]}"] if done.returncode else []


def tables(document: Document) -> list[Table]:
    """Return what each suite ran, and what of it failed where."""
    keys = ("suite", "tests", "failed", "failed_plain", "differences", "kills")
    rows = [
        [str(result.get(key, result.get("skipped", ""))) for key in keys]
        for result in document["results"]
        if "suite" in result
    ]
    heads = ["suite", "tests", "failed", "failed on plain", "differences", "kills"]
    return [Table("Suites on a sprout whose server is killed", heads, rows)]


def _compare(
    suites: Suites, name: str, places: dict[str, Path], chances: random.Random
) -> Result:
    result: Result = {"suite": name, "problems": []}
    if reason := suites.missing[name]:
        return result | {"skipped": reason}
    found: dict[str, Outcome] = {}
    for place, mount in places.items():
        top = mount / f"on-{name}"
        top.mkdir()
        begun_s = time.monotonic()
        with ExitStack() as stack:
            if place == "sprout":
                killed = stack.enter_context(_killing(chances))
            found[place] = suites.all[name](top)
        result[f"{place}_s"] = round(time.monotonic() - begun_s, 1)
    passed, failed = found["sprout"]
    _, plain = found["plain"]
    result |= {"tests": len(passed | failed), "failed": len(failed)}
    result |= {"failed_plain": len(plain), "kills": len(killed)}
    result["differences"] = sorted(failed - plain)
    result["problems"] += [f"{name} on the sprout: {x}" for x in sorted(failed - plain)]
    return result


@click.command(context_settings=campaign.SETTINGS)
@click.option("--front-end", type=click.Choice(["fuse", "ublk"]), default="fuse")
@click.option(
    "--suite", "only", multiple=True, type=click.Choice(["fsx", "fio", "stress-ng"])
)
@click.option(
    "--fstests",
    type=click.Path(path_type=Path),
    default=Path("/var/cache/btrfs-ublk-fstests"),
    show_default=True,
    help="A built copy of fstests, for fsx.",
)
@click.option("--rounds", type=campaign.COUNT, default=1, help="With a seed each.")
@click.option("--operations", type=campaign.COUNT, default=10_000, help="Of fsx.")
@click.option(
    "--each", "each_s", type=campaign.COUNT, default=1, help="Seconds per stressor."
)
@campaign.seed_option
@campaign.limit_option
@options.parent_option
@campaign.output_option
def command(
    front_end: FrontEndName,
    only: Sequence[str],
    fstests: Path,
    rounds: int,
    operations: int,
    each_s: int,
    seed: int,
    limit_s: float,
    parent: Path,
    output: Path | None,
) -> None:
    """Run other projects' suites on a sprout whose server is killed.

    Fails when a test fails on the sprout only, or a file system is not consistent.
    """
    require(ROOT, BTRFS, LOOP, UBLK if front_end == "ublk" else FUSE)
    end_s = time.monotonic() + limit_s
    with ExitStack() as stack:
        directory = stack.enter_context(tempdir(parent=parent))
        stack.enter_context(campaign.apart(directory))
        results = stack.enter_context(
            campaign.Results(
                "suites",
                tables,
                parameters={"front_end": front_end, "rounds": rounds, "seed": seed}
                | {"operations": operations, "each": each_s},
                directory=directory,
                output=output,
            )
        )
        pattern = {"kind": "pattern", "size": _VIRTUAL_BYTES, "base": 0}
        definition = VolumeDefinition(
            size_bytes=TIB,
            writable_bytes=_IMAGE_BYTES,
            mount=directory / "sprout",
            front_end=front_end,
            files=(VolumeFile("virtual", pattern),),
        )
        plain = _make_plain(directory, stack)
        stack.callback(remove_volume, NAME)
        stack.callback(down_volume, NAME)
        up_volume(NAME, definition)
        places = {"sprout": directory / "sprout", "plain": plain}
        for number in range(rounds):
            suites = Suites(
                fstests / "ltp/fsx",
                seed=seed + number,
                operations=operations,
                each_s=each_s,
            )
            for name in only or suites.all:
                if time.monotonic() > end_s:
                    break
                result = _compare(suites, name, places, random.Random(seed + number))
                results.add(result, rounds=0)
                options.progress(f"{name}: {result}")
                for mount in places.values():
                    shutil.rmtree(mount / f"on-{name}", ignore_errors=True)
        problems = [f"{place} {x}" for place, m in places.items() for x in _scrubbed(m)]
        down_volume(NAME)
        problems += _checked(front_end)
        results.add({"what": "afterwards", "problems": problems}, rounds=rounds)
    results.conclude(seed=seed)


if __name__ == "__main__":
    run_command(command, name="suites.py")
