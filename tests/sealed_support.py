"""Sealed images in tests: made by the helper, checked, and mounted."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mkseed_support import GIB
from tree_description import data_ranges

from btrfs_ublk.base.helpers import MKIMAGE, helper_path
from btrfs_ublk.kernel import loop_device, mounted

DATA_START = 512 * GIB
FILES = {"seed.img", "data", "digests"}
TIMEOUT_S = 300
_COMPLAINT = re.compile(r"BTRFS (warning|error|critical).*|.*(WARNING|BUG):.*")


def mkimage_raw(description: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [helper_path(MKIMAGE)],
        input=(
            description if isinstance(description, str) else json.dumps(description)
        ),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={k: v for k, v in os.environ.items() if k != "SOURCE_DATE_EPOCH"},
    )


def mkimage(output: Path, *layers: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """Make an image in a directory that is made for it; the report."""
    output.mkdir()
    layers = tuple(layer | {"path": str(layer["path"])} for layer in layers)
    done = mkimage_raw({"layers": layers, "output": str(output)} | settings)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" and done.stdout.count("\n") == 1
    assert {path.name for path in output.iterdir()} == FILES
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def content(path: Path) -> list[tuple[int, bytes]]:
    """What is in a sparse file, without its holes."""
    with path.open("rb") as file:
        size = path.stat().st_size
        parts = [(size, b"")]
        for start, length in data_ranges(file.fileno(), size):
            parts.append((start, os.pread(file.fileno(), length, start)))
        return parts


def assemble(image: Path) -> Path:
    """The image as one sparse file, as a device shows it."""
    whole = image / "whole"
    with whole.open("wb") as file, (image / "data").open("rb") as data:
        for start, part in content(image / "seed.img"):
            file.seek(start)
            file.write(part)
        file.seek(DATA_START)
        shutil.copyfileobj(data, file)
        size = file.tell() - DATA_START
        file.truncate(DATA_START + max(1, -(-size // (4 * GIB))) * 4 * GIB)
    return whole


def btrfs_check(whole: Path) -> None:
    """btrfs check has nothing to say, also of the checksums of data."""
    done = subprocess.run(
        ["btrfs", "check", "--readonly", "--check-data-csum", whole],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "no error found" in said
    words = ("warning", "error:", "mismatch", "errors")
    assert not [line for line in said.splitlines() if any(w in line for w in words)]


def _complaints() -> list[str]:
    done = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=60)
    return _COMPLAINT.findall(done.stdout)


@contextmanager
def mounted_image(whole: Path, target: Path) -> Iterator[Path]:
    """The image, mounted read-only; the kernel must not complain."""
    before = _complaints()
    target.mkdir()
    with (
        loop_device(whole, read_only=True) as loop,
        mounted(loop.path, target, read_only=True),
    ):
        yield target
    assert _complaints()[len(before) :] == []
