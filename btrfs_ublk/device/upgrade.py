"""Replace the server of a device while it is read: by a newer version, or to let the
device grow. NB: a server reads its description only when it starts, so a device grows
when the next server takes over.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from btrfs_ublk.base.helpers import SERVER, helper_path
from btrfs_ublk.base.process import run
from btrfs_ublk.device.lifecycle import checked_server, recover_device
from btrfs_ublk.device.locks import lock_file, registry_locked
from btrfs_ublk.device.report import Device, is_alive, show_device
from btrfs_ublk.device.state import (
    DEFAULT_TIMEOUT_S,
    DeviceDirectory,
    DeviceSpec,
    DeviceState,
    device_directory,
)
from btrfs_ublk.errors import BtrfsUblkError, CapabilityError, UsageError
from btrfs_ublk.kernel import blockdev
from btrfs_ublk.server.description import Description
from btrfs_ublk.server.features import kernel_features
from btrfs_ublk.supervision.client import have_replaced, wait_for_state

_CHECK_TIMEOUT_S = 30.0


def upgrade_device(
    name: str, *, server: Path | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
) -> Device:
    """Replace supervisor and server by those of this package, while others read.

    ``server`` is another program for the server. Raises BtrfsUblkError when the new
    one does not start; a server of the old program then runs.
    """
    directory = device_directory(name)
    directory.check()
    program = str(checked_server(server)) if server else None
    recover_device(name, timeout_s=timeout_s)
    spec = _next_generation(directory, server=program, python=sys.executable)
    error = _replace_server(directory, spec, timeout_s=timeout_s, python=sys.executable)
    if error is not None:
        raise BtrfsUblkError(
            f"device {name} was not upgraded: {error}",
            hint=f"the previous program goes on serving; see {directory.log}",
        )
    return show_device(name)


def update_device(
    name: str, description: Description, *, timeout_s: float = DEFAULT_TIMEOUT_S
) -> Device:
    """Let the device grow while others read: ``description`` extends the present one
    (Description.check_growth()).

    Raises UsageError for any other description, and for what a server refuses;
    CapabilityError when the kernel or the device's kind of recovery does not allow it;
    BtrfsUblkError when no server starts with it, or another command updates the device.
    Its message says whether the device has grown all the same.
    """
    directory = device_directory(name)
    directory.check()
    description = description.absolute()
    with _updating(directory, timeout_s=timeout_s):
        before = Description.from_json(directory.description.read_text())
        before.check_growth(description)
        recover_device(name, timeout_s=timeout_s)
        _require_growth(directory)
        _check(description)
        if description != before or not _has_grown(directory, description):
            _grow(directory, before, description, timeout_s=timeout_s)
    return show_device(name)


@contextmanager
def _updating(directory: DeviceDirectory, *, timeout_s: float) -> Iterator[None]:
    """Keep others from updating the device: its description must not change between the
    check and the end, when it may have to be restored. Raises BtrfsUblkError."""
    lock = lock_file(directory.update_lock, timeout_s=timeout_s)
    if lock is None:
        directory.check()  # it may be gone
        raise BtrfsUblkError(
            f"another command updates device {directory.name}",
            hint=f"wait for it, or see: fuser {directory.update_lock}",
        )
    with lock:
        yield


def _require_growth(directory: DeviceDirectory) -> None:
    spec, ready = directory.spec(), directory.state().ready
    recovery = ready.get("recovery", spec.recovery)
    if recovery == "none":
        raise CapabilityError(
            f"device {directory.name} has recovery {recovery!r}: its address space is "
            "fixed",
            hint="a device that grows is taken over by another server (recovery "
            "reissue, with ublk also queue or fail-io)",
        )
    if spec.front_end == "ublk":
        features = kernel_features()[0][0].features
        if not any(x.name == "update-size" and x.offered for x in features):
            raise CapabilityError(
                "this kernel's ublk driver cannot change a device's size",
                hint="that needs Linux 6.16; or use the front end fuse",
            )


def _has_grown(directory: DeviceDirectory, description: Description) -> bool:
    """Whether a server has the description: a command may have been killed when it had
    only written it, or have waited too long for one that failed."""
    device = directory.state().device
    return device is not None and blockdev.size_bytes(Path(device)) >= description.size


def _check(description: Description) -> None:
    """Raise UsageError, or CommandError, for what a server would refuse."""
    done = run(
        [helper_path(SERVER), "--check", "-"],
        input=description.to_json(),
        timeout_s=_CHECK_TIMEOUT_S,
        ok_statuses=[0, UsageError.exit_status],
    )
    if done.returncode:
        raise UsageError(f"the new description is refused:\n{done.stderr.rstrip()}")


def _grow(
    directory: DeviceDirectory,
    before: Description,
    after: Description,
    *,
    timeout_s: float,
) -> None:
    directory.write_description(after.to_json())
    spec = _next_generation(directory, size_bytes=after.size)
    error = _replace_server(directory, spec, timeout_s=timeout_s)
    if error is None:
        return
    device = directory.state().device
    if device is not None and blockdev.size_bytes(Path(device)) > before.size:
        raise BtrfsUblkError(
            f"device {directory.name} has grown, but its server failed: {error}",
            hint=f"its supervisor goes on trying; see {directory.log}",
        )
    # The device has not grown, so nobody can have read what is new.
    directory.write_description(before.to_json())
    spec = _next_generation(directory, size_bytes=before.size)
    again = _replace_server(directory, spec, timeout_s=timeout_s)
    raise BtrfsUblkError(
        f"device {directory.name} was not made larger: {error}"
        + (
            f"; after that, another server failed, too: {again}"
            if again is not None
            else ""
        ),
        hint=f"see {directory.log}",
    )


def _next_generation(directory: DeviceDirectory, **changes: Any) -> DeviceSpec:
    """Write a new spec, and return it; nobody reads it yet."""
    with registry_locked(directory.path.parent):
        old = directory.spec()
        spec = replace(old, generation=old.generation + 1, **changes)
        directory.write_spec(spec)
    return spec


def _replace_server(
    directory: DeviceDirectory,
    spec: DeviceSpec,
    *,
    timeout_s: float,
    python: str | None = None,
) -> str | None:
    """Have the supervisor replace the server. Returns None, or why it failed.
    ``python`` replaces the supervisor's program. Raises BtrfsUblkError."""
    have_replaced(directory, python=python)

    def is_tried(state: DeviceState) -> bool:
        return state.generation >= spec.generation or not is_alive(state.supervisor)

    state = wait_for_state(directory, is_tried, timeout_s=timeout_s)
    if state is not None and state.generation < spec.generation:
        # The supervisor died before that, so the next one does it.
        recover_device(directory.name, timeout_s=timeout_s)
        state = wait_for_state(directory, is_tried, timeout_s=timeout_s)
    if state is None:
        raise BtrfsUblkError(
            f"the server of device {directory.name} was not replaced within "
            f"{timeout_s:g} s",
            hint=f"see {directory.log}",
        )
    return state.upgrade_error
