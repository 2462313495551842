#!/usr/bin/env python3
"""Run clang-tidy on every C source of a build, but for those that were clean before.

tidy.py BUILD_DIRECTORY     (its compile_commands.json says what there is)

What it found clean is remembered by a hash of all that it looks at: the source with its
headers and comments, the options, and clang-tidy itself.  Exit status 1: it found
something.
"""

from __future__ import annotations

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
from pathlib import Path
from typing import Any

_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
_MAX_AGE_S = 30 * 24 * 3600


def _fingerprint(entry: dict[str, Any], common: bytes) -> str:
    words = shlex.split(entry["command"])
    del words[words.index("-o") : words.index("-o") + 2]
    words.remove("-c")
    text = subprocess.run(
        [*words, "-E", "-CC", "-P"],
        cwd=entry["directory"],
        check=True,
        stdout=subprocess.PIPE,
    ).stdout
    return hashlib.sha256(common + text).hexdigest()


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


def _is_clean(entry: dict[str, Any], build: Path, common: bytes, memory: Path) -> bool:
    stamp = memory / _fingerprint(entry, common)
    if stamp.exists():
        stamp.touch()
        return True
    source = os.path.relpath(os.path.join(entry["directory"], entry["file"]))
    done = subprocess.run(
        ["clang-tidy", "--quiet", "-p", build, source],
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


def main(build: Path) -> int:
    """Returns the exit status."""
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
    entries = _one_per_source(build)
    with (
        tempfile.TemporaryDirectory(prefix="btrfs-ublk-tidy-") as once,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        Path(once, "compile_commands.json").write_text(json.dumps(entries))
        clean = pool.map(
            lambda entry: _is_clean(entry, Path(once), common, memory), entries
        )
        return 0 if all(list(clean)) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
