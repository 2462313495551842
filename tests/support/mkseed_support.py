"""What the tests of the seed formatter share: running it, btrfs check, a sprout."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.btrfs_image import data_bytes

from btrfs_ublk.base.helpers import MKSEED, helper_path
from btrfs_ublk.kernel import loop_device, mounted
from btrfs_ublk.kernel.btrfs import add_device
from btrfs_ublk.kernel.mount import Mount

KIB, MIB, GIB, TIB, EIB = (1 << shift for shift in (10, 20, 30, 40, 60))
BLOCK = 4096
CHUNK = 255 * TIB
VIRTUAL_START = 512 * GIB
MAX_SIZE = 8 * EIB - 4 * GIB - VIRTUAL_START
NAME = ".btrfs-ublk-virtual-data"
TIMEOUT_S = 30


def mkseed_raw(
    *args: str | bytes | Path,
    program: str | Path | None = None,
    env: dict[str, str] | None = None,
    **popen: Any,
) -> subprocess.CompletedProcess[bytes]:
    base = {k: v for k, v in os.environ.items() if k != "SOURCE_DATE_EPOCH"}
    return subprocess.run(
        [program or helper_path(MKSEED), *args],
        capture_output=True,
        timeout=TIMEOUT_S,
        env=base | (env or {}),
        **popen,
    )


def mkseed(*args: str | bytes | Path, **keywords: Any) -> dict[str, Any]:
    """Make a seed; what ``--json`` says about it."""
    done = mkseed_raw("--json", *args, **keywords)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stderr == b"" and done.stdout.count(b"\n") == 1
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def mkfs(
    path: Path, *options: str, size: int = 1 << 30, devices: int = 1
) -> list[Path]:
    images = [path / f"image-{n}" for n in range(devices)]
    for image in images:
        image.touch()
        os.truncate(image, size)
    subprocess.run(
        ["mkfs.btrfs", "-q", *options, *images],
        check=True,
        capture_output=True,
        timeout=60,
    )
    return images


def btrfs_check(image: Path) -> None:
    done = subprocess.run(
        ["btrfs", "check", image], capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    complaints = [
        line
        for line in (done.stdout + done.stderr).splitlines()
        if any(word in line.lower() for word in ("warning", "error:", "mismatch"))
        # The price of the stub chunk.
        and "Multiple block group" not in line and "Data: single, raid0" not in line
        # It looks at all devices of the machine, which others may be about to detach.
        and "cannot scan /dev/" not in line
    ]
    assert not complaints, complaints


@contextmanager
def sprout(seed: Path, directory: Path) -> Iterator[tuple[Mount, Path]]:
    """Mount the seed, add a local device, make it writable: the mount, and that
    device's file.
    """
    local = directory / "local.img"
    target = directory / "mount"
    target.mkdir()
    with local.open("wb") as file:
        file.truncate(GIB)
    with (
        loop_device(seed, read_only=True) as seed_loop,
        loop_device(local) as local_loop,
        mounted(seed_loop.path, target, read_only=True) as mount,
    ):
        mount.allow_source(local_loop.path)
        add_device(target, local_loop.path)
        mount.remount(options=["rw"])
        yield mount, local


#: Everything that makes two images equal.
IDENTITY = (
    "--fsid=00112233-4455-6677-8899-aabbccddeeff",
    "--time=1700000000",
)


def digest(path: Path) -> str:
    content = hashlib.sha256(str(path.stat().st_size).encode())
    for offset, block in data_bytes(path):
        content.update(offset.to_bytes(8, "little") + block)
    return content.hexdigest()


def assert_refused(
    done: subprocess.CompletedProcess[bytes], status: int, *words: str
) -> None:
    """One error, one hint, the right status, and nothing on stdout."""
    lines = done.stderr.decode(errors="replace").splitlines()
    assert done.returncode == status, lines
    assert done.stdout == b""
    assert lines[0].startswith(f"{MKSEED}: error: "), lines
    assert len(lines) <= 2 and all(line.startswith("  hint: ") for line in lines[1:])
    for word in words:
        assert word in "\n".join(lines), lines
