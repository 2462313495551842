"""``btrfs-ublk map``, on devices of ``btrfs-ublk device``."""

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.devices import any_command, description_file, device_command, map_command
from support.needs import Need

from btrfs_ublk.base.capabilities import FUSE, ROOT
from btrfs_ublk.base.readers import read_direct
from btrfs_ublk.device import show_device
from btrfs_ublk.server import Description, LazySegment
from btrfs_ublk.units import GIB, MIB

pytestmark = pytest.mark.usefixtures("in_process")

NAME = "map-command"


def good(*arguments: str | Path, stdin: str = "") -> str:
    done = map_command(*arguments, stdin=stdin)
    assert done.returncode == 0, done.stderr
    return done.stdout


def prefetched() -> dict[str, Any]:
    done = any_command("prefetch", NAME, "--all", "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.write_bytes(os.urandom(3 * MIB + 77))
    return path


@pytest.fixture
def device(
    need: Need, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    need(ROOT, FUSE)
    monkeypatch.setenv("BTRFS_UBLK_RUN_DIR", str(tmp_path / "run"))
    (tmp_path / "run").mkdir(mode=0o700)
    segment = LazySegment(
        offset=0,
        length=GIB,
        map=str(tmp_path / "it.map"),
        cache=str(tmp_path / "cache"),
        deadline_s=5,
    )
    description = description_file(tmp_path, Description(GIB, [segment]))
    done = device_command("up", NAME, description, "--front-end", "fuse")
    assert done.returncode == 0, done.stderr
    yield Path(done.stdout.strip())
    done = device_command("down", NAME)
    assert done.returncode == 0, done.stderr


def test_a_file_from_digest_to_drain(device: Path, data: Path, tmp_path: Path) -> None:
    digests = tmp_path / "digests"
    root = good("digest", data, "--unit", "64K", "-o", digests).strip()
    assert digests.stat().st_size == 32 * 49
    given = "--unit", "64K", "--digests", digests, "--root", root
    words = good("add", NAME, "--file", data, "--offset", "1M", *given).split()
    assert words == [str(MIB), str(3 * MIB + 4096), "mapped"]
    assert "already" in good("add", NAME, "--file", data, "--offset", "1M", *given)
    expected = data.read_bytes()
    assert read_direct(device, MIB, 3 * MIB) == expected[: 3 * MIB]

    listed = json.loads(good("list", NAME, "--json"))
    assert [(x["offset"], x["digests"]) for x in listed] == [(MIB, "given")]
    assert "given" in good("list", NAME)
    shown = json.loads(good("show", NAME, "2M", "--json"))
    assert shown["source"]["description"]["root"] == root
    assert "it.map" in good("stats", NAME) and "mirrors" in good("show", NAME, "2M")
    drained = prefetched()
    assert drained["state"] == "done"
    assert drained["fetched_units"] + drained["cached_units"] == drained["units"]
    assert drained["failed_units"] == 0
    assert good("verify", NAME, "--ask") == "all is well\n"
    data.write_bytes(b"another")
    done = map_command("verify", NAME, "--ask")
    assert done.returncode == 1 and "source 1: mirror 0 (file)" in done.stdout
    assert read_direct(device, MIB, 3 * MIB) == expected[: 3 * MIB]


def test_a_compressed_file_from_index_to_drain(device: Path, tmp_path: Path) -> None:
    expected = os.urandom(MIB) + bytes(MIB) + b"words " * 100_000 + os.urandom(777)
    path, index = tmp_path / "data.gz", tmp_path / "index"
    path.write_bytes(gzip.compress(expected))
    words = good("index", path, "--codec", "gzip", "--spacing", "256K", "-o", index)
    assert words.startswith("2.573 MiB come of 1.00") and "points take" in words
    digests = tmp_path / "digests"
    root = good("digest", path, "--index", index, "-o", digests).strip()
    given = "--codec", "gzip", "--index", index, "--digests", digests, "--root", root
    length = -(-len(expected) // 4096) * 4096
    words = good("add", NAME, "--file", path, "--offset", "0", *given)
    assert words.split() == ["0", str(length), "mapped"]
    assert "already" in good("add", NAME, "--file", path, "--offset", "0", *given)
    padded = expected + bytes(length - len(expected))
    for offset in (length - 4096, MIB - 4096, 0):
        assert read_direct(device, offset, 4096) == padded[offset:][:4096]
    assert prefetched()["failed_units"] == 0
    assert good("verify", NAME, "--ask") == "all is well\n"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    assert read_direct(device, 0, length) == padded  # of the cache


def test_other_sources_and_a_restart(device: Path, data: Path, tmp_path: Path) -> None:
    memset, pattern = '{"kind": "memset", "byte": 97}', '{"kind": "pattern"}'
    good("add", NAME, "--mirror", memset, "--size", "1M", "--offset", "0")
    good("add", NAME, "--mirror", pattern, "--size", "1G", "--length", "1M")
    source = tmp_path / "source.json"
    source.write_text(json.dumps({"kind": "file", "path": str(data)}))
    good("add", NAME, "--source", source, "--offset", "64M", "--length", "3M")
    mirrors = (
        "--file",
        "/nowhere",
        "--mirror",
        json.dumps({"kind": "file", "path": str(data)}),
    )
    size = str(data.stat().st_size)
    good("add", NAME, *mirrors, "--size", size, "--offset", "128M")
    assert read_direct(device, 0, 4096) == b"a" * 4096
    assert read_direct(device, MIB + 8, 0) == b""
    assert read_direct(device, MIB, 4096)[8:16] == (8).to_bytes(8, "little")
    for offset in (64 * MIB, 128 * MIB):
        assert read_direct(device, offset, 4096) == data.read_bytes()[:4096]
    before = good("list", NAME)
    server = show_device(NAME).state.server
    assert server is not None
    os.kill(server.pid, 9)
    assert server.wait(timeout_s=60)  # else it may be taken for one that serves
    done = device_command("recover", NAME)
    assert done.returncode == 0, done.stderr
    assert good("list", NAME) == before


def test_a_socket_that_is_a_symbolic_link(device: Path, tmp_path: Path) -> None:
    assert device.is_block_device()
    control = tmp_path / "run" / "devices" / NAME / "control"
    control.rename(control.with_name("elsewhere"))
    control.symlink_to("elsewhere")
    done = map_command("list", NAME)
    assert done.returncode == 1 and "is a symbolic link" in done.stderr
    control.with_name("elsewhere").replace(control)
    assert json.loads(good("list", NAME, "--json")) == []
