#!/usr/bin/env python3
"""Run clang-tidy on every C source of a build, but for those that were clean before.

tidy.py [--no-analyzer] BUILD_DIRECTORY   (compile_commands.json says what there is)

What it found clean is remembered by a hash of all that it looks at: the source with its
headers and comments, the options, and clang-tidy itself.  Without the analyzer it
takes a twentieth of the time.  Exit status 1: it found something.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
_MAX_AGE_S = 30 * 24 * 3600


def _preprocessed(entry: dict[str, Any]) -> bytes:
    words = shlex.split(entry["command"])
    del words[words.index("-o") : words.index("-o") + 2]
    words.remove("-c")
    return subprocess.run(
        [*words, "-E", "-CC", "-P"],
        cwd=entry["directory"],
        check=True,
        stdout=subprocess.PIPE,
    ).stdout


def _one_per_source(build: Path) -> list[dict[str, Any]]:
    """The first command that compiles each. clang-tidy looks at a source once for each
    that it is told of, and at the second look 14 takes every va_list for uninitialized
    (LLVM's bug 41311).
    """
    entries = json.loads((build / "compile_commands.json").read_text())
    found: dict[str, dict[str, Any]] = {}
    for entry in entries:
        source = os.path.join(entry["directory"], entry["file"])
        if source.endswith(".c"):
            found.setdefault(os.path.normpath(source), entry)
    return list(found.values())


def _is_clean(
    entry: dict[str, Any], build: Path, common: bytes, memory: Path, *, analyzer: bool
) -> bool:
    text = common + _preprocessed(entry)
    of_all = memory / hashlib.sha256(text).hexdigest()
    stamp = of_all if analyzer else of_all.with_suffix(".no-analyzer")
    for known in (of_all, stamp):
        if known.exists():
            known.touch()
            return True
    checks = [] if analyzer else ["--checks=-clang-analyzer-*"]
    source = os.path.relpath(os.path.join(entry["directory"], entry["file"]))
    done = subprocess.run(
        ["clang-tidy", "--quiet", *checks, "-p", build, source],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    # It counts suppressed warnings on stderr, which says nothing.
    talk = [line for line in done.stderr.splitlines() if " generated." not in line]
    if done.returncode == 0 and not done.stdout and not talk:
        stamp.touch()
        return True
    print(done.stdout, *talk, sep="\n", flush=True)
    return done.returncode == 0


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-analyzer", action="store_false", dest="analyzer")
    parser.add_argument("build", type=Path)
    given = parser.parse_args()
    memory = _CACHE / "btrfs-ublk" / "clang-tidy"
    memory.mkdir(parents=True, exist_ok=True)
    for stamp in memory.iterdir():
        with suppress(FileNotFoundError):  # another run may be at it
            if time.time() - stamp.stat().st_mtime > _MAX_AGE_S:
                stamp.unlink()
    version = subprocess.run(
        ["clang-tidy", "--version"], check=True, stdout=subprocess.PIPE
    ).stdout
    common = version + Path(".clang-tidy").read_bytes()
    entries = _one_per_source(given.build)
    with (
        tempfile.TemporaryDirectory(prefix="btrfs-ublk-tidy-") as once,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        Path(once, "compile_commands.json").write_text(json.dumps(entries))
        is_clean = partial(
            _is_clean,
            build=Path(once),
            common=common,
            memory=memory,
            analyzer=given.analyzer,
        )
        clean = pool.map(is_clean, entries)
        return 0 if all(list(clean)) else 1


if __name__ == "__main__":
    sys.exit(main())
