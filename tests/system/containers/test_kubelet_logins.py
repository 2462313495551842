"""Logins by the kubelet's plugins: what is asked, and that reads outlive their end."""

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support import kubelet as logins
from support import registry as registries
from support.devices import new_btrfs
from support.kubelet import answer, configuration
from support.lazy_images import Place, some_layers
from support.registry import PASSWORD
from support.snapshotter import Client, pull, served, state
from support.waiting import wait_until

from btrfs_ublk.containers import kubelet_logins
from btrfs_ublk.containers.images import LazyOptions
from btrfs_ublk.containers.kubelet_logins import read_plugins
from btrfs_ublk.device.state import device_directory
from btrfs_ublk.image.access import RegistryAccess
from btrfs_ublk.units import MIB

#: Until a read of a volume fails that no source answers, by default.
DEADLINE_S = 30.0

place = logins.place  # a fixture

pytestmark = pytest.mark.device


@contextmanager
def snapshotter(
    place: Place, test_root: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Client, Path]]:
    """Serve a root, with logins by a plugin that is asked again soon."""
    host = place.registry.host
    answer(place.path, PASSWORD, pattern=host)
    plugins = read_plugins(configuration(place.path, host), place.path)
    monkeypatch.setattr(kubelet_logins, "_LEAST_S", 0.1)
    access = RegistryAccess(insecure=True)
    options = LazyOptions(access=access, plugins=plugins, writable_bytes=256 * MIB)
    with new_btrfs(test_root, size_bytes=1 << 30) as mount:
        root = mount / "root"
        try:
            with served(root, options) as client:
                yield client, root
        finally:
            place.take_down()


def test_reads_outlive_a_login(
    place: Place, test_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The password changes, and tokens end: nobody notices."""
    image = place.push("team/app", *some_layers())
    host = place.registry.host
    place.registry.tokens.life_s = place.registry.tokens.expires_in_s = 3
    with snapshotter(place, test_root, monkeypatch) as (client, root):
        top = pull(client, image)
        monkeypatch.setattr(registries, "PASSWORD", "another one")
        answer(place.path, "another one", pattern=host)
        (file,) = (root / "logins").iterdir()
        wait_until(lambda: "another one" in file.read_text())
        count = len(place.registry.tokens.requests)
        time.sleep(place.registry.tokens.life_s + 0.5)
        (shown,) = client.call("View", key="view", parent=top).mounts
        for files, name in zip(image.layers, ("big", "other"), strict=True):
            assert Path(shown.source, name).read_bytes() == files[name]
        assert len(place.registry.tokens.requests) > count
        assert state(root).images[0]["failed_reads"] == 0
        client.remove("view")


def test_a_login_that_ends_fails_reads_until_it_is_renewed(
    place: Place, test_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is here is read on; the rest fails with EIO, before the deadline."""
    image = place.push("team/app", *some_layers())
    host = place.registry.host
    tokens = place.registry.tokens
    # NB: from the pull on, whose token the volume's server shares.
    tokens.life_s = tokens.expires_in_s = 3
    with snapshotter(place, test_root, monkeypatch) as (client, root):
        top = pull(client, image)
        (shown,) = client.call("View", key="view", parent=top).mounts
        directory = Path(shown.source)
        assert (directory / "big").read_bytes() == image.layers[0]["big"]
        monkeypatch.setattr(registries, "PASSWORD", "another one")
        time.sleep(tokens.life_s + 0.5)
        begin_s = time.monotonic()
        with pytest.raises(OSError) as caught:
            (directory / "other").read_bytes()
        took_s = time.monotonic() - begin_s
        assert caught.value.errno == errno.EIO
        assert took_s < DEADLINE_S
        fd = os.open(directory / "big", os.O_RDONLY | os.O_CLOEXEC)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
        assert (directory / "big").read_bytes() == image.layers[0]["big"]
        (said,) = state(root).images
        assert said["failed_reads"] > 0
        log = device_directory(said["volume"]).log.read_text()
        assert "reason=denied" in log and "HTTP status 401" in log, log
        # A container comes up nonetheless.
        client.prepare("container", top)
        answer(place.path, "another one", pattern=host)
        (file,) = (root / "logins").iterdir()
        wait_until(lambda: "another one" in file.read_text())
        wait_until(lambda: reads(directory / "other", image.layers[1]["other"]))
        client.remove("container")
        client.remove("view")


def reads(path: Path, content: bytes) -> bool:
    try:
        return path.read_bytes() == content
    except OSError:
        return False
