"""Taking down a volume, complete or not, and removing it for good; and ledgers of its
resources."""

from __future__ import annotations

import fcntl
from contextlib import ExitStack, suppress
from pathlib import Path

from btrfs_ublk.base.gc import collect
from btrfs_ublk.base.ledger import Ledger, Outcome, open_ledgers
from btrfs_ublk.base.log import log, step
from btrfs_ublk.base.paths import StrPath
from btrfs_ublk.base.signals import deferred
from btrfs_ublk.errors import BtrfsUblkError, LeftoverError

# NB: these know how to remove what ledgers list; gc would import all that do.
from btrfs_ublk.kernel import loop as _loop  # noqa: F401
from btrfs_ublk.kernel.mount import is_frozen, mounted
from btrfs_ublk.kernel.temporary import loops_below
from btrfs_ublk.volume.device import drop_device, find_device, refuse_removed_directory
from btrfs_ublk.volume.forks import FORKS_DIRECTORY, mount_overlays, unmount_overlays
from btrfs_ublk.volume.mounts import (
    forget,
    is_mounted,
    mount_points,
    mounts_of,
    seed_locked,
    wait_for_openers,
    wait_for_users,
    wait_for_users_elsewhere,
)
from btrfs_ublk.volume.store import (
    DamagedVolumeError,
    VolumeDirectory,
    discard,
    remove_halves,
    volume_directory,
)

#: Others, such as udev, may have a device open for a moment.
_OPEN_TIMEOUT_S = 2.0


class KeptLedger(Ledger):
    """A ledger whose resources can be kept: they stay until collect_kept() or the next
    boot. They also stay when the process dies before it calls leave().
    """

    def leave(self) -> None:
        """End the ledger; then the ``with`` blocks of its resources do nothing. It is
        unlocked explicitly, as a command that another thread starts has copies of all
        descriptors for a moment, which would keep the lock."""
        with self._lock:
            if self._fd >= 0:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
            self._forget()


def collect_kept(directory: Path) -> list[Outcome]:
    """Remove what the ledgers in a directory list, youngest first; return the outcomes.
    Raises LeftoverError for what could not be removed.

    NB: those of this process are among them, which a signal has kept from being closed.
    """
    closed = [
        outcome
        for ledger in open_ledgers(directory)
        for outcome in ledger.close(quietly=True)
        if outcome.result != "left"
    ]
    outcomes = closed + [
        outcome for report in collect(directory).ledgers for outcome in report.outcomes
    ]
    left = [outcome for outcome in outcomes if outcome.result == "left"]
    if left:
        # The others could not be removed because of the first.
        reason, _, hint = (left[0].reason or str(left[0].entry)).partition("\n  hint: ")
        raise LeftoverError(reason, hint=hint or None)
    return outcomes


def down_volume(name: str, *, base: StrPath | None = None) -> bool:
    """Unmount a volume and remove its device; its data stay. False when it was down.

    Also cleans up after a killed up_volume(). Raises LeftoverError while the volume is
    in use, and names the users. The volume is still up then, unless the error says that
    it is unmounted (a process opened its device meanwhile). Raises UsageError when
    there is no volume of that name.
    """
    volume = volume_directory(name, base)
    refuse_removed_directory(volume)
    volume.check()
    with volume.locked():
        was_up = is_anything_up(volume)
        volume.forget_copied()
        fsid = volume.fsid()
        if was_up or fsid is None or not is_mounted(fsid):
            take_down(volume)  # or what a killed command has left
    return was_up


def remove_volume(name: str, *, base: StrPath | None = None) -> None:
    """Remove a volume that is down, and all data that were written to it.

    Its own cache is removed too, but not a cache directory from its definition. Damaged
    volumes can be removed as well. What a killed command has left of others goes, too.
    Raises LeftoverError while it is up, UsageError when there is none of that name, or
    the directory is no volume.
    """
    volume = volume_directory(name, base)
    remove_halves(volume.path.parent)
    volume.check()
    with volume.locked():
        if may_be_up(volume):
            raise LeftoverError(
                f"volume {name!r} is up and was not removed",
                hint=f"first: btrfs-ublk volume down {name}",
            )
        # Half of it would be of no use, and would stay until the next `volume up`.
        with deferred():
            discard(volume)


def is_anything_up(volume: VolumeDirectory) -> bool:
    """Whether any part of it is, or may be, up: a killed command may have left one."""
    session = volume.session()
    fsid = volume.fsid()
    return (
        (session is not None and session.is_of_this_boot)
        or find_device(volume) is not None
        # Without a loop device, it is a copy, or the original of one, that is mounted.
        or (fsid is not None and is_mounted(fsid) and any(loops_below(volume.path)))
    )


def may_be_up(volume: VolumeDirectory) -> bool:
    """Like is_anything_up(), also for damaged volumes, by their devices and images."""
    try:
        return is_anything_up(volume)
    except DamagedVolumeError:
        return find_device(volume) is not None or any(loops_below(volume.path))


def take_down(volume: VolumeDirectory) -> None:
    """Take a locked volume down. Raises LeftoverError, which says if it is mounted."""
    volume.forget_copied()
    _refuse_if_used(volume)
    with deferred(), step(f"take volume {volume.name} down"):
        try:
            if (fsid := volume.fsid()) is not None:
                unmount_overlays(fsid)
            for outcome in collect_kept(volume.ledgers):
                if outcome.entry.kind == "loop" and "path" in outcome.entry.details:
                    forget(Path(outcome.entry.details["path"]))
            drop_device(volume)
        except LeftoverError as error:
            _mount_again(volume)
            raise _not_down(volume, error.message) from error
        with suppress(OSError):
            volume.sprouting.rmdir()
        session = volume.session()
        if session is not None:
            if session.made_target:
                with suppress(OSError):  # it is not empty
                    Path(session.target).rmdir()
            volume.forget_session()


def _mount_again(volume: VolumeDirectory) -> None:
    """Mount the overlays that went, if the volume is still mounted: it is up then."""
    fsid, session = volume.fsid(), volume.session()
    if fsid is None or session is None or volume.made().image is None:
        return
    if (target := Path(session.target)) in mount_points(fsid):
        try:
            mount_overlays(target)
        except (BtrfsUblkError, OSError) as error:  # its device may be dead
            log.warning("the forks of volume %s: %s", volume.name, error)


def _refuse_if_used(volume: VolumeDirectory) -> None:
    """Raise LeftoverError for a volume in use, before anything is undone."""
    fsid, session = volume.fsid(), volume.session()
    if fsid is None or not is_mounted(fsid):
        return
    ours = Path(session.target) if session is not None else None
    mounts = mounts_of(fsid)
    points = [mount.target for mount in mounts]
    if session is None and not any(loops_below(volume.path)):
        at = ", ".join(str(each) for each in points) or "in another mount namespace"
        raise LeftoverError(
            f"volume {volume.name!r} cannot come up: its file system is mounted already"
            f" ({at}), by its original or a copy of it",
            hint="take that one down first: both have the same fsid",
        )
    overlays = [
        mount.target
        for mount in mounts
        if mount.fs_type == "overlay"
        and ours is not None
        and mount.target.parent == ours / FORKS_DIRECTORY
    ]
    known = [
        *overlays,
        ours,
        volume.sprouting,
    ]  # the last of a rollback that was killed
    others = [str(each) for each in points if each not in known]
    if others:
        raise _not_down(volume, f"it is mounted at {', '.join(others)} as well")
    users = wait_for_users_elsewhere(fsid, timeout_s=_OPEN_TIMEOUT_S)
    if users:
        where = f"in another mount namespace {'as well' if points else 'only'}"
        raise _not_down(volume, f"it is mounted {where}: {'; '.join(users)}")
    if not points and ours is not None:
        points = _find_frozen(volume, ours)
    if points and is_frozen(points[0]):
        # An unmount would succeed, and leave it in use.
        raise LeftoverError(
            f"volume {volume.name!r} is still up: it is frozen",
            hint=f"fsfreeze --unfreeze {points[0]}, then: "
            f"btrfs-ublk volume down {volume.name}",
        )
    if not points:
        raise _not_down(
            volume,
            "it is mounted out of sight, as in another mount namespace, and no process "
            "that this one can see uses it",
        )
    if overlays and ours is not None:
        # Else the first ones would be unmounted, and the others not.
        if users := wait_for_users(ours, timeout_s=_OPEN_TIMEOUT_S):
            raise _not_down(volume, f"it is in use: {'; '.join(users)}")
    openers = wait_for_openers(fsid, timeout_s=_OPEN_TIMEOUT_S)
    if openers:
        raise _not_down(volume, f"its device is in use: {'; '.join(openers)}")


def _find_frozen(volume: VolumeDirectory, target: Path) -> list[Path]:
    """Mount a file system that was unmounted while it was frozen where it was, so that
    it can be unfrozen. Returns the mount point; [] if it is not frozen."""
    found = loops_below(volume.path)  # of its seed and trees, too
    loops = [path for path, file in found if file == volume.sprout_image]
    if not loops or not target.is_dir() or any(target.iterdir()):
        return []
    ledger = KeptLedger(volume.ledgers)
    try:
        with ExitStack() as stack:
            with seed_locked(volume):
                stack.enter_context(mounted(loops[0], target, ledger=ledger))
            with deferred():
                if is_frozen(target):
                    ledger.leave()
                    return [target]
    except (BtrfsUblkError, OSError) as error:
        log.debug("%s", error)
    finally:
        ledger.close()
    return []


def _not_down(volume: VolumeDirectory, why: str) -> LeftoverError:
    fsid = volume.fsid()
    is_up = fsid is not None and is_mounted(fsid)
    state = "still up" if is_up else "unmounted, but not down"
    return LeftoverError(
        f"volume {volume.name!r} is {state}: {why}",
        hint=f"end what uses it, then: btrfs-ublk volume down {volume.name}",
    )
