"""``btrfs-ublk volume``: a volume of what a web server has."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.needs import Need
from support.volumes import NAME, TIMEOUT_S, Place
from support.web_servers import NGINX, WebServer, web_server

from btrfs_ublk import device as devices
from btrfs_ublk.content.cache import Cache
from btrfs_ublk.device.state import RUN_VARIABLE
from btrfs_ublk.errors import BtrfsUblkError, LeftoverError
from btrfs_ublk.units import GIB, MIB, TIB
from btrfs_ublk.volume import (
    down_volume,
    kept_volume,
    list_volumes,
    remove_volume,
    show_volume,
)
from btrfs_ublk.volume.store import VOLUMES_VARIABLE

pytestmark = pytest.mark.usefixtures("in_process")

CONTENT = os.urandom(3 * MIB + 77)

#: Where /sys is read-only, as in a container; "$@" is the command.
_IN_A_CONTAINER = """
mount -o remount,bind,ro /sys
"$@" up kept --front-end=fuse --size=1G --writable=256M --mount="$TARGET"
"$@" down kept
"$@" up kept --read-ahead=64K || echo "exit status $?" >&2
"$@" up kept --read-ahead=kernel
"$@" down kept
"""


@pytest.fixture
def server(need: Need, sparse_path: Path) -> Iterator[WebServer]:
    need(NGINX)
    with web_server(sparse_path / "web") as running:
        (running.files / "big").write_bytes(CONTENT)
        yield running


def test_status_names_the_file_that_fails(
    place: Place, server: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("well", "sub/gone")
    for name in names:
        (server.files / Path(name).name).write_bytes(CONTENT[: 1 << 20])
    files = [f"--add-file={x}={server.url(f'files/{Path(x).name}')}" for x in names]
    place.command("up", NAME, "--front-end=fuse", "--mount", place.target, *files)
    (server.files / "gone").unlink()
    assert (place.target / "well").read_bytes() == CONTENT[: 1 << 20]
    with pytest.raises(OSError, match="Input/output"):
        (place.target / "sub/gone").read_bytes()
    said = place.answer("status", NAME)["failing"]
    assert "reads failed, the last one of 'sub/gone' (requests: " in said

    def fail(_name: str) -> None:
        raise BtrfsUblkError("injected")

    monkeypatch.setattr(devices, "device_map", fail)
    found = show_volume(NAME, base=place.base)
    assert found.failing is not None and "reads failed (requests: " in found.failing
    place.command("down", NAME)


def test_from_a_web_server_to_a_file(place: Place, server: WebServer) -> None:
    url = server.url("files/big")
    fuse = ["--size=1G", "--writable=256M", "--front-end=fuse", "--cache-max=2M"]
    done = place.command(
        *("up", NAME, *fuse, "--mount", place.target, f"--add-file=big.bin={url}")
    )
    assert (done.returncode, done.stdout) == (0, f"{place.target}\n"), done.stderr
    assert place.command("status", NAME).returncode == 0
    before = [each for each in server.served() if each["status"] == "206"]
    assert len(before) * 256 * 1024 < len(CONTENT)  # its size was asked for
    assert (place.target / "big.bin").read_bytes() == CONTENT
    found = place.answer("status", NAME)
    assert found["state"] == "up" and found["mapped_bytes"] >= len(CONTENT)
    (file,) = found["files"]
    assert file["origin"] == url and file["size_bytes"] == len(CONTENT)
    assert [each["name"] for each in place.answer("list")] == [NAME]
    assert NAME in place.command("list").stdout
    cloned = place.command("clone", NAME, "part", "--offset=0", "--length=5000")
    assert Path(cloned.stdout.strip()).read_bytes() == CONTENT[:5000]
    assert cloned.stderr == "" and found["failing"] is None
    beyond = place.command("clone", NAME, "beyond", "--offset=2M", "--length=4M")
    unmapped = 6 * MIB - (len(CONTENT) + 4095) // 4096 * 4096
    assert f"{unmapped} of {4 * MIB} bytes are not mapped" in beyond.stderr
    with pytest.raises(OSError, match="Input/output"):
        Path(beyond.stdout.strip()).read_bytes()
    assert "reads failed" in place.answer("status", NAME)["failing"]
    check_that_nothing_is_cloned_beyond_the_end(place)
    refused = place.command("remove", NAME, "--yes")
    assert refused.returncode == 1 and "Remove" not in refused.stderr
    assert place.answer("down", NAME)["result"] == "down"
    assert place.command("status", NAME).returncode == 1
    assert place.command("up", NAME).returncode == 0
    assert (place.target / "big.bin").read_bytes() == CONTENT
    assert place.command("down", NAME).returncode == 0
    # Nobody answers, so it is not removed.
    asked = place.command("remove", NAME)
    assert asked.returncode == 2 and "use --yes" in asked.stderr
    assert place.command("remove", NAME, "--yes").returncode == 0
    assert place.answer("list") == []


def check_that_nothing_is_cloned_beyond_the_end(place: Place) -> None:
    for offset, length in ((GIB - 4096, MIB), (70 * TIB, 4096)):
        refused = place.command(
            "clone", NAME, "none", f"--offset={offset}", f"--length={length}"
        )
        assert refused.returncode == 2, refused
        for number in (offset, length, GIB):
            assert str(number) in refused.stderr
        assert not (place.target / "none").exists()


def test_definitions_in_files(place: Place, server: WebServer) -> None:
    definition = place.root / "etc/volumes" / f"{NAME}.toml"
    definition.parent.mkdir(parents=True)
    definition.write_text(f"""
        size = "1G"
        writable = "256M"
        mount = "{place.target}"
        front_end = "fuse"
        [[file]]
        path = "a/b/big"
        url = "{server.url('files/big')}"
        """)
    refused = place.command("up", NAME, "--size=2G")
    assert refused.returncode == 2 and str(definition) in refused.stderr
    assert place.command("up", NAME).returncode == 0
    assert (place.target / "a/b/big").read_bytes() == CONTENT
    with definition.open("a") as file:
        file.write("[[file]]\npath = 'no'\nurl = '" + server.url("files/no") + "'\n")
    failed = place.command("up", NAME)
    assert failed.returncode == 1 and "404" in failed.stderr, failed.stderr
    # It was up, and is.
    assert place.command("status", NAME).returncode == 0
    assert place.command("down", NAME).returncode == 0
    assert place.command("up", NAME).returncode == 1
    # It was down, and is.
    assert place.answer("status", NAME)["state"] == "down"


def test_the_cap_of_a_cache_comes_and_goes(place: Place) -> None:
    """And what somebody has set besides stays."""
    cache = place.base / NAME / "cache"

    def limits() -> tuple[int, int]:
        keys = json.loads((cache / "limits").read_text())
        return keys["max_bytes"], keys["reserve_bytes"]

    def up(*options: str | Path) -> None:
        done = place.command("up", NAME, *options)
        assert done.returncode == 0, done.stderr

    good = place.root / "good.toml"
    good.write_text(place.definition(cache_max_bytes=2 * MIB).to_toml())
    up("--file", good)
    assert limits() == (2 * MIB, 0)
    Cache(cache).limit(max_bytes=MIB, reserve_bytes=4096)
    up()
    assert limits() == (2 * MIB, 4096)
    gone = place.command("up", NAME, "--cache-max=5M", "--add-file=x=/not/there")
    assert gone.returncode and limits() == (2 * MIB, 4096)
    up("--cache-max=0")
    assert limits() == (0, 4096)
    Cache(cache).limit(max_bytes=MIB, reserve_bytes=4096)
    assert place.command("down", NAME).returncode == 0
    up()
    assert limits() == (MIB, 4096)


def test_where_sys_is_read_only(place: Place) -> None:
    """The default of read-ahead is a wish, and it can be left as it is."""
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-ec", _IN_A_CONTAINER, "sh"]
        + [sys.executable, "-m", "btrfs_ublk.cli.main", "volume"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={
            **os.environ,
            VOLUMES_VARIABLE: str(place.base),
            "TARGET": str(place.target),
        },
    )
    assert (done.returncode, done.stdout) == (0, f"{place.target}\n" * 2), done.stderr
    warned, failed, hint, status = done.stderr.splitlines()
    assert "WARNING: read-ahead stays the kernel's: cannot write /sys" in warned
    assert "error: cannot write /sys" in failed and "--read-ahead kernel" in hint
    assert status == "exit status 3"


def test_a_name_that_nobody_has_defined(place: Place) -> None:
    """It may be misspelt, so none is made of that name without an option."""
    done = place.command("up", NAME)
    assert done.returncode == 2 and "there are: none; a new one" in done.stderr
    done = place.command("up", NAME, "--size", "64T")
    assert done.returncode == 0, done.stderr
    done = place.command("up", f"{NAME}x")
    assert done.returncode == 2 and f"there are: {NAME}; a new one" in done.stderr
    done = place.command("logs", NAME, before=("env",))  # becomes tail
    assert done.returncode == 0 and "serves /dev/loop" in done.stdout
    assert place.command("down", NAME).returncode == 0
    done = place.command("logs", NAME)
    assert done.returncode == 2 and "is down, and has no log" in done.stderr
    Path(os.environ[RUN_VARIABLE], "volumes").rmdir()  # of mounts by default


def test_a_mount_point_must_be_an_empty_directory(place: Place) -> None:
    place.target.touch()
    refused = place.command("up", NAME, "--front-end=fuse", "--mount", place.target)
    assert refused.returncode == 2 and "is not a directory" in refused.stderr
    place.target.unlink()
    place.target.mkdir()
    with kept_volume(NAME, place.definition(), base=place.base):
        pass
    (place.target / "mine").touch()
    refused = place.command("up", NAME)  # where it was
    assert refused.returncode == 2 and "is not empty" in refused.stderr
    assert place.state() == "down" and (place.target / "mine").exists()


def test_a_file_system_without_files_of_that_size(place: Place) -> None:
    """A limit of the process ends files just as well."""
    limited = ("prlimit", f"--fsize={TIB}")
    options = ("--front-end=fuse", "--size=1G", f"--mount={place.target}")
    failed = place.command("up", NAME, *options, "--writable=2T", before=limited)
    assert failed.returncode == 1
    assert f"{place.base / NAME}/sprout.img of 2T: File too large" in failed.stderr
    assert "on XFS or btrfs" in failed.stderr and "Traceback" not in failed.stderr
    assert list_volumes(base=place.base) == [] and not place.target.exists()


def test_a_volume_that_is_damaged(place: Place) -> None:
    """The others are listed, and it is removed by who knows what that costs."""
    for name in (NAME, "other"):
        with kept_volume(name, place.definition(), base=place.base):
            pass
    made = place.base / NAME / "volume.json"
    text = made.read_text()
    made.write_text(json.dumps(json.loads(text) | {"fsid": 7}))
    damaged, other = list_volumes(base=place.base)
    assert (damaged.state, other.state) == ("damaged", "down")
    assert str(made) in (damaged.reason or "")
    with pytest.raises(BtrfsUblkError, match="cannot be used"):
        down_volume(NAME, base=place.base)
    with kept_volume("other", base=place.base):
        others = place.base / "other" / "volume.json"
        kept = others.read_text()
        others.write_text("{")
        with pytest.raises(LeftoverError, match="is up"):
            remove_volume("other", base=place.base)
        others.write_text(kept)
    (place.base / NAME / "definition.toml").write_text("size = [")
    asked = place.command("remove", NAME)
    assert asked.returncode == 2 and "how much is unknown" in asked.stderr
    remove_volume(NAME, base=place.base)
