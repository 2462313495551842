"""Child processes that never outlive the process that started them."""

import ctypes
import os
import re
import signal
import subprocess
from collections.abc import Callable, Sequence

from .errors import VmError

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1
_CLONE_NEWNS = 0x00020000
_MS_REC_PRIVATE = 0x4000 | (1 << 18)
_SYS_MOUNT_SETATTR = 442  # the same number on every architecture
_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
_MOUNT_ATTR_RDONLY = 1
_MNT_DETACH = 2
#: In temporary directories, those of tests as well.
_PASSING = re.compile(rb"/btrfs-ublk-([0-9a-f]{16}|tests-[^/]+)(/|$)")


class _MountAttr(ctypes.Structure):
    """struct mount_attr, linux/mount.h."""

    _fields_ = [
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    ]


def _check(result: int, what: str) -> None:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


def see_everything_read_only() -> None:
    """Put this process into a mount namespace in which every mount is read-only.

    The host's own mounts do not change.  Needs Linux 5.12 (mount_setattr).
    """
    _check(_libc.unshare(_CLONE_NEWNS), "unshare")
    _check(
        _libc.mount(b"none", b"/", None, _MS_REC_PRIVATE, None), "mount --make-rprivate"
    )
    _drop_passing_mounts()
    attr = _MountAttr(attr_set=_MOUNT_ATTR_RDONLY)
    _check(
        _libc.syscall(
            ctypes.c_long(_SYS_MOUNT_SETATTR),
            ctypes.c_int(_AT_FDCWD),
            b"/",
            ctypes.c_uint(_AT_RECURSIVE),
            ctypes.byref(attr),
            ctypes.c_size_t(ctypes.sizeof(attr)),
        ),
        "mount_setattr",
    )


def _drop_passing_mounts() -> None:
    """Let go of what the project's own tools have mounted on the host at this moment.

    Nobody could unmount it, or detach a device below it, as long as the guest runs.
    """
    with open("/proc/self/mountinfo", "rb") as file:
        targets = [line.split()[4] for line in file]
    for target in reversed(targets):
        if _PASSING.search(target):
            # NB: one may have been on another, and is gone with it.
            _libc.umount2(target, _MNT_DETACH)


def spawn(
    argv: Sequence[str],
    *,
    log: int,
    pass_fds: Sequence[int] = (),
    prepare: Callable[[], None] | None = None,
) -> subprocess.Popen[bytes]:
    """Start `argv` with its output in `log`; it is killed when this process dies.

    It gets a session of its own, so that the terminal's Ctrl-C reaches only us.
    Raises VmError when it cannot be started, or `prepare` is refused something.
    """
    parent = os.getpid()
    # NB: what is raised in the child arrives here without its text.
    cause, cause_writer = os.pipe()

    def in_child() -> None:
        try:
            if prepare is not None:
                prepare()
        except OSError as error:
            os.write(cause_writer, os.fsencode(error.strerror or str(error)))
            raise
        # NB: after `prepare`, and last: a change of credentials clears it.
        _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
        if os.getppid() != parent:  # died before the call above
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=pass_fds,
            start_new_session=True,
            preexec_fn=in_child,
        )
    except subprocess.SubprocessError as error:
        os.set_blocking(cause, False)
        try:
            text = os.fsdecode(os.read(cause, 4096))
        except BlockingIOError:
            text = str(error)
        raise VmError(
            f"{argv[0]} could not be prepared: {text}; a container must be allowed "
            "to make mount namespaces (CAP_SYS_ADMIN)"
        ) from error
    except OSError as error:
        raise VmError(f"{argv[0]} could not be started: {error.strerror}") from error
    finally:
        os.close(cause)
        os.close(cause_writer)


def stop(child: subprocess.Popen[bytes], *, grace_s: float = 0.0) -> None:
    """End a child that holds no state worth saving; idempotent."""
    if child.poll() is None and grace_s > 0:
        child.terminate()
        try:
            child.wait(grace_s)
        except subprocess.TimeoutExpired:
            pass
    if child.poll() is None:
        child.kill()
    child.wait()
