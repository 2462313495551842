"""Whether another user could put something else in the place of a directory."""

import os
import struct
from pathlib import Path

import pytest

from btrfs_ublk.base.private_dirs import check_way
from btrfs_ublk.errors import BtrfsUblkError

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root has other users")

OTHER = 65534
#: Entries of an access list, by <linux/posix_acl_xattr.h>: tag, permissions, user.
ACL_OF_OTHER = [(1, 7, 0), (2, 7, OTHER), (4, 5, 0), (0x10, 7, 0), (0x20, 5, 0)]


def check(path: Path) -> None:
    check_way(path, what="store", hint="")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A directory of another user, with their link to one of root's."""
    (tmp_path / "roots").mkdir()
    home = tmp_path / "home"
    home.mkdir()
    (home / "link").symlink_to(tmp_path / "roots")
    os.chown(home, OTHER, OTHER)
    os.chown(home / "link", OTHER, OTHER, follow_symlinks=False)
    return home


@pytest.mark.parametrize("how", ["{home}/link", "home/link", "roots/../home/link"])
def test_links_in_the_middle_count(home: Path, tmp_path: Path, how: str) -> None:
    (tmp_path / "mine").symlink_to(how.format(home=home))
    with pytest.raises(BtrfsUblkError, match=f"other users can change {home} "):
        check(tmp_path / "mine" / "store")
    check(tmp_path / "roots" / "store")


def test_dots_lead_where_the_kernel_goes(home: Path, tmp_path: Path) -> None:
    """To the directory above that which the link names, not above the link."""
    (home / "below").mkdir()
    (tmp_path / "link").symlink_to(home / "below")
    with pytest.raises(BtrfsUblkError, match=f"other users can change {home} "):
        check(tmp_path / "link" / ".." / "store")


def test_a_circle_ends(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(BtrfsUblkError, match="more than 40 symbolic links"):
        check(tmp_path / "a" / "store")


def test_an_access_list_counts(tmp_path: Path) -> None:
    """Its mask is in the place of the group, which is root's here."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o775)
    check(shared / "store")
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *x) for x in ACL_OF_OTHER)
    os.setxattr(shared, "system.posix_acl_access", acl)
    with pytest.raises(BtrfsUblkError, match=f"other users can change {shared} "):
        check(shared / "store")
