"""Volumes of images: from a layout or a registry, lazily, with forks that are kept.

These images are of the other formatter, whose seed has one file of virtual data: where
bytes come from, and what is kept, is the same.
"""

import hashlib
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.needs import Need
from support.processes import ending_with_us
from support.registry import REGISTRY, Registry, registry_server
from support.s3_server import ACCESS_KEY, BUCKET, SECRET_KEY, WEED, s3_server
from support.volumes import NAME, Place, image_place
from support.waiting import wait_until
from support.web_servers import NGINX, web_server

from btrfs_ublk.base.capabilities import BTRFS, LOOP, ROOT
from btrfs_ublk.bench.link import link
from btrfs_ublk.device import device_map
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.image.access import RegistryAccess
from btrfs_ublk.image.build import BuiltImage, seal
from btrfs_ublk.image.documents import digest_of
from btrfs_ublk.image.layout import Layout
from btrfs_ublk.image.pull import inspect_image
from btrfs_ublk.image.reference import Reference
from btrfs_ublk.image.source import OpenedSource
from btrfs_ublk.image.store import ImageStore
from btrfs_ublk.image.transfer import open_repository, push_image
from btrfs_ublk.kernel.btrfs import create_subvolume, reached_inode, set_read_only
from btrfs_ublk.seed import make_seed
from btrfs_ublk.server import FrontEndName
from btrfs_ublk.units import KIB, MIB
from btrfs_ublk.volume import (
    down_volume,
    fork_image,
    list_volumes,
    remove_volume,
    show_volume,
    up_volume,
)
from btrfs_ublk.volume.definition import image_access
from btrfs_ublk.volume.image_seed import find_named_image
from btrfs_ublk.volume.mounts import seed_locked
from btrfs_ublk.volume.store import Made, VolumeDirectory, volume_directory

pytestmark = pytest.mark.usefixtures("in_process")

#: More than is taken as a whole.
DATA = random.Random(5).randbytes(9 * MIB)
UNIT = 64 * KIB
CHAIN = digest_of(b"the only layer")


def image_of_a_file(path: Path, data: bytes = DATA) -> tuple[BuiltImage, int]:
    """Make an image; return it, and the inode of its file."""
    made = path.with_name("made")
    made.mkdir()
    seed = make_seed(made / "seed.img", virtual_data_size=len(data), metadata_only=True)
    (made / "data").write_bytes(data)
    units = [data[at : at + UNIT] for at in range(0, len(data), UNIT)]
    (made / "digests").write_bytes(
        b"".join(hashlib.sha256(unit).digest() for unit in units)
    )
    report: dict[str, Any] = {
        "device_bytes": seed.device_bytes,
        "fsid": str(seed.fsid),
        "unit": UNIT,
        "layers": [{"chain_id": CHAIN, "diff_id": CHAIN, "subvolume": 256}],
        "counts": {"first_bytes": 0},
    }
    opened = OpenedSource(layers=(), config={"os": "linux", "architecture": "amd64"})
    image = seal(Layout.made(path), made, report, opened, "app")
    return image, seed.virtual_data.inode


@pytest.fixture
def place(
    need: Need,
    sparse_path: Path,
    front_end: FrontEndName,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Place]:
    need(ROOT, BTRFS, LOOP)
    found = image_place(sparse_path, monkeypatch, front_end)
    yield found
    found.take_all_down()


@pytest.fixture
def registry(need: Need, tmp_path: Path) -> Iterator[Registry]:
    need(REGISTRY)
    with registry_server(tmp_path, tls=True) as server:
        yield server


def push(image: BuiltImage, target: Reference, ca_file: Path | None = None) -> None:
    layout = Layout.opened(image.name.path)
    access = RegistryAccess(ca_file=ca_file)
    with open_repository(target, access, writing=True) as repository:
        push_image(layout, layout.find("app"), target, repository)


def allow(place: Place, pattern: str) -> None:
    (place.root / "etc").mkdir()
    (place.root / "etc/images.toml").write_text(f'[[allow]]\nfrom = "{pattern}"\n')


def content(mount: Path, inode: int) -> bytes:
    with reached_inode(mount, inode) as path:
        return path.read_bytes()


def fork_and_write(place: Place) -> None:
    """Do what has its layers in the image of mkimage by hand: make one, and a fork."""
    (place.target / "layers").mkdir()
    layer = create_subvolume(place.target / "layers", CHAIN)
    (layer / "os-release").write_text("ID=base\n")
    set_read_only(layer)
    one = fork_image(NAME, "one", base=place.base)
    assert one == place.target / "forks" / "one"
    (one / "os-release").write_text("ID=changed\n")
    two = fork_image(NAME, "two", layer=CHAIN, base=place.base)
    assert (two / "os-release").read_text() == "ID=base\n"
    with pytest.raises(UsageError, match="already"):
        fork_image(NAME, "one", base=place.base)
    with pytest.raises(UsageError, match="has no layer"):
        fork_image(NAME, "three", layer=digest_of(b""), base=place.base)
    for name in ("", ".", "a/b", "a" * 256):
        with pytest.raises(UsageError, match="cannot be the name of a fork"):
            fork_image(NAME, name, base=place.base)


def test_from_a_layout(place: Place) -> None:
    image, inode = image_of_a_file(place.root / "image")
    definition = place.definition(image=str(image.name))
    volume = up_volume(NAME, definition, base=place.base)
    assert volume.mount == place.target and volume.size_bytes == len(DATA)
    assert content(place.target, inode) == DATA
    fork_and_write(place)
    assert up_volume(NAME, definition, base=place.base).is_up  # changes nothing
    assert down_volume(NAME, base=place.base)
    with pytest.raises(UsageError, match="is down"):
        fork_image(NAME, "late", base=place.base)

    up_volume(NAME, definition, base=place.base)
    forks = place.target / "forks"
    assert (forks / "one/os-release").read_text() == "ID=changed\n"
    assert (forks / "two/os-release").read_text() == "ID=base\n"
    assert content(place.target, inode) == DATA
    with pytest.raises(UsageError, match="was made of oci:.*, not of none"):
        up_volume(NAME, place.definition(), base=place.base)
    down_volume(NAME, base=place.base)
    remove_volume(NAME, base=place.base)


def test_from_a_registry(place: Place, registry: Registry) -> None:
    image, inode = image_of_a_file(place.root / "image")
    target = Reference(registry.host, "some/app", "1")
    push(image, target, registry.ca_file)
    definition = place.definition(image=str(target), image_ca_file=registry.ca_file)
    with pytest.raises(BtrfsUblkError, match="no sealed image may come from"):
        up_volume(NAME, definition, base=place.base)
    assert not os.path.lexists(volume_directory(NAME, place.base).path)
    allow(place, target.place)
    up_volume(NAME, definition, base=place.base)
    cached = show_volume(NAME, base=place.base)
    assert cached.is_up
    assert content(place.target, inode) == DATA
    fork_and_write(place)
    down_volume(NAME, base=place.base)
    up_volume(NAME, definition, base=place.base)
    assert (place.target / "forks/one/os-release").read_text() == "ID=changed\n"
    assert content(place.target, inode) == DATA
    ca = ("--ca-file", registry.ca_file)
    done = place.command("up", image.name, NAME, *ca, noun="image")
    assert done.returncode == 2 and "was made of" in done.stderr
    # What it is made of is kept, so that the name will do.
    assert place.command("down", NAME, noun="image").returncode == 0
    assert place.command("up", NAME).returncode == 0


def test_one_mounts_a_seed_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of those that have other run directories: the kernel's list is one."""
    volume = VolumeDirectory(tmp_path / "v")
    volume.path.mkdir()
    seed = make_seed(volume.seed_image, virtual_data_size=9 * MIB, metadata_only=True)
    keys = {"tag": "", "size_bytes": MIB, "writable_bytes": MIB}
    volume.write_made(Made(seed=seed.to_dict(), image={"name": "x"}, **keys))
    locked = threading.Event()

    def lock() -> None:
        with seed_locked(volume):
            locked.set()

    waiting = threading.Thread(target=lock)
    with seed_locked(volume):
        monkeypatch.setenv("BTRFS_UBLK_RUN_DIR", str(tmp_path))
        waiting.start()
        assert not locked.wait(0.5)
    waiting.join()
    assert locked.is_set()


@pytest.mark.parametrize("front_end", ["fuse"])
def test_several_come_up_at_once(place: Place) -> None:
    """The kernel knows their seeds by one fsid; each is mounted with its own."""
    image, inode = image_of_a_file(place.root / "image")
    names = [f"{NAME}-{number}" for number in range(5)]
    argv = [sys.executable, "-m", "btrfs_ublk.cli.main", "volume", "up"]
    argv += ["--front-end=fuse", "--writable=256M", f"--image={image.name}"]
    for _ in range(3):
        children = [
            subprocess.Popen(
                ending_with_us(
                    [
                        *argv,
                        name,
                        f"--base={place.base}",
                        f"--mount={place.root / name}",
                    ],
                    signal="KILL",
                ),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for name in names
        ]
        said = [child.communicate(timeout=100) for child in children]
        assert [error for _, error in said] == [""] * len(names)
        for mount, _ in said:
            assert content(Path(mount.strip()), inode) == DATA
        for name in names:
            assert down_volume(name, base=place.base)


@pytest.mark.parametrize("front_end", ["fuse"])
def test_a_trace_beside_the_image_decides_what_comes_first(
    place: Place, registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    image, inode = image_of_a_file(place.root / "image")
    target = Reference(registry.host, "some/app", "1")
    push(image, target, registry.ca_file)
    allow(place, target.place)
    root = inspect_image(image.name, RegistryAccess()).header.root
    source = {"source": 1, "size": len(DATA), "unit": 4096, "root": root, "mirrors": []}
    lines = [{"format": "btrfs-ublk trace", "version": 2}, source, [1, 100, 1, 0]]
    path = place.root / "trace"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    ca = ("--ca-file", registry.ca_file)
    done = place.command("trace", path, target, *ca, noun="image")
    assert done.returncode == 0 and "64 KiB come first" in done.stderr, done.stderr
    assert place.command("pull", target, *ca, noun="image").returncode == 0
    definition = place.definition(image=str(target), image_ca_file=registry.ca_file)
    for number in range(3):

        def ended() -> bool:
            now = device_map(NAME).prefetch_status()
            return now is not None and not now.is_running

        if number == 2:  # of what is in the store now
            remove_volume(NAME, base=place.base)
            assert "what the tag named" not in caplog.text
            references = ImageStore().path / "references.json"
            names = json.loads(references.read_text())
            names["references"][str(target)]["time_s"] -= 2 * 86400
            references.write_text(json.dumps(names))
        up_volume(NAME, definition, base=place.base)
        wait_until(ended)
        found = device_map(NAME).prefetch_status()
        assert found is not None and found.is_complete and found.units == 1
        down_volume(NAME, base=place.base)
    assert f"{target} is what the tag named at 20" in caplog.text
    up_volume(NAME, definition, base=place.base)
    assert content(place.target, inode) == DATA


def test_what_is_not_pinned_any_more_goes(place: Place, registry: Registry) -> None:
    image, _ = image_of_a_file(place.root / "image")
    target = Reference(registry.host, "some/app", "1")
    push(image, target, registry.ca_file)
    allow(place, target.place)
    ca = ("--ca-file", registry.ca_file)
    assert place.command("pull", target, "--pin", *ca, noun="image").returncode == 0
    assert place.command("gc", noun="image").stdout == ""
    assert place.command("unpin", target, noun="image").returncode == 0
    assert place.command("gc", noun="image").stdout == f"removed {image.sealed}\n"
    done = place.command("unpin", target, noun="image")
    assert done.returncode == 2 and "no image was pulled as" in done.stderr


def test_a_kill_while_the_metadata_come(place: Place, registry: Registry) -> None:
    """The device is there before the seed is; what a kill leaves then is made anew."""
    image, inode = image_of_a_file(place.root / "image")
    target = Reference(registry.host, "some/app", "1")
    push(image, target, registry.ca_file)
    allow(place, "*/some/app")
    host, _, port = registry.host.partition(":")
    volume = volume_directory(NAME, place.base)

    def is_half_there() -> bool:
        try:
            return volume.made().is_pending and device_map(NAME).stats() != {}
        except BtrfsUblkError:
            return False

    with link((host, int(port)), round_trip_s=1.5, bytes_per_s=0) as (address, _):
        argv = [sys.executable, "-m", "btrfs_ublk.cli.main", "image", "up"]
        argv += [f"{address}/some/app:1", NAME, f"--ca-file={registry.ca_file}"]
        argv += [f"--base={place.base}", f"--mount={place.target}"]
        with subprocess.Popen(ending_with_us(argv, signal="KILL")) as child:
            wait_until(is_half_there)
            child.kill()
    assert not os.path.ismount(place.target)
    with pytest.raises(BtrfsUblkError, match=address):  # it is not there any more
        up_volume(NAME, base=place.base)
    assert volume.definition().image == f"{address}/some/app:1"
    definition = place.definition(image=str(target), image_ca_file=registry.ca_file)
    up_volume(NAME, definition, base=place.base)
    assert content(place.target, inode) == DATA


@pytest.mark.parametrize("front_end", ["fuse"])
def test_from_a_bucket(
    need: Need, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What says where the store is and who asks it is kept with the volume."""
    need(WEED)
    image, inode = image_of_a_file(place.root / "image")
    target = Reference(f"s3://{BUCKET}", "images/app", "1")
    keys = place.root / "credentials"
    keys.touch(mode=0o600)
    keys.write_text(
        f"[default]\naws_access_key_id={ACCESS_KEY}\naws_secret_access_key={SECRET_KEY}"
    )
    with s3_server(tmp_path) as store:
        monkeypatch.setenv("AWS_ENDPOINT_URL", store.endpoint)
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(keys))
        push(image, target)
        allow(place, target.place)
        definition = place.definition(image=str(target))
        find_named_image(target, image_access(definition))
        right = keys.read_text()
        keys.write_text(right.replace(SECRET_KEY, "another"))
        with pytest.raises(BtrfsUblkError, match="403, SignatureDoesNotMatch: "):
            up_volume(NAME, definition, base=place.base)
        assert not list_volumes(base=place.base)
        keys.write_text(right)
        up_volume(NAME, definition, base=place.base)
        assert content(place.target, inode)[: 2 * MIB] == DATA[: 2 * MIB]
        down_volume(NAME, base=place.base)
        for name in ("AWS_ENDPOINT_URL", "AWS_SHARED_CREDENTIALS_FILE"):
            monkeypatch.delenv(name)
        up_volume(NAME, definition, base=place.base)
        assert content(place.target, inode) == DATA
        fork_and_write(place)


@pytest.mark.parametrize("front_end", ["fuse"])
def test_from_a_mirror_of_a_registry(place: Place, registry: Registry) -> None:
    """The registry that the image is named after cannot be reached."""
    image, inode = image_of_a_file(place.root / "image")
    push(image, Reference(registry.host, "some/app", "app"), registry.ca_file)
    mirrors = place.root / "etc/certs.d/registry.invalid"
    mirrors.mkdir(parents=True)
    (place.root / "etc/hosts.toml").write_text(f'containerd = "{mirrors.parent}"\n')
    (mirrors / "hosts.toml").write_text(
        f'[host."https://{registry.host}"]\nca = "{registry.ca_file}"\n'
    )
    name = f"registry.invalid/some/app@{image.sealed}"
    up_volume(NAME, place.definition(image=name), base=place.base)
    assert content(place.target, inode) == DATA
    down_volume(NAME, base=place.base)
    up_volume(NAME, place.definition(image=name), base=place.base)


@pytest.mark.parametrize("front_end", ["fuse"])
def test_from_a_web_server(need: Need, place: Place, tmp_path: Path) -> None:
    need(NGINX)
    with web_server(tmp_path) as server:
        image, inode = image_of_a_file(server.files / "app")
        name = f"{server.tls_url('files/app')}@{image.sealed}"
        definition = place.definition(image=name, image_ca_file=server.ca)
        up_volume(NAME, definition, base=place.base)
        assert content(place.target, inode) == DATA
        ranges = [
            x for x in server.served() if x["path"].startswith("/files/app/blobs")
        ]
        assert any(x["status"] == "206" for x in ranges)


@pytest.mark.parametrize("front_end", ["fuse"])
def test_small_data_need_no_ranges(need: Need, place: Place, tmp_path: Path) -> None:
    need(NGINX)
    with web_server(tmp_path) as server:
        data = DATA[: 4 * MIB]
        image, inode = image_of_a_file(server.files / "app", data)
        name = f"{server.url('whole/app')}@{image.sealed}"
        definition = place.definition(image=name, image_insecure=True)
        up_volume(NAME, definition, base=place.base)
        assert content(place.target, inode) == data
        asked = [x["path"] for x in server.served()]
    assert asked.count(f"/whole/app/blobs/sha256/{digest_of(data)[7:]}") == 1


@pytest.mark.data
def test_changed_data_are_not_delivered(place: Place) -> None:
    image, inode = image_of_a_file(place.root / "image")
    layout = Layout.opened(image.name.path)
    path = layout.blob(digest_of(DATA))
    path.chmod(0o600)
    with open(path, "r+b") as file:
        file.seek(3 * UNIT + 5)
        file.write(bytes([DATA[3 * UNIT + 5] ^ 1]))
    up_volume(NAME, place.definition(image=str(image.name)), base=place.base)
    with reached_inode(place.target, inode) as at, open(at, "rb") as file:
        assert os.pread(file.fileno(), UNIT, 0) == DATA[:UNIT]
        with pytest.raises(OSError, match="Input/output error"):
            os.pread(file.fileno(), UNIT, 3 * UNIT)
        assert os.pread(file.fileno(), UNIT, 6 * UNIT) == DATA[6 * UNIT : 7 * UNIT]


def test_a_changed_pack_is_refused_before_anything_is_made(place: Place) -> None:
    image, _ = image_of_a_file(place.root / "image")
    layout = Layout.opened(image.name.path)
    (pack,) = (
        path
        for path in (layout.path / "blobs/sha256").iterdir()
        if path.stat().st_size == image.pack_bytes
    )
    pack.chmod(0o600)
    pack.write_bytes(pack.read_bytes()[:-1] + b"x")
    with pytest.raises(BtrfsUblkError, match="it was changed, or is damaged"):
        up_volume(NAME, place.definition(image=str(image.name)), base=place.base)
    assert not os.path.lexists(volume_directory(NAME, place.base).path)
