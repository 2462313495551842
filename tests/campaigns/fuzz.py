"""Has libFuzzer look for inputs that crash, hang or mislead the C code.

``python tests/campaigns/fuzz.py --help``. Each target is a program of csrc/tests, built
with clang's libFuzzer, AddressSanitizer and UBSan, in build/fuzz. What it begins with
is in tests/fuzz/TARGET: text as it is, and bytes in hexadecimal digits. An input that
fails is kept in build/fuzz/found, and belongs to tests/fuzz/TARGET when it is mended.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import campaign
import click

from btrfs_ublk.base.capabilities import require
from btrfs_ublk.base.entry import run_command
from btrfs_ublk.base.helpers import MKIMAGE, MKSEED, helper_path
from btrfs_ublk.base.process import run
from btrfs_ublk.bench import options
from btrfs_ublk.bench.report import Document, Table
from btrfs_ublk.bench.study import Column, table
from btrfs_ublk.content import make_index
from btrfs_ublk.kernel.temporary import tempdir

PROJECT = Path(__file__).resolve().parents[2]
CORPORA = PROJECT / "tests/fuzz"
BUILD = PROJECT / "build/fuzz"
_FOUND = BUILD / "found"
_BUILD_TIMEOUT_S = 600.0
#: Of a sealed image's data, in its file system.
_DATA_OFFSET = 512 << 30
_EXECUTED = re.compile(r"stat::number_of_executed_units: (\d+)")
_EDGES = re.compile(r" cov: (\d+) ")
_ENVIRONMENT = {
    # More memory than this at once would be for what an input claims, not for it.
    # What is freed is kept from use for less than usual, to stay in the CPU's cache.
    "ASAN_OPTIONS": "detect_leaks=1:max_allocation_size_mb=256:quarantine_size_mb=8:"
    "malloc_context_size=6",
    "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
}


class _LibFuzzer:
    """clang, with its library for fuzzing."""

    name = "libFuzzer"
    hint = "install the packages clang and libclang-rt-dev (of clang's version)"

    def probe(self) -> str | None:
        if shutil.which("clang") is None:
            return "clang is not on PATH"
        done = subprocess.run(
            ["clang", "-fsanitize=fuzzer", "-x", "c", "-", "-o", "/dev/null"],
            input=b"int LLVMFuzzerTestOneInput(void) { return 0; }",
            capture_output=True,
        )
        return "clang has no libFuzzer" if done.returncode else None


LIBFUZZER = _LibFuzzer()


def _seed(directory: Path) -> Path:
    path = directory / "seed.img"
    size = ("--virtual-data-size=20G", "--chunk-size=4G", "--metadata-only")
    run([helper_path(MKSEED), *size, path], timeout_s=60)
    return path


def _compressed(directory: Path) -> Path:
    words = [random.Random(n).randbytes(3).hex() for n in range(200)]
    data = " ".join(random.Random(1).choices(words, k=40_000)).encode()
    path = directory / "object"
    path.write_bytes(gzip.compress(data, mtime=0))
    index = directory / "object.index"
    make_index(path, index, codec="gzip", spacing_bytes=50_000)
    return path


def _tar(directory: Path) -> Path:
    path = directory / "layer.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for name, size in (("a", 5), ("d/long" + "x" * 150, 3000), ("d/.wh.b", 0)):
            entry = tarfile.TarInfo(name)
            entry.size = size
            entry.pax_headers = {"SCHILY.xattr.user.a": "1" * 60}
            tar.addfile(entry, BytesIO(b"5" * size))
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.LNKTYPE, "a"
        tar.addfile(link)
    return path


def _sealed(directory: Path) -> Path:
    """A sealed image with its data, as `image export` gives it to readimage."""
    with (directory / "all.tar").open("wb") as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for number in range(40):
                entry = tarfile.TarInfo(f"d{number % 3}/file{number}")
                entry.size = (0, 30, 5000, 40_000, 300_000)[number % 5]
                entry.pax_headers = {f"SCHILY.xattr.user.n{number}": "v" * number}
                data = random.Random(number).randbytes(1000) * 300
                tar.addfile(entry, BytesIO(data[: entry.size]))
            for kind, name in (
                (tarfile.SYMTYPE, "symbolic"),
                (tarfile.LNKTYPE, "hard"),
            ):
                entry = tarfile.TarInfo(name)
                entry.type, entry.linkname = kind, "d1/file1"
                tar.addfile(entry)
            entry = tarfile.TarInfo("fifo")
            entry.type = tarfile.FIFOTYPE
            tar.addfile(entry)
    made = directory / "sealed"
    made.mkdir()
    layer = {"kind": "tar", "path": str(directory / "all.tar")}
    description = {"layers": [layer], "output": str(made), "time": 1}
    run([helper_path(MKIMAGE)], input=json.dumps(description), timeout_s=60)
    path = made / "seed.img"
    with path.open("r+b") as image:
        image.seek(_DATA_OFFSET)
        image.write((made / "data").read_bytes())
    return path


@dataclass(frozen=True)
class Target:
    """A program fuzz-NAME. ``what`` it is about, ``subject`` makes its PATH, and
    ``quick`` executions take some seconds, with any compiler."""

    what: str
    input_bytes: int
    subject: Callable[[Path], Path] | None = None
    quick: int = 1000


TARGETS = {
    "answers": Target("what web servers, registries and token servers answer", 2048),
    "control": Target("requests to a server, and files that come with them", 4096),
    "description": Target("descriptions of devices and sources", 4096, quick=4000),
    "cache": Target("the files of a cache", 156),
    "codec": Target("compressed objects and their indexes", 256, _compressed),
    "front": Target("what the fetch process says to its server", 1024),
    "head": Target("heads of HTTP/1.1 responses", 8256),
    "image": Target("sealed images, as `readimage` reads them", 97, _sealed),
    "physmap": Target("chunks and extents, as tree searches find them", 4096),
    "reader": Target("seeds, with checksums that are right", 96, _seed),
    "store": Target("map files: their bytes, and what is in tables", 105, _compressed),
    "tar": Target("layers", 60, _tar),
}


def unpack_corpus(target: str, to: Path) -> None:
    """Write the inputs that a target begins with, as bytes, to an existing directory.
    There may be none."""
    for path in sorted((CORPORA / target).glob("*")):
        if path.suffix == ".dict":
            continue
        content = path.read_bytes()
        if path.suffix == ".hex":
            content = bytes.fromhex(content.decode())
        (to / path.name).write_bytes(content)


def build(names: Sequence[str]) -> None:
    """Build the programs. Raises CapabilityError and CommandError."""
    require(LIBFUZZER)
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"CC": "clang", "PATH": search}
    sanitizers = ("-Db_sanitize=address,undefined", "-Db_lundef=false")
    if not (BUILD / "build.ninja").exists():
        run(
            ["meson", "setup", "-Dtests=true", "-Dfuzz=true", *sanitizers]
            + [str(BUILD), str(PROJECT)],
            timeout_s=_BUILD_TIMEOUT_S,
            env=environment,
        )
    programs = [f"csrc/tests/fuzz-{name}" for name in names]
    run(
        ["ninja", "-C", str(BUILD), *programs],
        timeout_s=_BUILD_TIMEOUT_S,
        env=environment,
    )


def fuzz(
    name: str, directory: Path, *, executions: int, seed: int, limit_s: float
) -> dict[str, Any]:
    """Run one target. Ends at the first input that fails."""
    target = TARGETS[name]
    environment = os.environ | _ENVIRONMENT | {"TMPDIR": str(directory)}
    if target.subject:
        environment["FUZZ_PATH"] = str(target.subject(directory))
    for part in ("given", "made"):
        (directory / part).mkdir()
    unpack_corpus(name, directory / "given")
    _FOUND.mkdir(exist_ok=True)
    command = [
        *(str(BUILD / f"csrc/tests/fuzz-{name}"), f"-runs={executions}"),
        *(f"-seed={seed}", f"-max_len={target.input_bytes}", "-timeout=20"),
        *("-print_final_stats=1", f"-artifact_prefix={_FOUND / name}-"),
        *(f"-max_total_time={max(1, int(min(limit_s, 1e6)))}", "-rss_limit_mb=1500"),
        *(str(directory / "made"), str(directory / "given")),
    ]
    words = CORPORA / name / "words.dict"
    if words.exists():
        command.insert(1, f"-dict={words}")
    began_s = time.monotonic()
    with (directory / "log").open("w+", errors="replace") as log:
        status = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
        ).returncode
        log.seek(0)
        said = log.read()
    executed = _EXECUTED.search(said)
    result = {
        "target": name,
        "what": target.what,
        "executions": int(executed[1]) if executed else 0,
        "seed": seed,
        "edges": max((int(edges) for edges in _EDGES.findall(said)), default=0),
        "kept": len(list((directory / "made").iterdir())),
        "s": time.monotonic() - began_s,
        "problems": [],
    }
    if status:
        (_FOUND / f"{name}.log").write_text(said)
        result["problems"] = [f"{name}: {_why(said)}; see {_FOUND / name}*"]
    return result


def _why(said: str) -> str:
    lines = [
        line for line in said.splitlines() if line.startswith(("SUMMARY", "fuzz:"))
    ]
    return "; ".join(lines) or said[-200:]


def fuzzing(
    targets: Collection[str],
    one: Callable[..., dict[str, Any]],
    *,
    name: str,
    title: str,
    executions: int,
    prepare: Callable[[Sequence[str]], object],
    kept: bool = False,
) -> click.Command:
    """Make the command of a campaign. ``one`` fuzzes a target, and is called as fuzz();
    ``executions`` is the default."""

    def tables(document: Document) -> list[Table]:
        names = {"target": lambda result: str(result["target"])}
        columns = [
            Column("executions", "executions", digits=0),
            Column("edges", "edges", digits=0),
            *([Column("inputs kept", "kept", digits=0)] if kept else ()),
            Column("s", "s", digits=0),
        ]
        return [table(title, document["results"], names, columns)]

    @click.command(context_settings=campaign.SETTINGS)
    @click.argument("names", nargs=-1, type=click.Choice(sorted(targets)))
    @click.option(
        *("--executions", "count"),
        type=options.COUNT,
        default=executions,
        help="Of each target.",
    )
    @campaign.seed_option
    @campaign.limit_option
    @campaign.parent_option
    @campaign.output_option
    def command(
        names: Sequence[str],
        count: int,
        seed: int,
        limit_s: float,
        parent: Path,
        output: Path | None,
    ) -> None:
        """Run the TARGETs, else all. --limit is for all of them together."""
        chosen = names or sorted(targets)
        prepare(chosen)
        began_s = time.monotonic()
        results = campaign.Results(
            name,
            tables,
            parameters={"executions": count, "seed": seed},
            directory=parent,
            output=output,
        )
        with results:
            for number, target in enumerate(chosen):
                left_s = limit_s - (time.monotonic() - began_s)
                with tempdir(parent=parent) as directory:
                    result = one(
                        target,
                        directory,
                        executions=count,
                        seed=seed,
                        limit_s=left_s / (len(chosen) - number),
                    )
                results.add(result, rounds=result["executions"])
                options.progress(
                    f"{target}: {result['executions']} in {result['s']:.0f} s"
                )
        results.conclude(seed=seed)

    return command


command = fuzzing(
    TARGETS,
    fuzz,
    name="fuzz",
    title="Fuzzing",
    executions=100_000,
    prepare=build,
    kept=True,
)


if __name__ == "__main__":
    run_command(command, name="fuzz.py")
