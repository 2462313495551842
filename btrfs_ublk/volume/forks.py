"""Forks: writable root file systems in a mounted volume, each of one subvolume, its
layer (docs/design/images.md).

    MOUNT/forks/NAME       a snapshot of the layer; or where an overlay is mounted
    MOUNT/overlays/NAME    what an overlay holds, and what it is made of
    MOUNT/templates/LAYER  what a new overlay of that layer holds
    MOUNT/commits          subvolumes while a command works; empty otherwise

Nothing here looks at all forks but what lists them, so that the thousandth fork takes
as long as the first.

Functions here get the mount point of the volume's file system, and lock nothing.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import UUID

from btrfs_ublk.base.log import log
from btrfs_ublk.base.records import dataclass
from btrfs_ublk.base.signals import deferred
from btrfs_ublk.base.undo import undoing
from btrfs_ublk.errors import BtrfsUblkError, CapabilityError, LeftoverError, UsageError
from btrfs_ublk.kernel.attributes import NO_COW, remove_acls, remove_attributes
from btrfs_ublk.kernel.btrfs import (
    charged_bytes,
    charges,
    commit_transaction,
    create_deep_snapshot,
    create_snapshot,
    delete_subvolumes,
    enable_simple_quota,
    filesystem_uuid,
    is_subvolume,
    quota_limit,
    set_read_only,
    subvolume_id,
    subvolume_uuids,
)
from btrfs_ublk.kernel.mount import mount_now, unmount_now
from btrfs_ublk.kernel.mountinfo import MountInfo, texts_elsewhere
from btrfs_ublk.kernel.users import pids_using
from btrfs_ublk.units import exact_size
from btrfs_ublk.volume.definition import DEFAULT_FORK_MODE, ForkMode
from btrfs_ublk.volume.mounts import mounts_of, overlay_source, wait_for_users_elsewhere

LAYERS_DIRECTORY = "layers"
FORKS_DIRECTORY = "forks"
OVERLAYS_DIRECTORY = "overlays"
TEMPLATES_DIRECTORY = "templates"
COMMITS_DIRECTORY = "commits"
#: What is in these is deleted and mounted over, so no image may bring them.
OUR_DIRECTORIES = (
    FORKS_DIRECTORY,
    OVERLAYS_DIRECTORY,
    TEMPLATES_DIRECTORY,
    COMMITS_DIRECTORY,
)
#: In the subvolume of an overlay: its directories, and a link to its layer.
OVERLAY = ".btrfs-ublk-overlay"
UPPER = "upper"
WORK = "work"
LAYER = "layer"
PADDING = ".btrfs-ublk-padding"
#: A leaf has 16 KiB, and is merged with its neighbour where less than a third is used.
_PADS, _PAD_BYTES = 4, 7 << 10
#: When there are so many, a template is made light, by so much with each overlay. An
#: attribute tells it.
MANY_OVERLAYS, _REMOVED_AT_ONCE = 32, 200
LIGHT, _LIGHT_DONE = "user.btrfs-ublk.light", b"done"
_FILLER, _FILLER_BYTES = "user.btrfs-ublk.filler", 6 << 10
#: Btrfs needs a few tree blocks before anything can be written.
MIN_QUOTA_BYTES = 1 << 20
#: Then the upper directory has whole files, under their own names.
OVERLAY_OPTIONS = ("index=off", "metacopy=off", "redirect_dir=off")
#: The time for processes that make a mount namespace to leave the copied mounts.
_USED_TIMEOUT_S = 2.0
#: Options are one text, in which these have a meaning.
_SPECIAL = ",:\\"
#: What lists of mounts show as it is.
_PLAIN = re.compile(r"[\w.-]*", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Fork:
    """A fork. ``layer`` is the subvolume that it was made of, None when that is not
    known. ``is_mounted`` is false for an overlay that is not mounted. ``used_bytes`` is
    what it is charged for, None without quotas; ``quota_bytes`` is its limit."""

    name: str
    mode: ForkMode
    path: Path
    layer: Path | None
    is_mounted: bool
    used_bytes: int | None
    quota_bytes: int | None

    def to_dict(self) -> dict[str, Any]:
        return vars(self) | {
            "path": str(self.path),
            "layer": self.layer.name if self.layer else None,
        }


def make_fork(
    mount: Path,
    name: str,
    layer: Path,
    *,
    mode: ForkMode = DEFAULT_FORK_MODE,
    quota_bytes: int | None = None,
) -> Path:
    """Make a fork of the subvolume ``layer``; return its path. Raises UsageError for a
    name that cannot be, or is taken, CapabilityError for a quota where there can be
    none, and BtrfsUblkError. Nothing of the fork is left then; but quotas that were
    enabled for it stay so, as others may have come to rely on them."""
    path, _ = find_place(mount, name, is_overlay=mode == "overlay")
    if quota_bytes is not None:
        _prepare_quota(mount, quota_bytes)
    if mode == "overlay":
        return _make_overlay(mount, name, _template_of(mount, layer), quota_bytes)
    make_directory(path.parent, 0o755)
    return create_snapshot(layer, path.parent, name, quota_bytes=quota_bytes)


def copy_fork(
    mount: Path, name: str, source: str, *, quota_bytes: int | None = None
) -> Path:
    """Make a fork that is what the fork ``source`` is at this moment, in its mode and
    with its quota, unless another one is given; return its path. Raises what
    make_fork() raises, and UsageError when there is no such fork."""
    fork = find_fork(mount, source)
    path, own = find_place(mount, name, is_overlay=fork.mode == "overlay")
    if quota_bytes is not None:
        _prepare_quota(mount, quota_bytes)
    else:
        quota_bytes = fork.quota_bytes
    if fork.mode == "overlay":
        return _make_overlay(mount, name, own.with_name(source), quota_bytes)
    half = without_lefts(mount) / os.urandom(8).hex()
    with ExitStack() as on_failure:
        on_failure.push(undoing(lambda: _delete_snapshot(half, own)))
        if fork.layer is not None:
            # It would not be known when the other fork has gone.
            make_directory(own.parent, 0o700)
            own.symlink_to(os.path.relpath(fork.layer, own.parent))
        # Those of its subvolumes are made one by one.
        create_deep_snapshot(fork.path, half.parent, half.name, quota_bytes=quota_bytes)
        os.rename(half, path)
        on_failure.pop_all()
    return path


def _delete_snapshot(path: Path, own: Path) -> None:
    if is_subvolume(path):
        delete_subvolumes(path)
    _discard(own)


def without_lefts(mount: Path) -> Path:
    """Return the directory of subvolumes that last as long as a command, which then has
    none of commands that have died: those that nobody has locked. The caller has locked
    the volume."""
    commits = mount / COMMITS_DIRECTORY
    make_directory(commits, 0o700)
    for left in commits.iterdir():
        with suppress(OSError):
            fd = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                delete_or_warn(left)
            finally:
                os.close(fd)
    return commits


def delete_or_warn(path: Path) -> None:
    """Delete a subvolume; the next command tries again where that fails."""
    try:
        delete_subvolumes(path)
    except BtrfsUblkError as error:
        log.warning("%s", error)


def _template_of(mount: Path, layer: Path) -> Path:
    """Return a subvolume with all that a new overlay of a layer has, which is made if
    it is not there. A snapshot of it is whole at once, and on disk."""
    path = mount / TEMPLATES_DIRECTORY / layer.name
    if _is_half_made(path) or os.path.lexists(path / PADDING):
        delete_subvolumes(path)
    if not is_subvolume(path):
        make_directory(path.parent, 0o700)
        with ExitStack() as on_failure:
            on_failure.push(undoing(lambda: delete_subvolumes(path)))
            create_snapshot(layer, path.parent, path.name)
            try:
                with _leaf_of_its_own(path):
                    own = path / OVERLAY
                    furnish_overlay(path, layer, os.path.relpath(layer, own))
                    os.setxattr(own, _FILLER, bytes(_FILLER_BYTES))
            except OSError as error:
                raise BtrfsUblkError(
                    f"cannot make {path / OVERLAY}: {error.strerror}"
                ) from error
            on_failure.pop_all()
    if (
        _lightness(path) != _LIGHT_DONE
        and len(_names(mount / OVERLAYS_DIRECTORY)) >= MANY_OVERLAYS
    ):
        _lighten(path)
    return path


def _lightness(own: Path) -> bytes | None:
    try:
        return os.getxattr(own / OVERLAY, LIGHT)
    except OSError:
        return None


def is_light(own: Path) -> bool:
    """Whether what an overlay's subvolume shows besides the overlay is not its layer's
    tree any more."""
    return _lightness(own) is not None


def _lighten(template: Path) -> None:
    """Remove a part of the layer's tree from a template, which is never shown. A
    snapshot adds a reference to each leaf of the tree, and these take longer with each
    fork. The inode numbers stay taken, as those of the overlay are above them."""
    os.setxattr(template / OVERLAY, LIGHT, b"")
    left, opened = _REMOVED_AT_ONCE, [(os.fspath(template), os.scandir(template))]
    while opened and left:
        directory, entries = opened[-1]
        entry = next(entries, None)
        with suppress(OSError):  # it stays
            if entry is None:
                opened.pop()
                if opened:
                    left -= 1
                    os.rmdir(directory)
            elif entry.is_dir(follow_symlinks=False):
                if entry.name != OVERLAY or len(opened) > 1:
                    opened.append((entry.path, os.scandir(entry.path)))
            else:
                left -= 1
                os.unlink(entry.path)
    for _, entries in opened:
        entries.close()
    if not opened:
        os.setxattr(template / OVERLAY, LIGHT, _LIGHT_DONE)


@contextmanager
def _leaf_of_its_own(subvolume: Path) -> Iterator[None]:
    """Have what is made in the block lie in another leaf of the subvolume's tree than
    what is there. NB: who writes to a leaf for the first time adds a reference to each
    extent of data in it, and these take longer with each fork of the layer."""
    padding = subvolume / PADDING
    with open(padding, "xb") as file:
        for number in range(_PADS):
            os.setxattr(file.fileno(), f"user.{number}", bytes(_PAD_BYTES))
    yield
    os.unlink(padding)  # and its leaves go; those that are a third full stay


def _make_overlay(
    mount: Path, name: str, source: Path, quota_bytes: int | None
) -> Path:
    own = mount / OVERLAYS_DIRECTORY / name
    make_directory(own.parent, 0o700)
    make_directory(mount / FORKS_DIRECTORY, 0o755)
    with ExitStack() as on_failure:
        on_failure.push(undoing(lambda: _discard(own)))
        create_snapshot(source, own.parent, name, quota_bytes=quota_bytes)
        _mount_overlay(mount, name)
        on_failure.pop_all()
    return mount / FORKS_DIRECTORY / name


def find_place(mount: Path, name: str, *, is_overlay: bool) -> tuple[Path, Path]:
    """Return where a new fork of this name is, and where what is written to it is, if
    it is an overlay. Raises UsageError when that cannot be."""
    if not _is_name(name):
        raise UsageError(f"{name!r} cannot be the name of a fork")
    _refuse_links(mount)
    path, own = mount / FORKS_DIRECTORY / name, mount / OVERLAYS_DIRECTORY / name
    if _is_half_made(own) or (own.is_symlink() and not os.path.lexists(path)):
        _discard(own)
    for one in (path, own):
        if os.path.lexists(one):
            hint = "choose another name"
            if is_subvolume(own) and not os.path.ismount(path):
                hint += "; `btrfs-ublk volume up` of its volume mounts it again"
            raise UsageError(f"there is {one} already", hint=hint)
    if is_overlay and any(character in _SPECIAL for character in str(path)):
        raise UsageError(
            f"no overlay can be at {path}: its options cannot have a comma, a colon or "
            "a backslash in paths",
            hint="choose another name, or mount point; or make a snapshot",
        )
    return path, own


def _is_name(name: str) -> bool:
    bad = not name or "/" in name or name in (".", "..")
    return not bad and len(os.fsencode(name)) <= 255


def adopt_fork(mount: Path, name: str, subvolume: Path, layer: Path) -> Path:
    """Make a fork of a subvolume that another volume's fork was copied to; return its
    path. Raises UsageError for a name that is taken, or when the subvolume has an
    overlay that none of our programs made, and BtrfsUblkError."""
    mode = _mode_of(subvolume, layer)
    path, own = find_place(mount, name, is_overlay=mode == "overlay")
    make_directory(path.parent, 0o755)
    if mode == "overlay":
        make_directory(own.parent, 0o700)
    with ExitStack() as on_failure:
        place = path if mode == "snapshot" else own
        on_failure.push(undoing(lambda: _discard(place)))
        try:
            set_read_only(subvolume, False)
            os.rename(subvolume, place)
        except OSError as error:
            raise BtrfsUblkError(f"cannot make {path}: {error.strerror}") from error
        commit_transaction(place)
        if mode == "overlay":
            _mount_overlay(mount, name)
        on_failure.pop_all()
    return path


def _mode_of(subvolume: Path, layer: Path) -> ForkMode:
    """Return the mode of the fork that a subvolume is a copy of. What is mounted of an
    overlay is looked at, as nobody knows who has made it."""
    top = subvolume / OVERLAY
    if not os.path.lexists(top):
        return "snapshot"
    link = top / LAYER
    # Where it is now does not matter: an overlay is as deep as this.
    expected = f"../../../{LAYERS_DIRECTORY}/{layer.name}"
    if (
        any(not _is_directory(x) for x in (top, top / UPPER, top / WORK))
        or not link.is_symlink()
        or os.readlink(link) != expected
    ):
        raise UsageError(
            f"what {OVERLAY} has is not what an overlay of this layer has",
            hint="it was not made by `image commit --delta`: do not trust it",
        )
    return "overlay"


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _refuse_links(mount: Path) -> None:
    for name in OUR_DIRECTORIES:
        _refuse_link(mount / name)


def _refuse_link(path: Path) -> None:
    if path.is_symlink():
        raise BtrfsUblkError(
            f"{path} is a symbolic link to {os.readlink(path)}, and not followed",
            hint="a directory of ours belongs there: remove the link",
        )


def make_directory(path: Path, mode: int) -> None:
    """Make a directory, unless it is there. Raises BtrfsUblkError, also for a symbolic
    link to one."""
    _refuse_link(path)
    try:
        path.mkdir(mode=mode, exist_ok=True)
    except OSError as error:
        raise BtrfsUblkError(f"cannot make {path}: {error.strerror}") from error


def _prepare_quota(mount: Path, quota_bytes: int) -> None:
    if quota_bytes < MIN_QUOTA_BYTES:
        raise UsageError(
            f"a quota of {exact_size(quota_bytes)} is too small",
            hint=f"it is {exact_size(MIN_QUOTA_BYTES)} at least, as metadata count",
        )
    try:
        enable_simple_quota(mount)
    except BtrfsUblkError as error:
        raise CapabilityError(
            f"no fork can have a quota: {error.message}",
            hint=(
                error.hint
                if error.__cause__ is None
                else "simple quotas take Linux 6.7; without them, leave the quota out"
            ),
        ) from error


def furnish_overlay(own: Path, layer: Path, link: Path | str) -> None:
    """Make the directories of an overlay of ``layer`` in the subvolume ``own``. The
    link to the layer, which says ``link``, makes it whole. Raises OSError."""
    top = own / OVERLAY
    top.mkdir(mode=0o700)
    # NB: it is inherited. Copies of files with checksums would not be clones then.
    remove_attributes(top, NO_COW)
    # So is the layer's default ACL, as an ACL that would grant access to the top.
    remove_acls(top)
    status = layer.stat()
    for each in (UPPER, WORK):
        (top / each).mkdir(mode=0o700)
    # The upper directory is what the overlay shows as its top.
    os.chown(top / UPPER, status.st_uid, status.st_gid)
    os.chmod(top / UPPER, stat.S_IMODE(status.st_mode))
    for attribute in os.listxattr(layer):
        os.setxattr(top / UPPER, attribute, os.getxattr(layer, attribute))
    os.utime(top / UPPER, ns=(status.st_atime_ns, status.st_mtime_ns))
    (top / LAYER).symlink_to(link)


def _is_half_made(own: Path) -> bool:
    return is_subvolume(own) and not (own / OVERLAY / LAYER).is_symlink()


def _is_mounted(path: Path) -> bool:
    """Whether a directory of the top level, which is no subvolume, is mounted over."""
    try:
        return os.lstat(path).st_dev != os.lstat(path.parent).st_dev
    except FileNotFoundError:
        return False


def _discard(own: Path) -> None:
    path = own.parent.parent / FORKS_DIRECTORY / own.name
    # A signal comes when mount(2) has ended.
    if own != path and is_subvolume(own) and _is_mounted(path):
        _unmount(path)
    # NB: first, as nobody would find it without the other.
    with suppress(OSError):  # it is no empty directory
        path.rmdir()
    if is_subvolume(own):
        delete_subvolumes(own)
    elif own.is_symlink():
        own.unlink()


def upper_of(mount: Path, name: str) -> Path:
    """Return the directory that takes what is written to an overlay."""
    return mount / OVERLAYS_DIRECTORY / name / OVERLAY / UPPER


def _mount_overlay(mount: Path, name: str) -> None:
    path, top = mount / FORKS_DIRECTORY / name, upper_of(mount, name).parent
    make_directory(path, 0o755)
    directories = {"lowerdir": LAYER, "upperdir": UPPER, "workdir": WORK}
    options = [f"{key}={top / each}" for key, each in directories.items()]
    try:
        mount_now(
            overlay_source(filesystem_uuid(mount)),
            path,
            "overlay",
            options=[*options, *OVERLAY_OPTIONS],
        )
    except OSError as error:
        raise BtrfsUblkError(
            f"cannot mount fork {name!r}: {error.strerror}",
            hint=(
                "the kernel lacks overlayfs: modprobe overlay, or make a snapshot"
                if error.errno == errno.ENODEV
                else "see the kernel log: dmesg | grep overlayfs"
            ),
        ) from error


def mount_overlays(mount: Path) -> None:
    """Mount all overlays that are not mounted, and remove what is half-made, with a
    warning. An overlay that cannot be mounted causes a warning, too. Raises
    BtrfsUblkError."""
    _refuse_links(mount)
    for name in _names(mount / OVERLAYS_DIRECTORY):
        own = mount / OVERLAYS_DIRECTORY / name
        try:
            if _is_half_made(own):
                _discard(own)
                log.warning(
                    "removed fork %s, which a command left half made, or half removed",
                    name,
                )
            elif is_subvolume(own) and not _is_mounted(mount / FORKS_DIRECTORY / name):
                _mount_overlay(mount, name)
        except BtrfsUblkError as error:
            log.warning("%s", error)


def unmount_overlays(fsid: UUID) -> None:
    """Unmount all overlays of a volume's file system. Raises LeftoverError."""
    for one in reversed(mounts_of(fsid, fs_type="overlay")):
        _unmount(one.target)


def _unmount(target: Path) -> None:
    try:
        unmount_now(target)
    except OSError as error:
        users = "; ".join(pids_using(target).values())
        raise LeftoverError(
            f"{target} is still mounted: {users or error.strerror}",
            hint=f"end what uses it, or: umount {target}",
        ) from error


def _names(directory: Path) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except FileNotFoundError:
        return []


def list_forks(mount: Path) -> list[Fork]:
    """Return the forks by name."""
    _refuse_links(mount)
    quotas: dict[int, tuple[int, int | None]] = {}
    with suppress(BtrfsUblkError):  # there are no quotas
        quotas = charges(mount)
    layers = _layers(mount)
    names = {*_names(mount / OVERLAYS_DIRECTORY), *_names(mount / FORKS_DIRECTORY)}
    found = (
        _look(mount, name, layers, lambda own: quotas and quotas[subvolume_id(own)])
        for name in sorted(names)
    )
    return [each for each in found if each is not None]


def _layers(mount: Path) -> dict[UUID, Path]:
    return {
        subvolume_uuids(path)[0]: path
        for name in _names(mount / LAYERS_DIRECTORY)
        if is_subvolume(path := mount / LAYERS_DIRECTORY / name)
    }


def _look(
    mount: Path, name: str, layers: Mapping[UUID, Path], quota_of: Callable[[Path], Any]
) -> Fork | None:
    """Return the fork of a name, None when there is none."""
    own, path = mount / OVERLAYS_DIRECTORY / name, mount / FORKS_DIRECTORY / name
    mode: ForkMode = "overlay" if is_subvolume(own) else "snapshot"
    link = own / OVERLAY / LAYER if mode == "overlay" else own
    layer = None
    with suppress(OSError):  # it is half-made, or no copy of a fork
        layer = Path(os.path.normpath(link.parent / os.readlink(link)))
    if mode == "snapshot":
        if not is_subvolume(own := path):
            return None
        layer = layer or layers.get(subvolume_uuids(path)[1] or UUID(int=0))
    elif layer is None:
        return None
    quota = None
    with suppress(BtrfsUblkError, KeyError):  # there are no quotas
        quota = quota_of(own)
    used_bytes, quota_bytes = quota or (None, None)
    return Fork(
        name=name,
        mode=mode,
        path=path,
        layer=layer,
        is_mounted=mode == "snapshot" or _is_mounted(path),
        used_bytes=used_bytes,
        quota_bytes=quota_bytes,
    )


def _quota_of(own: Path) -> tuple[int, int | None]:
    number = subvolume_id(own)
    return charged_bytes(own, number), quota_limit(own, number)


def look_up_fork(mount: Path, name: str) -> Fork | None:
    """Return one of the forks, None when there is none of that name."""
    _refuse_links(mount)
    if not _is_name(name):
        return None
    return _look(mount, name, _layers(mount), _quota_of)


def find_fork(mount: Path, name: str) -> Fork:
    """Return one of the forks. Raises UsageError when there is none of that name."""
    if (found := look_up_fork(mount, name)) is not None:
        return found
    names = ", ".join(each.name for each in list_forks(mount))
    raise UsageError(
        f"there is no fork {name!r} in {mount}", hint=f"there are: {names or 'none'}"
    )


def remove_fork(mount: Path, name: str) -> None:
    """Remove a fork with what was written to it, for good. Raises UsageError when there
    is none of that name, LeftoverError while it is in use."""
    fork = find_fork(mount, name)
    hint = "end what uses it, and try again"
    if users := _users_of(fork, mount):
        raise LeftoverError(
            f"fork {name!r} is in use, and was not removed: {'; '.join(users)}",
            hint=hint,
        )
    own = mount / OVERLAYS_DIRECTORY / name
    with deferred():  # half of it would be of no use
        if fork.mode == "snapshot":
            _delete_snapshot(fork.path, own)
        else:
            if fork.is_mounted:
                try:
                    _unmount(fork.path)
                except LeftoverError as error:
                    raise LeftoverError(
                        f"fork {name!r} was not removed: {error.message}", hint=hint
                    ) from error
            # From here on it is half-made, and the next command goes on with it.
            (own / OVERLAY / LAYER).unlink(missing_ok=True)
            _discard(own)
    # Otherwise it would be there again after a power cut.
    commit_transaction(mount)


def _users_of(fork: Fork, mount: Path) -> list[str]:
    """Describe, for people, who uses a fork. The kernel knows who uses a mount of an
    overlay, and this looks only for its other mounts."""
    users = []
    if fork.mode == "snapshot":
        users = list(pids_using(fork.path).values())
        plain = _PLAIN.match(fork.name)
        mark = f" /{FORKS_DIRECTORY}/{plain[0] if plain else ''}"
    elif fork.is_mounted:
        number = fork.path.stat().st_dev
        mark = f" {os.major(number)}:{os.minor(number)} "
    else:
        return []
    # With many forks, parsing all mounts of all namespaces takes long.
    here = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    if here.count(mark) > (fork.mode == "overlay") or any(
        mark in text for _, text in texts_elsewhere()
    ):
        users += _other_mounts(fork, mount)
    return users


def _other_mounts(fork: Fork, mount: Path) -> list[str]:
    fsid = filesystem_uuid(mount)
    here = mounts_of(fsid)
    tops = [each.root for each in here if each.target == mount]
    place = Path(*tops[:1]) / fork.path.relative_to(mount)
    devices = {each.device for each in here if each.target == fork.path}

    def is_of_fork(one: MountInfo) -> bool:
        if fork.mode == "overlay":
            return one.device in devices
        return one.fs_type == "btrfs" and one.root.is_relative_to(place)

    return [
        *(
            f"it is mounted at {each.target} as well"
            for each in here
            if is_of_fork(each) and each.target != fork.path
        ),
        *wait_for_users_elsewhere(fsid, is_of_fork, timeout_s=_USED_TIMEOUT_S),
    ]
