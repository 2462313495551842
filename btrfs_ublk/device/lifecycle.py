"""Add, remove, recover and supervise devices."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from btrfs_ublk.base.helpers import SERVER, check_helper, helper_path
from btrfs_ublk.base.log import log
from btrfs_ublk.base.paths import OptionalPath
from btrfs_ublk.base.process import (
    ProcessIdentity,
    RunningServer,
    continue_process,
    is_stopped,
    run,
)
from btrfs_ublk.base.records import dataclass
from btrfs_ublk.base.signals import deferred
from btrfs_ublk.base.undo import undoing
from btrfs_ublk.device import control
from btrfs_ublk.device.front_end import DeviceFrontEnd
from btrfs_ublk.device.front_ends import front_end_of
from btrfs_ublk.device.locks import Lock, holder_of, lock_file, registry_locked
from btrfs_ublk.device.report import (
    ANSWER_TIMEOUT_S,
    Device,
    is_alive,
    look_at,
    users_of,
)
from btrfs_ublk.device.state import (
    DEFAULT_HANG_TIMEOUT_S,
    DEFAULT_TIMEOUT_S,
    FORMER_RECOVERY,
    DeviceDirectory,
    DeviceSpec,
    DeviceState,
    RecoveryName,
    check_name,
    device_directory,
    devices_directory,
    half_path,
)
from btrfs_ublk.errors import BtrfsUblkError, LeftoverError, UsageError
from btrfs_ublk.kernel.temporary import remove_tree
from btrfs_ublk.server.control import ControlError, InUseError
from btrfs_ublk.server.front_ends import choose_front_end
from btrfs_ublk.server.names import FrontEndName
from btrfs_ublk.supervision.client import (
    detach_supervisor,
    have_daemon_supervise,
    take_lock,
    wait_for_state,
    wait_until_serving,
)
from btrfs_ublk.supervision.keeper import end_keepers

if TYPE_CHECKING:
    from btrfs_ublk.server.description import Description

_VERSION_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """How to serve a device. None leaves the choice to the server.

    ``features`` are as for BlockServer. ``device_id`` is N of /dev/ublkbN. A server
    that does not answer for ``hang_timeout_s`` seconds is replaced (0: never).
    ``server`` is a program to use instead of the package's.
    """

    front_end: FrontEndName = "auto"
    recovery: RecoveryName = "auto"
    queues: int | None = None
    depth: int | None = None
    max_io_bytes: int | None = None
    features: Sequence[str] = ()
    device_id: int | None = None
    hang_timeout_s: float = DEFAULT_HANG_TIMEOUT_S
    server: OptionalPath = OptionalPath()


DEFAULT_OPTIONS = DeviceOptions()


def add_device(
    name: str,
    description: Description,
    options: DeviceOptions = DEFAULT_OPTIONS,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    made: Callable[[], object] | None = None,
) -> Device:
    """Make a device that outlives this process; it answers reads when this returns.

    ``made`` is called, with signals deferred, as soon as the device will not be removed
    any more: a command that is interrupted later must not say that it made nothing.

    Raises UsageError when there is a device of that name, or for what a server refuses;
    CapabilityError; BtrfsUblkError. Then nothing is left, or a note says what is.
    """
    spec = _spec(name, description, options)
    with ExitStack() as on_failure:
        with deferred():
            directory, lock = _make(spec, description)
            on_failure.push(undoing(lambda: _undo(directory)))
            with lock:
                supervisor = have_daemon_supervise(
                    directory.path, lock.fileno(), spec.python
                )
        try:
            wait_until_serving(
                directory, supervisor, timeout_s=timeout_s, is_to_stay=False
            )
        except BtrfsUblkError:
            if spec.server is None:
                check_helper(SERVER)  # It says what to install if a library is missing.
            raise
        with deferred():
            if made is not None:
                made()
            on_failure.pop_all()
    return look_at(directory)


def have_device(
    name: str,
    description: Description,
    options: DeviceOptions = DEFAULT_OPTIONS,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    made: Callable[[], object] | None = None,
) -> Device:
    """Do as add_device() when there is no such device, else as recover_device(). A
    device that is there must have this description, or have grown out of it."""
    directory = device_directory(name)
    if not os.path.lexists(directory.path):
        return add_device(name, description, options, timeout_s=timeout_s, made=made)
    directory.check()
    _check_same(directory, description)
    recover_device(name, timeout_s=timeout_s)
    return look_at(directory)


def _spec(name: str, description: Description, options: DeviceOptions) -> DeviceSpec:
    """Make a spec, and check it as far as possible before anything is made."""
    check_name(name)
    if os.path.lexists(devices_directory() / name):
        raise _exists(name)
    number, server = options.device_id, options.server
    if server is None:
        helper_path(SERVER)  # Report it here, not in the supervisor.
    if number is not None and Path(f"/sys/class/ublk-char/ublkc{number}").exists():
        raise UsageError(
            f"there is a ublk device {number} already",
            hint="leave the number out, and the first free one is taken",
        )
    front_end = choose_front_end(
        options.front_end, only_ublk=number is not None or bool(options.features)
    )
    spec = DeviceSpec(
        name=name,
        tag=os.urandom(8).hex(),
        front_end="ublk" if front_end.name == "ublk" else "fuse",
        size_bytes=description.size,
        read_only=description.read_only,
        recovery=_recovery_of(options, front_end.name),
        queues=options.queues,
        depth=options.depth,
        max_io_bytes=options.max_io_bytes,
        features=list(options.features),
        device_id=number,
        hang_timeout_s=options.hang_timeout_s,
        server=str(checked_server(server)) if server else None,
    )
    spec.check()
    return spec


def _recovery_of(options: DeviceOptions, front_end: str) -> RecoveryName:
    recovery = options.recovery
    if (recovery, front_end) == (FORMER_RECOVERY, "fuse"):
        log.warning(
            "recovery swap was removed, because it lost what was written and not yet "
            "synced: auto is used instead"
        )
        recovery = "auto"
    return recovery


def _exists(name: str) -> UsageError:
    return UsageError(
        f"a device {name!r} exists already",
        hint=f"see: btrfs-ublk device status {name}; or choose another name",
    )


def checked_server(program: Path) -> Path:
    """Return the absolute path of a server's program. Raises CommandError, and
    UsageError when it is not our server."""
    program = Path(os.path.abspath(program))
    said = run([program, "--version"], timeout_s=_VERSION_TIMEOUT_S).stdout
    if not said.startswith("btrfs-ublk-server "):
        raise UsageError(
            f"{program} is not a btrfs-ublk-server: with --version it prints "
            f"{said[:80]!r}"
        )
    return program


def _make(spec: DeviceSpec, description: Description) -> tuple[DeviceDirectory, Lock]:
    """Make a device's directory in one step, with all its files, and lock it."""
    devices = devices_directory(make=True)
    target = devices / spec.name
    half = half_path(target, spec.tag)
    with registry_locked(devices):
        if os.path.lexists(target):
            raise _exists(spec.name)
        with ExitStack() as on_failure:
            on_failure.callback(remove_tree, half, ignore_errors=True)
            try:
                half.mkdir(mode=0o700)
                made = DeviceDirectory(half)
                lock = lock_file(made.lock)
                assert lock is not None
                on_failure.callback(lock.close)
                made.write_spec(spec)
                made.write_description(description.absolute().to_json())
                half.rename(target)
            except OSError as error:
                raise BtrfsUblkError(
                    f"cannot make {target}: {error.strerror}"
                ) from error
            on_failure.pop_all()
    return DeviceDirectory(target), lock


def _undo(directory: DeviceDirectory) -> None:
    with deferred(), suppress(UsageError):  # somebody else was quicker
        remove_device(directory.name)


def remove_device(name: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
    """Take a device down, even if parts of it are missing, and remove its files.

    A server that has not ended after ``timeout_s`` seconds is killed. Raises
    LeftoverError, which names the mount, while it is in use, and UsageError when there
    is none of that name. After any error, a server that still runs has a supervisor.
    """
    directory = device_directory(name)
    directory.check()
    spec = directory.spec()
    _refuse_if_used(directory, spec, directory.state())
    with deferred():
        lock = detach_supervisor(directory, timeout_s=timeout_s)
        with lock, ExitStack() as on_failure:
            on_failure.push(undoing(lambda: _supervise_on(directory, lock, spec)))
            remove_locked(directory, timeout_s=timeout_s)
            on_failure.pop_all()


def _supervise_on(directory: DeviceDirectory, lock: Lock, spec: DeviceSpec) -> None:
    """Supervise a device again whose server still runs, because somebody mounted it
    meanwhile, say, or /run is full."""
    if is_alive(directory.state().server):
        have_daemon_supervise(directory.path, lock.fileno(), spec.python)


def remove_locked(directory: DeviceDirectory, *, timeout_s: float) -> None:
    """Do as remove_device(), for callers that hold the lock. Raises LeftoverError."""
    spec, state = directory.spec(), directory.state()
    front_end = front_end_of(spec, state)
    _refuse_if_used(directory, spec, state)
    directory.write_state(state.but(status="removing", reason=None, supervisor=None))
    server = _server_of(directory, state)
    if server is not None:
        try:
            _stop(directory, server, front_end, timeout_s=timeout_s)
        finally:
            server.close()
    # Otherwise requests that wait for an answer would wait for ever.
    end_keepers(state.keepers)
    front_end.remove()
    forget(directory.path)


def forget(path: Path) -> None:
    """Remove a device's directory, whose lock the caller holds."""
    with registry_locked(path.parent):
        # After the rename the name is free, even if we are killed in between.
        gone = half_path(path, os.urandom(8).hex())
        try:
            path.rename(gone)
            remove_tree(gone)
        except OSError as error:
            raise LeftoverError(f"cannot remove {path}: {error}") from error


def _refuse_if_used(
    directory: DeviceDirectory, spec: DeviceSpec, state: DeviceState
) -> None:
    users = users_of(spec, state)
    if users:
        raise LeftoverError(
            f"device {directory.name} is in use and was not removed: "
            f"{'; '.join(users)}",
            hint="unmount it first",
        )


def _server_of(directory: DeviceDirectory, state: DeviceState) -> RunningServer | None:
    with suppress(ProcessLookupError):
        if state.server is not None:
            return RunningServer(state.server)
    with suppress(ProcessLookupError):
        return RunningServer(holder_of(directory.server_lock))
    return None


def _stop(
    directory: DeviceDirectory,
    server: RunningServer,
    front_end: DeviceFrontEnd,
    *,
    timeout_s: float,
) -> None:
    """End a server; kill it if it does not answer. Raises LeftoverError."""
    try:
        info = control.ask(
            directory.path, "info", timeout_s=ANSWER_TIMEOUT_S, unless=[server]
        )
        # NB: ask the server, as state.json may lack this after an interrupted addition.
        with front_end.going(safe_stop=bool(info.get("safe_stop"))):
            # Otherwise the server would wait for keepers, which have its file open.
            end_keepers(directory.state().keepers)
            control.ask(
                directory.path, "stop", timeout_s=ANSWER_TIMEOUT_S, unless=[server]
            )
        if server.wait(timeout_s):
            return
    except InUseError as error:
        raise LeftoverError(
            f"device {directory.name} is in use and was not removed",
            hint="unmount it first",
        ) from error
    except (ControlError, control.Interrupted):
        pass
    if not server.kill():
        raise LeftoverError(
            f"server {server.pid} of device {directory.name} was killed, but "
            "hangs in the kernel",
            hint="see the kernel log: dmesg",
        )


def recover_device(name: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[str]:
    """Repair a device. Returns texts that say what was done; [] if nothing was needed.

    A dead supervisor is replaced by one that adopts the running server, or starts
    another one, which takes over the device.
    """
    directory = device_directory(name)
    directory.check()
    spec, before = directory.spec(), directory.state()
    done = []
    supervisor = before.supervisor
    if supervisor is not None and is_stopped(supervisor):
        # Reads in flight need what it holds, so it is only killed if it cannot go on.
        continue_process(supervisor)
        done.append(f"continued supervisor {supervisor.pid}, which was stopped")
    lock = _lock_or_supervisor(directory, timeout_s=timeout_s)
    if isinstance(lock, Lock):
        with lock:
            supervisor = have_daemon_supervise(
                directory.path, lock.fileno(), spec.python
            )
        done.append(f"started supervisor {supervisor.pid}")
    else:
        if lock != before.supervisor:
            done.append(f"supervisor {lock.pid} was started by the device's keeper")
        supervisor = lock
    after = wait_until_serving(directory, supervisor, timeout_s=timeout_s)
    if after.server and after.server != before.server:
        done.append(f"server {after.server.pid} took over")
    elif done and after.server:
        done.append(f"server {after.server.pid} was not interrupted")
    return done


def _lock_or_supervisor(
    directory: DeviceDirectory, *, timeout_s: float
) -> Lock | ProcessIdentity:
    """Return the device's lock if it has no supervisor, else the supervisor. Raises
    BtrfsUblkError when another command has the lock for ``timeout_s`` seconds."""

    def found(state: DeviceState) -> bool:
        found_lock.extend(filter(None, [take_lock(directory)]))
        return bool(found_lock) or is_alive(state.supervisor)

    found_lock: list[Lock] = []
    state = wait_for_state(directory, found, timeout_s=timeout_s)
    if found_lock:
        return found_lock[0]
    if state is None or state.supervisor is None:
        raise BtrfsUblkError(f"another command works on device {directory.name}")
    return state.supervisor


def serve_device(
    name: str,
    description: Description | None = None,
    options: DeviceOptions = DEFAULT_OPTIONS,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> int:
    """Supervise a device in this process until TERM or INT; return an exit status.

    It is made if there is none of that name. If there is, ``description`` (if any) must
    be its description, or one from which it has grown, and the present supervisor is
    asked to end. The server still runs when this returns.
    """
    with deferred():
        # Other commands have the daemon supervise. NB: nothing is made yet.
        from btrfs_ublk.supervision.supervisor import supervise
    directory = device_directory(name)
    if os.path.lexists(directory.path):
        directory.check()
        _check_same(directory, description)
        with detach_supervisor(directory, timeout_s=timeout_s) as lock:
            return supervise(directory, lock)
    if description is None:
        raise UsageError(
            f"there is no device {name!r}", hint="give a description to make it"
        )
    if options.server is None:
        check_helper(SERVER)
    spec = _spec(name, description, options)
    with ExitStack() as on_failure:
        with deferred():
            directory, lock = _make(spec, description)
            on_failure.push(undoing(lambda: _undo_unless_served(directory)))
            on_failure.enter_context(lock)  # NB: it is let go before that.
        status = supervise(directory, lock)
        on_failure.pop_all()
    lock.close()
    if status:
        _undo_unless_served(directory)
    return status


def _undo_unless_served(directory: DeviceDirectory) -> None:
    if directory.state().device is None:
        _undo(directory)


def _check_same(directory: DeviceDirectory, description: Description | None) -> None:
    if description is None:
        return
    name, given = directory.name, description.absolute()
    served = type(given).from_json(directory.description.read_text())
    if _is_growth(given, served):
        if given.size < served.size:
            log.warning(
                "device %s has grown from the %d bytes of its description to %d: add "
                "them there as well, or it has fewer after a reboot",
                *(name, given.size, served.size),
            )
        return
    if _is_growth(served, given):
        hint = f"to have it grow: btrfs-ublk device update {name} …"
    else:
        hint = f"btrfs-ublk device down {name}, or leave the description out"
    raise UsageError(f"device {name} exists, and serves another description", hint=hint)


def _is_growth(before: Description, after: Description) -> bool:
    """Return whether ``after`` is ``before`` or extends it."""
    with suppress(UsageError):
        before.check_growth(after)
        return True
    return False


@contextmanager
def supervised_device(
    description: Description,
    options: DeviceOptions = DEFAULT_OPTIONS,
    *,
    name: str | None = None,
) -> Iterator[Device]:
    """Call add_device(), and remove the device when the block is left.

    ``device.path`` is what sprout() takes. ``name`` is random by default. NB: unlike
    BlockServer, it stays when this process is killed: see ``btrfs-ublk device list``.
    """
    name = name or f"anonymous-{os.urandom(4).hex()}"
    is_there: list[bool] = []
    try:
        yield add_device(name, description, options, made=lambda: is_there.append(True))
    finally:
        if is_there:
            with deferred():
                remove_device(name)
