"""Bringing a volume up: directory, device, sprout, mount, files.

finish_up() is read from top to bottom: what it does is below it, in that order.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID

from btrfs_ublk import content
from btrfs_ublk.base.jsonfile import sync
from btrfs_ublk.base.ledger import boot_id
from btrfs_ublk.base.log import log, step
from btrfs_ublk.base.paths import StrPath
from btrfs_ublk.base.private_dirs import make_private, missing_directories
from btrfs_ublk.base.signals import deferred
from btrfs_ublk.base.undo import undoing
from btrfs_ublk.content.oci import Resolved
from btrfs_ublk.device import recover_device
from btrfs_ublk.device.locks import lock_file
from btrfs_ublk.errors import BtrfsUblkError, CommandError, LeftoverError, UsageError
from btrfs_ublk.kernel.btrfs import (
    check_transactions,
    commit_transaction,
    filesystem_uuid,
    subvolume_id,
)
from btrfs_ublk.kernel.loop import loop_device
from btrfs_ublk.kernel.mount import mounted, remount
from btrfs_ublk.kernel.read_ahead import get_read_ahead, set_read_ahead
from btrfs_ublk.kernel.temporary import remove_tree
from btrfs_ublk.units import KIB, exact_size
from btrfs_ublk.volume.definition import SETTINGS, VolumeDefinition
from btrfs_ublk.volume.device import (
    explain_devices,
    find_device,
    make_device,
    refuse_foreign_device,
    refuse_removed_directory,
)
from btrfs_ublk.volume.down import KeptLedger, take_down
from btrfs_ublk.volume.files import add_files, as_made, check_files
from btrfs_ublk.volume.forks import mount_overlays
from btrfs_ublk.volume.image import check_seed_of_image, map_image, refuse_another_image
from btrfs_ublk.volume.mounts import is_read_only, mount_points, seed_locked
from btrfs_ublk.volume.report import KeptVolume, look_at_volume
from btrfs_ublk.volume.resize import check_writable, grow_writable
from btrfs_ublk.volume.snapshots import (
    complete_rollback,
    plan_rollback,
    remove_half_snapshots,
    snapshots_locked,
)
from btrfs_ublk.volume.sprout import (
    apply_read_ahead,
    assert_mapping,
    make_writable_file,
    sprout,
)
from btrfs_ublk.volume.store import (
    Rollback,
    Session,
    VolumeDirectory,
    discard,
    open_or_make,
)
from btrfs_ublk.volume.trees import (
    add_listed,
    list_trees,
    remove_half_tree,
    remove_listed,
)

#: The files of a cache that has no contents (docs/cache.md).
_OF_NO_CONTENT = {"lock", "state", "limits", "limits.new"}
#: A server that is ending may still have the cache open for a moment.
_IN_USE_TIMEOUT_S = 2.0
#: Another command may be fetching an image's metadata, and ends if nothing comes.
_MAKING_TIMEOUT_S = 3600.0

if TYPE_CHECKING:
    from btrfs_ublk.volume.image_seed import FoundImage


def finish_up(
    volume: VolumeDirectory,
    definition: VolumeDefinition,
    image: Callable[[], FoundImage] | None,
    *,
    made: Callable[[], object] | None,
    resolved: Resolved | None,
    files: bool,
) -> KeptVolume:
    """Make, mount and fill the volume; ``image`` waits for the image that up_volume()
    has begun to find."""
    refuse_removed_directory(volume)
    with ExitStack() as held, ExitStack() as on_failure:
        listed = list_trees(volume, definition.trees)
        found = image() if image else None
        # Only now: the next command needs its definition, if there is no image.
        _discard_pending(volume)
        with deferred():
            lock, is_new = open_or_make(
                volume, definition, found.begin if found else None
            )
            held.enter_context(lock)
            if not is_new:
                found = None  # another command has made it meanwhile
            if found is None and volume.made().is_pending:
                raise BtrfsUblkError(
                    f"another command that made volume {volume.name!r} was "
                    "interrupted",
                    hint="try again",
                )
            if is_new:
                on_failure.push(undoing(lambda: _unmake(volume)))
        _refuse_changes(volume, definition)
        if _is_mounted(volume):
            _refuse_changes_while_up(volume, definition)
            _heal(volume)
            _change_read_ahead(volume, definition, on_failure)
        else:
            take_down(volume)  # what a killed command left
            on_failure.push(undoing(_undoing_cache(volume, definition)))
            on_failure.push(undoing(lambda: take_down(volume)))
            bring_up(volume, definition, found)
        target = volume.target_of(definition)
        if volume.made().image is not None:
            mount_overlays(target)
        else:
            remove_half_tree(volume, target)
            remove_half_snapshots(target)
        add_files(volume, target, definition.files, resolved=resolved)
        for tree, listing in listed:
            # Another command may have made it meanwhile.
            if tree.path not in {one.path for one in volume.made_trees()}:
                undo = partial(remove_listed, volume, target, tree.path)
                on_failure.push(undoing(undo))
                with step(f"make the {len(listing.files)} files of {tree.path}"):
                    add_listed(volume, target, tree, listing)
        limit_cache(volume, definition)
        # This cannot be undone, so it comes after all else that may fail.
        grow_writable(volume, definition.writable_bytes)
        kept = replace(definition, files=as_made(volume, definition.files))
        if not is_new or kept != definition:
            volume.write_definition(kept)
        with deferred():
            if made is not None:
                made()
            on_failure.pop_all()
    return look_at_volume(volume, most_files=None if files else 0)


def _discard_pending(volume: VolumeDirectory) -> None:
    """Remove a volume whose making was killed before the metadata of its image came. A
    command that is still making it is waited for."""
    if not volume.is_pending():
        return
    try:
        with step("wait for the command that makes the volume"):
            lock = volume.locked(timeout_s=_MAKING_TIMEOUT_S)
    except BtrfsUblkError:
        if os.path.lexists(volume.path):
            raise
        return  # That command has failed, and removed it.
    with lock:
        if os.path.lexists(volume.path) and volume.made().is_pending:
            _unmake(volume)


def _unmake(volume: VolumeDirectory) -> None:
    """Remove a half-made volume. When it cannot be taken down, its directory stays, as
    it is still needed.
    """
    take_down(volume)
    discard(volume)


def _refuse_changes(volume: VolumeDirectory, definition: VolumeDefinition) -> None:
    """Raise UsageError for a definition that cannot be met, before anything is done."""
    made = volume.made()
    refuse_another_image(volume, definition)
    if made.image is None and made.size_bytes != definition.size_bytes:
        raise UsageError(
            f"volume {volume.name!r} was made with virtual data of "
            f"{exact_size(made.size_bytes)}, not {exact_size(definition.size_bytes)}",
            hint="that stays: leave it so, or make another volume",
        )
    check_writable(volume, definition.writable_bytes)
    check_files(volume, definition.files)
    refuse_foreign_device(volume)


def _is_mounted(volume: VolumeDirectory) -> bool:
    """Whether it is mounted where the command that brought it up has mounted it."""
    fsid, session = volume.fsid(), volume.session()
    if fsid is None or session is None or not session.is_of_this_boot:
        return False
    return Path(session.target) in mount_points(fsid)


def _refuse_changes_while_up(
    volume: VolumeDirectory, definition: VolumeDefinition
) -> None:
    session = volume.session()
    assert session is not None
    hint = f"first: btrfs-ublk volume down {volume.name}"
    try:
        kept = volume.definition(files=False)
    except UsageError as error:
        raise UsageError(
            f"volume {volume.name!r} is up, but its stored definition is invalid: "
            f"{error.message}",
            hint=hint,
        ) from error
    targets = {"mount": (session.target, str(volume.target_of(definition)))}
    for key, setting in SETTINGS.items():
        values = (getattr(each, setting.name) for each in (kept, definition))
        if refusal := setting.refusal(*targets.get(key, values)):
            raise UsageError(f"volume {volume.name!r} {refusal}", hint=hint)


def _heal(volume: VolumeDirectory) -> None:
    """Recover the device of a mounted volume, and undo a remount by hand. Raises
    LeftoverError when that fails, CommandError where btrfs has made itself read-only
    after an error."""
    device = find_device(volume)
    if device is not None and device.is_well:
        if wrong := explain_devices(volume, device):
            raise LeftoverError(f"volume {volume.name!r} is up, but {wrong}")
    else:
        try:
            if device is None:
                raise BtrfsUblkError("its device does not exist any more")
            recover_device(volume.name)
        except BtrfsUblkError as error:
            raise LeftoverError(
                f"volume {volume.name!r} is mounted, but does not work: "
                f"{error.message}",
                hint=f"btrfs-ublk volume down {volume.name}, then up again",
            ) from error
    session = volume.session()
    assert session is not None
    target = Path(session.target)
    if is_read_only(target):
        remount(target, options=["rw"])
    try:
        check_transactions(target)
    except BtrfsUblkError as error:
        raise LeftoverError(
            f"volume {volume.name!r} is mounted, but {error.message}",
            hint=f"btrfs-ublk volume down {volume.name}, then up again",
        ) from error


def _change_read_ahead(
    volume: VolumeDirectory, definition: VolumeDefinition, on_failure: ExitStack
) -> None:
    """Change the read-ahead of a mounted volume."""
    target = volume.target_of(definition)
    before = get_read_ahead(target)
    with deferred():
        apply_read_ahead(target, definition.read_ahead_bytes)
        if get_read_ahead(target) != before:
            on_failure.push(undoing(lambda: set_read_ahead(target, before)))


def bring_up(
    volume: VolumeDirectory,
    definition: VolumeDefinition,
    image: FoundImage | None = None,
) -> None:
    """Bring up a volume that is completely down. ``image`` is what it has been made of
    just now."""
    target = volume.target_of(definition)
    volume.write_session(
        Session(
            boot_id=boot_id(),
            target=str(target),
            made_target=not target.exists(),
            directory=volume.identity(),
        )
    )
    _make_target(target, is_given=definition.mount is not None)
    _make_cache(volume, definition)
    with step("make its device"):
        device = make_device(volume, definition)
        map_image(volume, image.trace if image else ())
    if image is not None:
        image.complete(volume, device)
    if (rollback := volume.rollback()) is not None:
        with step(f"roll it back to {rollback.snapshot}"):
            _roll_back(volume, device, rollback)
    with step(f"mount it on {target}"):
        _mount(volume, device, target, definition)
    if image is not None:
        image.keep()
    found = find_device(volume)
    if found is not None and (wrong := explain_devices(volume, found)):
        log.warning("volume %s: %s", volume.name, wrong)  # only here can that be mended


def _make_target(target: Path, *, is_given: bool) -> None:
    if not is_given:
        for directory in (target.parent.parent, target.parent):
            make_private(directory, what="run directory", hint="name a mount point")
    try:
        # NB: exists() is false for dangling and circular links, lexists() is not.
        if os.path.lexists(target) and not target.is_dir():
            raise UsageError(
                f"mount point {target} is not a directory", hint="name a directory"
            )
        target.mkdir(exist_ok=True)
        if any(target.iterdir()):
            raise UsageError(
                f"mount point {target} is not empty: what is there would be hidden",
                hint="choose an empty directory, or one that is not there",
            )
    except OSError as error:
        missing = not target.parent.exists()
        raise UsageError(
            f"mount point {target}: {error.strerror}",
            hint=(
                f"its directory must be there: mkdir -p {target.parent}"
                if missing
                else None
            ),
        ) from error


def _make_cache(volume: VolumeDirectory, definition: VolumeDefinition) -> None:
    """Make the cache's directory, if missing, with its limit. An existing one, which
    others may use, gets it only when all else has succeeded. Raises BtrfsUblkError for
    a directory that is not this user's alone.
    """
    path = volume.cache_of(definition)
    is_new = not path.exists()
    make_private(path, what="cache", hint="name another directory as cache")
    if is_new:
        limit_cache(volume, definition)


def _undoing_cache(
    volume: VolumeDirectory, definition: VolumeDefinition
) -> Callable[[], None]:
    """Return a function that removes the directories which _make_cache() will make; it
    is called once the device is gone. A cache with contents, or in use, stays.
    """
    path = volume.cache_of(definition)
    missing = missing_directories(path)

    def undo() -> None:
        if not missing or not path.is_dir():
            return
        if _OF_NO_CONTENT.issuperset(each.name for each in path.iterdir()):
            lock = lock_file(path / "state", timeout_s=_IN_USE_TIMEOUT_S)
            if lock is not None:
                with lock:
                    remove_tree(path)
        for directory in missing[1:]:
            with suppress(OSError):  # it is not empty
                directory.rmdir()

    return undo


def limit_cache(volume: VolumeDirectory, definition: VolumeDefinition) -> None:
    """Set the cache's limit; without one, lift only that of the last definition."""
    path, max_bytes = volume.cache_of(definition), definition.cache_max_bytes
    if max_bytes is None:
        try:
            kept = volume.definition(files=False)
        except UsageError:
            return
        if kept.cache_max_bytes is None or volume.cache_of(kept) != path:
            return
    content.Cache(path).limit(max_bytes=max_bytes or 0, reserve_bytes=None)


@contextmanager
def _sprouted(
    volume: VolumeDirectory, device: Path, target: Path
) -> Iterator[KeptLedger]:
    """Make the sprout, once, and mount it. Its fsid is on record before its user sees
    it, and is the same each time. What a killed command left of one is lost.
    """
    made = volume.made()
    try:
        volume.sprout_image.unlink(missing_ok=True)
        make_writable_file(volume.sprout_image, made.writable_bytes)
        sync(volume.sprout_image)
    except OSError as error:
        raise BtrfsUblkError(
            f"cannot sprout in {volume.path}: {error.strerror}",
            hint="is its disk full, or read-only?",
        ) from error

    def validate(at: Path) -> None:
        if made.image is not None:
            check_seed_of_image(volume, at)
        else:
            assert_mapping(volume.seed(), at)

    def note(at: Path, fsid: UUID) -> None:
        commit_transaction(at)
        sync(volume.sprout_image)
        volume.write_made(replace(made, fsid=str(fsid)))

    with ExitStack() as stack:
        ledger = stack.enter_context(closing(KeptLedger(volume.ledgers)))
        with seed_locked(volume):
            stack.enter_context(
                sprout(
                    device,
                    target,
                    writable_file=volume.sprout_image,
                    validate=validate,
                    made=note,
                    lifeline=True,
                    read_ahead_bytes=None,
                    ledger=ledger,
                )
            )
        yield ledger


def _roll_back(volume: VolumeDirectory, device: Path, rollback: Rollback) -> None:
    """Complete a rollback, out of sight of others. An error causes a warning: the
    volume comes up without it."""
    volume.sprouting.mkdir(mode=0o700, exist_ok=True)
    with _mounted(volume, device, volume.sprouting):
        try:
            complete_rollback(volume, volume.sprouting, rollback)
        except (BtrfsUblkError, OSError) as error:
            log.warning("rollback to %s: %s", rollback.snapshot, error)
    volume.sprouting.rmdir()


def _mount(
    volume: VolumeDirectory, device: Path, target: Path, definition: VolumeDefinition
) -> None:
    way = _sprouted if volume.fsid() is None else _mounted
    with way(volume, device, target) as ledger:
        apply_read_ahead(target, definition.read_ahead_bytes)
        with deferred():
            ledger.leave()


@contextmanager
def _mounted(
    volume: VolumeDirectory, device: Path, target: Path
) -> Iterator[KeptLedger]:
    with ExitStack() as stack:
        ledger = stack.enter_context(closing(KeptLedger(volume.ledgers)))
        # The loop device ends with its mount, even when a mount namespace does.
        loop = stack.enter_context(
            loop_device(volume.sprout_image, lifeline=True, ledger=ledger)
        )
        try:
            with seed_locked(volume):
                mount = stack.enter_context(
                    mounted(
                        loop.path,
                        target,
                        # Btrfs finds both devices by these options only.
                        options=[f"device={device}", f"device={loop.path}"],
                        ledger=ledger,
                    )
                )
        except CommandError as error:
            _refuse_other_devices(volume.sprout_image)
            raise error
        fsid = filesystem_uuid(target)
        if fsid != volume.fsid():
            raise BtrfsUblkError(
                f"{volume.sprout_image} holds btrfs {fsid}, not {volume.fsid()}",
                hint="another program has changed it: restore it from a backup",
            )
        if is_read_only(target):
            # Linux 6.12 mounts a sprout read-only, even with "rw".
            mount.remount(options=["rw"])
        yield ledger


def _refuse_other_devices(image: Path) -> None:
    """Raise BtrfsUblkError where btrfs cannot be mounted because of devices that other
    programs have added or replaced (struct btrfs_super_block)."""
    with image.open("rb") as file:
        file.seek(64 * KIB)
        magic, devices = struct.unpack("<64x8s64xQ", file.read(144))
    if magic != b"_BHRfS_M":
        raise BtrfsUblkError(
            f"{image} holds no btrfs any more: btrfs replace has moved it",
            hint="replace it back, while the volume's device and that one are mounted",
        )
    if devices > 2:
        raise BtrfsUblkError(
            f"the btrfs in {image} has {devices} devices, and the volume knows 2",
            hint="attach the others, mount it by hand, and: btrfs device remove",
        )


def rollback_volume(name: str, snapshot: str, *, base: StrPath | None = None) -> str:
    """Have a volume that is up show what a snapshot has, which stays; it goes down for
    that, and up again. What it had before is kept as another snapshot, whose name this
    returns.

    Raises LeftoverError while the volume is in use, and names the users, UsageError,
    BtrfsUblkError. The volume is as it was then. If it cannot come up, or this is
    killed, that is so, or the next up_volume() completes the rollback.
    """
    with snapshots_locked(name, base) as (volume, mount), ExitStack() as on_failure:
        definition, rollback = volume.definition(), plan_rollback(mount, snapshot)
        take_down(volume)
        on_failure.push(undoing(lambda: take_down(volume)))
        volume.write_rollback(rollback)
        bring_up(volume, definition)
        limit_cache(volume, definition)
        on_failure.pop_all()
        if subvolume_id(mount) == rollback.before:
            raise BtrfsUblkError(
                f"volume {name!r} was not rolled back, and is up as it was"
            )
    return rollback.kept
