"""Sealed images in tests: made by the helper, checked, and mounted."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.mkseed_support import GIB
from support.tree_description import data_ranges

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


KIB = 1024

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes such trees")


def directory(path: Path, **more: Any) -> dict[str, Any]:
    return {"kind": "directory", "path": path} | more


def small_tree(top: Path) -> Path:
    (top / "below").mkdir(parents=True)
    (top / "inline").write_bytes(b"a few bytes")
    (top / "below/plain").write_bytes(os.urandom(300 * KIB + 5))
    (top / "below/text").write_bytes(b"what can be compressed " * 40000)
    (top / "below/again").write_bytes(b"what can be compressed " * 40000)
    (top / "link").symlink_to("below/text")
    os.link(top / "inline", top / "below/linked")
    return top


def layer(path: Path, *entries: tuple[str, bytes | None]) -> dict[str, Any]:
    """A tar of files, and of directories, which have no content."""
    with tarfile.open(path, "w") as tar:
        for name, data in entries:
            info = tarfile.TarInfo(name)
            info.mtime = 1234567890
            info.mode = 0o755 if data is None else 0o644
            info.type = tarfile.DIRTYPE if data is None else tarfile.REGTYPE
            info.size = len(data or b"")
            tar.addfile(info, io.BytesIO(data or b""))
    return {"kind": "tar", "path": path, "whiteouts": True}


def three_layers(top: Path) -> list[dict[str, Any]]:
    large = b"large" * 100000
    return [
        layer(
            top / "1.tar",
            *(("etc", None), ("etc/one", b"1"), ("etc/two", b"2")),
            *(("opt", None), ("opt/old", large), ("large", large)),
        ),
        layer(
            top / "2.tar",
            *(("etc/.wh.one", b""), ("opt/.wh..wh..opq", b"")),
            *(("opt/new", b"new" * 5000), ("large-too", large)),
        ),
        layer(top / "3.tar", ("etc/two", b"two"), ("last", b"")),
    ]
