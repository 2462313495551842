"""Indexed images: made of ordinary ones, beside them in a real registry, and read."""

from __future__ import annotations

import errno
from contextlib import suppress

from support import lazy_images as made
from support.lazy_images import Place, blob_path, flip, pushed
from support.needs import Need
from support.waiting import wait_until

from btrfs_ublk.base.capabilities import BTRFS, FUSE, LOOP, ROOT
from btrfs_ublk.units import KIB, MIB
from btrfs_ublk.volume import VolumeDefinition, down_volume, remove_volume, up_volume

place = made.place  # a fixture


def test_an_indexed_image_is_a_volume(place: Place, need: Need) -> None:
    """Its tree is that of a sealed image, which is taken down and brought up again. A
    flipped bit of a layer is an error of what lies behind it only, and heals."""
    need(ROOT, BTRFS, LOOP, FUSE)
    target, image = pushed(place)
    definition = VolumeDefinition(
        writable_bytes=256 * MIB,
        mount=place.path / "mnt",
        image=str(target),
        image_ca_file=place.registry.ca_file,
        deadline_s=3.0,
    )
    base = place.path / "volumes"
    layer = made.layer_of(place.path / "stock")
    path = blob_path(place, layer.digest)
    flip(path, MIB)
    volume = up_volume("indexed", definition, base=base)
    assert volume.mount is not None
    root = volume.mount / "rootfs"
    with open(root / "hard", "rb") as file:
        whole = (place.path / "stock-trees/lower/hard").read_bytes()
        assert file.read(256 * KIB) == whole[: 256 * KIB]
    names = [x for x in root.rglob("*") if x.is_file() and not x.is_symlink()]
    broken = []
    for name in names:
        try:
            name.read_bytes()
        except OSError as error:
            assert error.errno == errno.EIO
            broken.append(name)
    assert broken == [root / "hard"]
    flip(path, MIB)

    def heals() -> bool:
        # A unit that was waited for in vain is not asked for again at once.
        with suppress(OSError):
            return (root / "hard").read_bytes() == whole
        return False

    wait_until(heals)
    down_volume("indexed", base=base)
    up_volume("indexed", definition, base=base)
    lower = place.path / "stock-trees/lower"
    count = 0
    for name in names:
        source = lower / name.relative_to(root)
        upper = place.path / "stock-trees/upper" / name.relative_to(root)
        last = place.path / "stock-trees/last" / name.relative_to(root)
        expected = next(x for x in (last, upper, source) if x.exists())
        assert name.read_bytes() == expected.read_bytes(), name
        assert name.stat().st_mtime == 1000000000.5 and name.stat().st_uid == 7
        count += 1
    assert count > 300 and not (root / "dir1/sub").exists()
    down_volume("indexed", base=base)
    remove_volume("indexed", base=base)
