"""Running a command in a fork, as the image says: for a trial, and no sandbox."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from btrfs_ublk.base.log import log
from btrfs_ublk.base.paths import StrPath
from btrfs_ublk.base.records import dataclass
from btrfs_ublk.base.signals import deferred, forget_handlers
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.kernel.root import enter_root
from btrfs_ublk.volume.forks import remove_fork
from btrfs_ublk.volume.image import ensure_fork, up_with_image
from btrfs_ublk.volume.report import look_at_volume
from btrfs_ublk.volume.store import volume_directories, volumes_directory

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
#: What is passed on to the command, and what tells of its end.
_AWAITED = {
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH, signal.SIGCHLD),
}
#: linux/prctl.h
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
#: Exit statuses of shells, env(1) and chroot(1) for a command that cannot be executed.
_NOT_FOUND, _NOT_EXECUTED = 127, 126
_NAME_CHARACTERS = 56


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What the config of an image says of the command in it (OCI image specification,
    config.md): variables, the command if none is given, where and as whom it runs."""

    variables: Mapping[str, str]
    command: tuple[str, ...]
    directory: str
    user: str

    @classmethod
    def parse(cls, config: Mapping[str, Any] | None) -> RunSettings:
        """Parse the object ``config`` of a config. Raises BtrfsUblkError."""
        config = config or {}

        def texts(key: str) -> list[str]:
            found = config.get(key) or []
            if not isinstance(found, list) or not all(map(_is_text, found)):
                raise BtrfsUblkError(
                    f"the image's {key} is {found!r}, no list of texts"
                )
            return found

        def text(key: str) -> str:
            found = config.get(key) or ""
            if not _is_text(found):
                raise BtrfsUblkError(f"the image's {key} is {found!r}, no text")
            return str(found)

        pairs = (each.partition("=") for each in texts("Env"))
        return cls(
            variables={name: value for name, _, value in pairs},
            command=(*texts("Entrypoint"), *texts("Cmd")),
            directory=text("WorkingDir") or "/",
            user=text("User"),
        )


def _is_text(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value


@dataclass(frozen=True)
class User:
    """Whom a command runs as."""

    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str


def find_user(text: str, root: Path = Path("/")) -> User:
    """Find NAME, UID, or either with :GROUP or :GID, as an image below ``root`` means
    it; "" is root. Raises UsageError. NB: Python's module pwd would load libraries."""
    name, _, group = (text or "0").partition(":")
    users = (x for x in _entries(root, "passwd", 6) if name in (x[0], x[2]))
    entry = next(users, [""] * 6)
    uid = _number(entry[2] if entry[0] else name, text)
    gid = int(entry[3]) if entry[3].isdecimal() else 0
    groups = list(_entries(root, "group", 4))
    members = [x for x in groups if entry[0] and entry[0] in x[3].split(",")]
    if group:
        found = [x[2] for x in groups if group in (x[0], x[2])]
        gid, members = _number(found[0] if found else group, text), []
    more = {int(x[2]) for x in members if x[2].isdecimal()}
    return User(uid, gid, tuple(sorted(more | {gid})), entry[5] or "/")


def _entries(root: Path, name: str, least: int) -> Iterator[list[str]]:
    with suppress(OSError):
        path = root / "etc" / name
        if stat.S_ISREG(path.stat().st_mode):
            for line in path.read_text(errors="surrogateescape").splitlines():
                fields = line.split(":")
                if len(fields) >= least:
                    yield fields


def _number(text: str, user: str) -> int:
    if not text.isdecimal() or int(text) >= 1 << 32:
        raise UsageError(
            f"the image's user {user!r} is not in its /etc/passwd, or /etc/group"
        )
    return int(text)


def run_in_root(root: Path, words: Sequence[str], settings: RunSettings) -> int:
    """Run a command in the directory ``root`` (see enter_root()), on this process's
    terminal; return its exit status, 128 + N for signal N. Signals that this process
    gets meanwhile are the command's. What it has left running is killed.

    Raises BtrfsUblkError where its surroundings cannot be made. NB: this process has no
    other children, and no threads.
    """
    reading, writing = os.pipe2(os.O_CLOEXEC)
    with _adopting(), open(reading, "rb") as reader:
        with _holding_signals() as mask:
            pid = os.fork()
            if pid == 0:
                _become(root, words, settings, mask, writing)
            os.close(writing)
            try:
                status = _wait(pid)
            finally:
                _kill_children()
        kind, _, message = reader.read().decode(errors="replace").partition(" ")
    if not kind:
        code = os.waitstatus_to_exitcode(status)
        return 128 - code if code < 0 else code
    raise CannotRunError(message, int(kind))


class CannotRunError(BtrfsUblkError):
    """A command was not begun. ``exit_status`` is what shells have for that."""

    def __init__(self, message: str, exit_status: int) -> None:
        super().__init__(message)
        self.exit_status = exit_status


@contextmanager
def _adopting() -> Iterator[None]:
    """Become the parent of what the children of this process leave."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@contextmanager
def _holding_signals() -> Iterator[set[int]]:
    """Have signals wait to be looked at; yield which were blocked before."""
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # it may be ignored
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    try:
        yield {int(each) for each in mask}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGCHLD, handler)


def _wait(pid: int) -> int:
    while True:
        info = signal.sigwaitinfo(_AWAITED)
        if info.si_signo == signal.SIGCHLD:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return status
        elif info.si_code <= 0:
            # Of a process. Those of the kernel are of the terminal, and the command,
            # which is in this process's group, has got them as well.
            os.kill(pid, info.si_signo)


def _kill_children() -> None:
    """Kill all children, and theirs, which are ours then."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    with suppress(ChildProcessError):
        while True:
            for child in children.read_text().split():
                with suppress(ProcessLookupError):
                    os.kill(int(child), signal.SIGKILL)
            os.waitpid(-1, 0)


def _become(
    root: Path, words: Sequence[str], settings: RunSettings, mask: set[int], failed: int
) -> NoReturn:
    """Become the command. If that fails, write exit status and reason to a pipe."""
    told = "1 it was interrupted"
    try:
        try:
            parent = os.getppid()
            forget_handlers()
            for each in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them
                signal.signal(each, signal.SIG_DFL)
            enter_root(root)
            variables = _prepare(settings)
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            if os.getppid() != parent:
                os._exit(1)
        except OSError as error:
            told = f"1 cannot run in {root}: {error.filename or ''}: {error.strerror}"
        except BtrfsUblkError as error:
            told = f"1 {error.message}"
        else:
            try:
                os.execvpe(words[0], list(words), variables)
            except (FileNotFoundError, NotADirectoryError):
                told = f"{_NOT_FOUND} the image has no program {words[0]!r}"
            except (OSError, ValueError) as error:
                why = error.strerror if isinstance(error, OSError) else error
                told = f"{_NOT_EXECUTED} cannot execute {words[0]!r}: {why}"
        os.write(failed, told.encode(errors="replace"))
    finally:
        os._exit(1)


def _prepare(settings: RunSettings) -> dict[str, str]:
    """Become the user, and go to the directory; return the variables."""
    user = find_user(settings.user)
    os.makedirs(settings.directory, exist_ok=True)
    os.setgroups(user.groups)
    os.setresgid(user.gid, user.gid, user.gid)
    os.setresuid(user.uid, user.uid, user.uid)
    os.chdir(settings.directory)
    variables = {"PATH": _PATH, "HOME": user.home}
    if "TERM" in os.environ and os.isatty(0):
        variables["TERM"] = os.environ["TERM"]
    return variables | dict(settings.variables)


def find_volume_of(image: str, base: StrPath | None = None) -> tuple[str, bool]:
    """Return the name of a volume of an image, whose name is in full, and whether it is
    up. One that is up is preferred; where there is none, it is the name of a new one.
    """
    found: list[str] = []
    for volume in volume_directories(base):
        with suppress(BtrfsUblkError, OSError):
            about = volume.made().image
            if about is not None and about["name"] == image:
                if look_at_volume(volume).is_up:
                    return volume.name, True
                found.append(volume.name)
    return (found[0] if found else _new_name(image, base)), False


def _new_name(image: str, base: StrPath | None) -> str:
    last = image.partition("@")[0].rpartition("/")[2].partition(":")[0]
    stem = re.sub("[^A-Za-z0-9._-]", "-", last)[:_NAME_CHARACTERS].lstrip("._-")
    name, number, directory = stem or "image", 1, volumes_directory(base)
    while os.path.lexists(directory / name):
        number += 1
        name = f"{stem or 'image'}-{number}"
    return name


def run_in_image(
    name: str,
    words: Sequence[str],
    *,
    fork: str | None = None,
    base: StrPath | None = None,
) -> int:
    """Run a command, or without ``words`` that of the image, in a fork of an image's
    volume that is up; return its exit status, as run_in_root() does. The fork is made
    if there is none of that name. Without a name, it is removed at the end.

    Raises UsageError where there is no command, CannotRunError, BtrfsUblkError.
    """
    with up_with_image(name, base) as up:
        settings = RunSettings.parse(up.config)
        words = words or settings.command
        if not words:
            raise UsageError(
                f"{up.name} says no command to run",
                hint="name one: btrfs-ublk image run IMAGE -- CMD",
            )
    own = fork or f"run-{os.urandom(4).hex()}"
    path = ensure_fork(name, own, base=base)
    try:
        return run_in_root(path, words, settings)
    finally:
        if fork is None:
            with deferred():
                _drop(name, own, base)


def _drop(name: str, fork: str, base: StrPath | None) -> None:
    try:
        with up_with_image(name, base) as up:
            remove_fork(up.mount, fork)
    except BtrfsUblkError as error:
        log.warning("fork %s of %s stays: %s", fork, name, error)
