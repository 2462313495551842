"""Has libFuzzer look for inputs that crash, hang or mislead the C code.

``python tests/campaigns/fuzz.py --help``. Each target is a program of csrc/tests, built
with clang's libFuzzer, AddressSanitizer and UBSan, in build/fuzz. What it begins with
is in tests/campaigns/corpora/TARGET: text as it is, and bytes in hexadecimal digits. An
input that fails is kept in build/fuzz/found, and belongs to corpora/TARGET when it is
mended.
What a run has found to reach other code is kept as well, so that the next one goes on.
"""

import os
import random
import re
import resource
import shutil
import subprocess
import sys
import tarfile
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import campaign
import click
import zstandard
from campaign import Run
from support.compressed import select
from support.images import assemble, mkimage

from btrfs_ublk.base.entry import PathType, run_command
from btrfs_ublk.base.helpers import MKSEED, helper_path
from btrfs_ublk.base.process import run
from btrfs_ublk.bench import options
from btrfs_ublk.bench.report import Document, Table
from btrfs_ublk.bench.study import Column, table
from btrfs_ublk.content import make_index
from btrfs_ublk.kernel.temporary import tempdir

PROJECT = Path(__file__).resolve().parents[2]

CORPORA = PROJECT / "tests/campaigns/corpora"
BUILD = PROJECT / "build/fuzz"
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
_FOUND = BUILD / "found"
_BUILD_TIMEOUT_S = 600.0
_SHORT_BYTES = 256
_EXECUTED = re.compile(r"stat::number_of_executed_units: (\d+)")
_EDGES = re.compile(r" cov: (\d+) ")
_LINKED = re.compile(r"\((\d+) inline 8-bit counters\)")
_ENVIRONMENT = {
    # More memory than this at once would be for what an input claims, not for it.
    # What is freed is kept from use for less than usual, to stay in the CPU's cache;
    # what ASan knows of large blocks is cleared in place, as new pages take longer.
    "ASAN_OPTIONS": "detect_leaks=1:max_allocation_size_mb=256:quarantine_size_mb=8:"
    "malloc_context_size=6:clear_shadow_mmap_threshold=16777216",
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


def _seed(directory: Path) -> list[Path]:
    path = directory / "seed.img"
    size = ("--virtual-data-size=20G", "--chunk-size=4G", "--metadata-only")
    run([helper_path(MKSEED), *size, path], timeout_s=60)
    return [path]


def _text(size_bytes: int) -> bytes:
    """Digits, and repetitions of what is up to a window before: not many, as windows
    are compressed again and again."""
    draw = random.Random(1)
    text = b""
    while len(text) < size_bytes:
        text += draw.randbytes(200).hex().encode()
        at = max(0, len(text) - draw.randrange(32 << 10))
        text += text[at : at + draw.randrange(100)]
    return text[:size_bytes]


def _gzip(data: bytes) -> bytes:
    """In blocks that end within bytes, of which any may be a point of an index."""
    made = zlib.compressobj(9, wbits=31)
    parts = []
    for at in range(0, len(data), 9000):
        parts += [made.compress(data[at : at + 9000]), made.flush(zlib.Z_PARTIAL_FLUSH)]
    return b"".join([*parts, made.flush()])


def _zstd(data: bytes) -> bytes:
    frames = zstandard.ZstdCompressor(5)
    return b"".join(
        frames.compress(data[at : at + 24_000]) for at in range(0, len(data), 24_000)
    )


def _indexed(directory: Path, name: str, codec: str, coded: bytes) -> Path:
    path = directory / name
    path.write_bytes(coded)
    index = directory / f"{name}.index"
    make_index(path, index, codec=codec, spacing_bytes=20_000)
    return path


def _objects(directory: Path) -> list[Path]:
    """Two codecs, without and with a selection."""
    data = _text(100_000)
    selection = select(data, 64 << 10).file
    made = []
    for codec, coded in (("gzip", _gzip(data)), ("zstd", _zstd(data))):
        made.append(_indexed(directory, codec, codec, coded))
        made.append(_indexed(directory, f"{codec}-parts", codec, coded))
        made[-1].with_name(f"{codec}-parts.selection").write_bytes(selection)
    return made


def _entry(name: str, content: bytes = b"", **fields: Any) -> bytes:
    """One entry of a tar; ``fields`` are those of TarInfo."""
    form = fields.pop("format", tarfile.PAX_FORMAT)
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    for field, value in fields.items():
        setattr(entry, field, value)
    return entry.tobuf(form) + content + bytes(-len(content) % tarfile.BLOCKSIZE)


def _tar(directory: Path) -> list[Path]:
    """What layers may have, each once: changes go to any block of it."""
    pax = {"SCHILY.xattr.user.a": "1" * 60}
    acl = {"SCHILY.acl.access": "user::rw-,user:5:r--,group::r--,mask::r--,other::---"}
    sparse = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}
    sparse |= {"GNU.sparse.name": "s", "GNU.sparse.realsize": "9000"}
    directory_type: dict[str, Any] = {"type": tarfile.DIRTYPE, "mode": 0o1755}
    parts = [
        _entry("a", b"5" * 5, pax_headers=pax),
        _entry("d", pax_headers={"SCHILY.acl.default": "user::rwx"}, **directory_type),
        _entry("d/long" + "x" * 150, b"5" * 3000, pax_headers=pax | acl),
        _entry("d/.wh.b"),
        _entry("e", **directory_type),
        _entry("e/.wh..wh..opq"),
        _entry("link", type=tarfile.LNKTYPE, linkname="a"),
        _entry("symbolic", type=tarfile.SYMTYPE, linkname="y" * 120),
        _entry("g" * 130, b"7", format=tarfile.GNU_FORMAT, uid=1 << 24, mtime=-5),
        _entry("null", type=tarfile.CHRTYPE, devmajor=1, devminor=3),
        _entry("pipe", type=tarfile.FIFOTYPE, mtime=1.5),
        _entry(
            "GNUSparseFile.0/s",
            b"2\n0\n100\n8900\n100\n".ljust(512, b"\0") + b"8" * 200,
            pax_headers=sparse,
        ),
        bytes(2 * tarfile.BLOCKSIZE),
    ]
    path = directory / "layer.tar"
    path.write_bytes(b"".join(parts))
    return [path]


def _sealed(directory: Path) -> list[Path]:
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
    mkimage(made, {"kind": "tar", "path": str(directory / "all.tar")}, time=1)
    return [assemble(made)]


@dataclass(frozen=True)
class Target:
    """A program fuzz-NAME. ``what`` it is about, ``subjects`` makes its PATHs, and
    ``quick`` executions take some seconds, with any compiler."""

    what: str
    input_bytes: int
    subjects: Callable[[Path], list[Path]] | None = None
    quick: int = 1000


TARGETS = {
    "answers": Target("what web servers, registries and token servers answer", 2048),
    "control": Target("requests to a server, and files that come with them", 4096),
    "codec": Target("compressed objects and their indexes", 256, _objects),
    "front": Target("what the fetch process says to its server", 1024),
    # Longer ones, and too long ones, are in test_http1_head.py.
    "head": Target("heads of HTTP/1.1 responses", 1024, quick=10_000),
    "image": Target("sealed images, as `readimage` reads them", 97, _sealed),
    "reader": Target("seeds, with checksums that are right", 96, _seed),
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
    """Build the programs. Raises CommandError."""
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
    name: str,
    directory: Path,
    corpus: Path,
    *,
    executions: int,
    seed: int,
    limit_s: float,
) -> dict[str, Any]:
    """Run one target, from its corpus, which grows. Ends at the first input that
    fails."""
    target = TARGETS[name]
    environment = os.environ | _ENVIRONMENT | {"TMPDIR": str(directory)}
    if target.subjects:
        environment["FUZZ_PATH"] = ":".join(map(str, target.subjects(directory)))
    given = directory / "given"
    given.mkdir()
    unpack_corpus(name, given)
    _FOUND.mkdir(exist_ok=True)
    command = [
        *(str(BUILD / f"csrc/tests/fuzz-{name}"), f"-runs={executions}"),
        *(f"-seed={seed}", f"-max_len={target.input_bytes}", "-timeout=20"),
        # Names of functions would come from llvm-symbolizer, which takes seconds.
        *("-print_funcs=0", "-print_final_stats=1"),
        f"-artifact_prefix={_FOUND / name}-",
        # Programs of changes are short, and one of a few bytes changes nothing.
        *(["-len_control=0"] if target.input_bytes <= _SHORT_BYTES else ()),
        *(f"-max_total_time={max(1, int(min(limit_s, 1e6)))}", "-rss_limit_mb=1500"),
        *(str(corpus), str(given)),
    ]
    words = CORPORA / name / "words.dict"
    if words.exists():
        command.insert(1, f"-dict={words}")
    began_s, before_s = time.monotonic(), _cpu_s()
    with (directory / "log").open("w+", errors="replace") as log:
        status = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
        ).returncode
        log.seek(0)
        said = log.read()
    executed, linked = _EXECUTED.search(said), _LINKED.search(said)
    result = {
        "target": name,
        "what": target.what,
        "executions": int(executed[1]) if executed else 0,
        "seed": seed,
        "edges": max((int(edges) for edges in _EDGES.findall(said)), default=0),
        "linked": int(linked[1]) if linked else 0,
        "kept": len(list(corpus.iterdir())),
        "s": time.monotonic() - began_s,
        "cpu_s": _cpu_s() - before_s,
        "problems": [],
    }
    if status:
        (_FOUND / f"{name}.log").write_text(said)
        result["problems"] = [f"{name}: {_why(said)}; see {_FOUND / name}*"]
    return result


def _cpu_s() -> float:
    """What the programs took that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _why(said: str) -> str:
    lines = [
        line for line in said.splitlines() if line.startswith(("SUMMARY", "fuzz:"))
    ]
    return "; ".join(lines) or said[-200:]


def tables(document: Document) -> list[Table]:
    names = {"target": lambda result: str(result["target"])}
    columns = [
        Column("executions", "executions", digits=0),
        Column("s", "s", digits=0),
        Column("CPU s", "cpu_s", digits=0),
        Column("edges", "edges", digits=0),
        Column("linked", "linked", digits=0),
        Column("inputs kept", "kept", digits=0),
    ]
    return [table("Fuzzing", document["results"], names, columns)]


@campaign.command(
    "fuzz",
    click.argument("names", nargs=-1, type=click.Choice(sorted(TARGETS))),
    click.option(
        *("--executions", "count"),
        type=options.COUNT,
        default=100_000,
        help="Of each target.",
    ),
    click.option(
        "--corpus",
        type=PathType(file_okay=False),
        default=_CACHE / "btrfs-ublk/fuzz",
        show_default="~/.cache/btrfs-ublk/fuzz",
        help="Directory for what runs have found; the next run begins with it.",
    ),
    tables=tables,
    needs=(LIBFUZZER,),
    on_disks=False,
    has_directory=False,
    recorded=("count",),
)
def command(run: Run, names: Sequence[str], count: int, corpus: Path) -> None:
    """Run the TARGETs, else all. --limit is for
    all of them together, in equal shares."""
    chosen = names or sorted(TARGETS)
    build(chosen)
    assert run.seed is not None
    for number, target in enumerate(chosen):
        inputs = corpus / target
        inputs.mkdir(parents=True, exist_ok=True)
        with tempdir(parent=run.directory) as directory:
            result = fuzz(
                target,
                directory,
                inputs,
                executions=count,
                seed=run.seed,
                limit_s=(run.end_s - time.monotonic()) / (len(chosen) - number),
            )
        run.add(result, rounds=result["executions"])
        options.progress(f"{target}: {result['executions']} in {result['s']:.0f} s")


if __name__ == "__main__":
    run_command(command, name="fuzz.py")
