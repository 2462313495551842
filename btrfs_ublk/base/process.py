"""Run external commands: run() is for those that end, spawn() for those that stay.

Every child runs in a process group of its own, so that Ctrl-C on the terminal reaches
only us, and does not end the commands of a teardown. Children get a signal when we die
(``setpriv --pdeathsig``, prctl(2) PR_SET_PDEATHSIG; NB: the kernel sends it when the
*thread* that started the child ends).
"""

from __future__ import annotations

import math
import os
import select
import shlex
import signal
import subprocess
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Protocol, TypeVar

from btrfs_ublk.base import libraries
from btrfs_ublk.base.log import log
from btrfs_ublk.base.records import dataclass
from btrfs_ublk.base.signals import deferred, delivered
from btrfs_ublk.errors import CommandError

#: The time for a process that was continued to end; a debugger may still hold it.
_CONTINUE_TIMEOUT_S = 0.1
#: How long a killed child may take to vanish; longer means that it hangs in the kernel.
KILL_TIMEOUT_S = 5.0
_STDERR_LINES = 20
#: The stack of a thread that only waits; the daemon locks all of it into memory.
_STACK_BYTES = 256 << 10

T = TypeVar("T")
Argument = str | os.PathLike[str]


class SupportsFileno(Protocol):
    def fileno(self) -> int: ...


def readable(
    descriptors: Iterable[int | SupportsFileno], *, timeout_s: float
) -> set[int]:
    """Wait until any descriptor can be read or has ended, and return all that are so;
    none after ``timeout_s`` seconds.

    NB: not select(2), which fails with descriptors above 1023.
    """
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    return {fd for fd, _ in poller.poll(math.ceil(max(0.0, timeout_s) * 1000))}


def call_bounded(
    function: Callable[[], T],
    *,
    timeout_s: float,
    unless: Iterable[int | SupportsFileno] = (),
) -> T:
    """Call a function that may wait in the kernel for long, in a thread that is left
    alone then. Raises what it raises; TimeoutError after ``timeout_s`` seconds, or as
    soon as one of ``unless`` can be read."""
    done: list[T] = []
    failed: list[BaseException] = []
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)

    def call() -> None:
        try:
            done.append(function())
        except BaseException as error:
            failed.append(error)
        finally:
            os.close(write_fd)

    thread = threading.Thread(
        target=call, daemon=True, name=threading.current_thread().name
    )
    before = threading.stack_size(_STACK_BYTES)
    try:
        try:
            thread.start()
        finally:
            threading.stack_size(before)
        if read_fd not in readable([read_fd, *unless], timeout_s=timeout_s):
            raise TimeoutError(f"it did not end within {timeout_s:g} s")
        thread.join()
    finally:
        os.close(read_fd)
    for error in failed:
        raise error
    return done[0]


@dataclass(frozen=True)
class ProcessIdentity:
    """Pid and start time of a process, so that no later one is mistaken for it.

    The start time is in clock ticks since boot (/proc/<pid>/stat field 22, proc(5)).
    psutil's ``create_time()`` cannot be compared across processes: it adds the boot
    time, which moves whenever the wall clock is set.
    """

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity:
        """Look up a process. Raises ProcessLookupError when there is none."""
        return cls(pid, _start_ticks_and_end(pid)[0])

    @classmethod
    def of_self(cls) -> ProcessIdentity:
        return cls.of(os.getpid())

    def is_alive(self) -> bool:
        """Return False once the process has ended, even if it is not reaped yet. As for
        wait(), its end is that of its last thread."""
        try:
            start_ticks, has_ended = _start_ticks_and_end(self.pid)
        except ProcessLookupError:
            return False
        return start_ticks == self.start_ticks and not has_ended

    def open_pidfd(self) -> int:
        """Return a descriptor that is readable once it ends (pidfd_open(2)). Raises
        ProcessLookupError when it has ended.

        NB: its first thread may have ended while others still hold its files and locks.
        The descriptor is readable after the last one.
        """
        pidfd = os.pidfd_open(self.pid)
        try:
            # The pidfd is open, so this can be no other process from here on.
            if self.of(self.pid) != self or readable([pidfd], timeout_s=0.0):
                raise ProcessLookupError(f"process {self.pid} has ended")
        except BaseException:
            os.close(pidfd)
            raise
        return pidfd

    def wait(self, *, timeout_s: float) -> bool:
        """Wait for its end; return whether it came within ``timeout_s`` seconds."""
        try:
            pidfd = self.open_pidfd()
        except ProcessLookupError:
            return True
        try:
            return bool(readable([pidfd], timeout_s=timeout_s))
        finally:
            os.close(pidfd)

    def stop(self, *, timeout_s: float) -> bool:
        """Terminate, wait, kill, wait; for processes that are not our children.

        Return whether the process is gone. It may have ended for another reason.
        """
        try:
            pidfd = self.open_pidfd()
        except ProcessLookupError:
            return True
        try:
            for signum, wait_s in (
                (signal.SIGTERM, timeout_s),
                (signal.SIGKILL, KILL_TIMEOUT_S),
            ):
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signum)
                    # A stopped process handles SIGTERM only once it continues.
                    signal.pidfd_send_signal(pidfd, signal.SIGCONT)
                if readable([pidfd], timeout_s=wait_s):
                    return True
            return False
        finally:
            os.close(pidfd)


def _start_ticks_and_end(pid: int) -> tuple[int, bool]:
    """Return when a process began, and whether it has ended and is not reaped yet."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # Fields follow the command name, which may have blanks and parentheses.
            fields = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        raise ProcessLookupError(f"there is no process {pid}") from None
    state, threads, start_ticks = fields[0], int(fields[17]), int(fields[19])
    # NB: the state is the first thread's, which may have ended before others.
    return start_ticks, state in ("Z", "X") and threads <= 1


def run(
    argv: Sequence[Argument],
    *,
    timeout_s: float,
    input: str | None = None,
    hint: str | None = None,
    env: Mapping[str, str] | None = None,
    ok_statuses: Sequence[int] = (0,),
    keep_open_fds: Sequence[int] = (),
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and return its stdout and stderr as text.

    Raises CommandError, with the command to copy, its exit status and the end of its
    stderr, when it cannot be started, ends with a status outside ``ok_statuses``, or
    runs for more than ``timeout_s`` seconds and is killed. Raises CapabilityError when
    it lacks a shared library. ``keep_open_fds`` are inherited.
    """
    words = [os.fspath(word) for word in argv]
    log.debug("run: %s", shlex.join(words))
    with deferred():
        return _run(
            words,
            timeout_s=timeout_s,
            input=input,
            hint=hint,
            env=env,
            ok_statuses=ok_statuses,
            keep_open_fds=keep_open_fds,
        )


def _run(
    words: Sequence[str],
    *,
    timeout_s: float,
    input: str | None,
    hint: str | None,
    env: Mapping[str, str] | None,
    ok_statuses: Sequence[int],
    keep_open_fds: Sequence[int],
) -> subprocess.CompletedProcess[str]:
    """Do the work of run(), where signals are deferred but for the wait. NB: Popen's
    finaliser, which would swallow the exception of a signal, runs when this returns."""
    child = _start(
        words,
        hint=hint,
        env=env,
        stdin=subprocess.DEVNULL if input is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        keep_open_fds=keep_open_fds,
        death_signal=signal.SIGKILL,
    )
    try:
        with delivered():
            stdout, stderr = child.communicate(input, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        stderr = _kill(child)
        raise CommandError(
            failure_text(words, f"did not end within {timeout_s:g} s", stderr),
            hint=hint,
        ) from None
    except BaseException:
        # NB: the command must have ended before what it made is removed.
        _kill(child)
        raise
    if child.returncode not in ok_statuses:
        if child.returncode == libraries.EXIT_STATUS:
            missing = libraries.library_error(words[0], stderr)
            if missing is not None:
                raise missing
        raise CommandError(
            failure_text(words, describe_exit(child.returncode), stderr), hint=hint
        )
    return subprocess.CompletedProcess(words, child.returncode, stdout, stderr)


def describe_exit(returncode: int) -> str:
    """Return "exited with status 1", or for negative codes "was ended by SIGKILL"."""
    if returncode >= 0:
        return f"exited with status {returncode}"
    try:
        return f"was ended by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was ended by signal {-returncode}"


def failure_text(words: Sequence[str], what: str, stderr: str) -> str:
    """Make an error message: ``what`` happened, the command, the end of its stderr."""
    lines = stderr.rstrip().splitlines()[-_STDERR_LINES:]
    return "\n".join(
        [f"command {what}: {shlex.join(words)}", *(f"  {x}" for x in lines)]
    )


def find_program(program: str, path: str | None = None) -> str | None:
    """Find a program on ``path`` (None: PATH). NB: shutil.which() comes with all kinds
    of compression, which take long to import, and the daemon would lock them into
    memory."""
    if path is None:
        path = os.environ.get("PATH")
    places = [""] if "/" in program else (path or os.defpath).split(os.pathsep)
    for place in places:
        name = os.path.join(place, program)
        if os.access(name, os.X_OK) and os.path.isfile(name):
            return name
    return None


def _start(
    words: Sequence[str],
    *,
    hint: str | None,
    env: Mapping[str, str] | None,
    stdin: int | IO[bytes] | None,
    stdout: int | IO[bytes] | None,
    stderr: int | IO[bytes] | None,
    keep_open_fds: Sequence[int],
    death_signal: signal.Signals | None,
    new_session: bool = False,
) -> subprocess.Popen[str]:
    program = find_program(words[0], (env or os.environ).get("PATH", ""))
    if program is None:
        wanted = f"wanted for: {shlex.join(words)}"
        if "/" in words[0] and os.path.exists(words[0]):
            raise CommandError(
                f"{words[0]} cannot be run as a program, {wanted}", hint=hint
            )
        raise CommandError(
            f"there is no program {words[0]!r}, {wanted}",
            hint=hint or "install the package that has it, or correct PATH",
        )
    prefix = []
    if death_signal is not None and find_program("setpriv"):
        # preexec_fn would run Python between fork and exec: unsafe with threads.
        prefix = ["setpriv", "--pdeathsig", death_signal.name.removeprefix("SIG"), "--"]
    try:
        return subprocess.Popen(
            [*prefix, program, *words[1:]],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=env,
            pass_fds=keep_open_fds,
            process_group=None if new_session else 0,
            start_new_session=new_session,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
    except OSError as error:
        raise CommandError(
            f"cannot start {shlex.join(words)}: {error.strerror}", hint=hint
        ) from error


def _kill(child: subprocess.Popen[str]) -> str:
    """Kill the child's group, wait for a bounded time, and return its stderr."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    try:
        return child.communicate(timeout=KILL_TIMEOUT_S)[1] or ""
    except subprocess.TimeoutExpired as expired:
        text = expired.stderr or b""
        # It outlives SIGKILL, so it waits in the kernel, for a device that is stuck.
        return (
            f"{text.decode(errors='replace')}\n(it was killed, but hangs in the kernel)"
        )


class Child:
    """A long-running child process; made by launch() and spawn()."""

    def __init__(
        self, process: subprocess.Popen[str], words: Sequence[str], stderr: IO[bytes]
    ) -> None:
        self._process = process
        self._stderr = stderr
        self.argv = tuple(words)
        self.pid = process.pid
        self.identity = ProcessIdentity.of(process.pid)
        self._pidfd = os.pidfd_open(process.pid)

    @property
    def stdout(self) -> IO[str] | None:
        return self._process.stdout

    @property
    def returncode(self) -> int | None:
        """The exit status, or minus the signal number; None while it runs."""
        return self._process.poll()

    def fileno(self) -> int:
        """Return a descriptor that is readable once the child ends (pidfd_open(2))."""
        return self._pidfd

    def wait(self, timeout_s: float) -> int | None:
        """Return its exit status, or None if it still runs after ``timeout_s``."""
        if self._process.returncode is None:
            readable([self._pidfd], timeout_s=timeout_s)
        return self._process.poll()

    def send_signal(self, signum: int) -> None:
        self._process.send_signal(signum)

    def stderr_tail(self, lines: int = _STDERR_LINES) -> str:
        """Return the last lines that it wrote to stderr."""
        end = os.fstat(self._stderr.fileno()).st_size
        start = max(0, end - lines * 256)
        text = os.pread(self._stderr.fileno(), end - start, start)
        return "\n".join(text.decode(errors="replace").splitlines()[-lines:])

    def failure(self, what: str) -> str:
        """Return failure_text() of this child."""
        return failure_text(self.argv, what, self.stderr_tail())

    def stop(
        self, *, timeout_s: float, signum: signal.Signals | None = signal.SIGTERM
    ) -> int:
        """Terminate, wait ``timeout_s``, kill. Returns the exit status; idempotent.

        With ``signum`` None, no signal is sent at first: the child was told already.
        Raises CommandError when the child cannot even be killed.
        """
        if signum is not None and self.returncode is None:
            self.send_signal(signum)
            self.send_signal(signal.SIGCONT)  # A stopped child must continue to end.
        if self.wait(timeout_s) is None:
            log.warning(
                "%s: process %d did not end when asked: killing it",
                self.argv[0],
                self.pid,
            )
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        status = self.wait(KILL_TIMEOUT_S)
        if status is None:
            raise CommandError(
                self.failure(f"(pid {self.pid}) was killed, but hangs in the kernel")
            )
        return status

    def close(self) -> None:
        os.close(self._pidfd)
        self._stderr.close()
        if self._process.stdout:
            self._process.stdout.close()


def launch(
    argv: Sequence[Argument],
    *,
    hint: str | None = None,
    env: Mapping[str, str] | None = None,
    stdin: str | SupportsFileno | None = None,
    pipe_stdout: bool = False,
    keep_open_fds: Sequence[int] = (),
    death_signal: signal.Signals | None = signal.SIGTERM,
    talk: Path | None = None,
    new_session: bool = False,
) -> Child:
    """Start a command that stays; the caller stops and closes it. See spawn().

    ``talk``: a file to which its stderr is appended, for children that outlive us.
    ``new_session``: setsid(2), so that no terminal of ours ends it.
    """
    words = [os.fspath(word) for word in argv]
    log.debug("launch: %s", shlex.join(words))
    with deferred(), ExitStack() as files:
        source = subprocess.DEVNULL
        if isinstance(stdin, str):
            # A pipe would make us wait for a child that does not read.
            text = files.enter_context(_memory_file("stdin"))
            text.write(stdin.encode())
            text.seek(0)
            source = text.fileno()
        elif stdin is not None:
            source = stdin.fileno()
        with ExitStack() as on_failure:
            stderr = on_failure.enter_context(
                _memory_file("stderr")
                if talk is None
                else open(talk, "a+b", 0, opener=_open_private)
            )
            process = _start(
                words,
                hint=hint,
                env=env,
                stdin=source,
                stdout=subprocess.PIPE if pipe_stdout else subprocess.DEVNULL,
                stderr=stderr,
                keep_open_fds=keep_open_fds,
                death_signal=death_signal,
                new_session=new_session,
            )
            on_failure.callback(_abandon, process)
            child = Child(process, words, stderr)
            on_failure.pop_all()
        return child


def _abandon(process: subprocess.Popen[str]) -> None:
    _kill(process)
    if process.stdout:
        process.stdout.close()


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _memory_file(name: str) -> IO[bytes]:
    # NB: tempfile first writes files to find a directory; a kill would leave them.
    return os.fdopen(os.memfd_create(name, os.MFD_CLOEXEC), "w+b")


@contextmanager
def spawn(
    argv: Sequence[Argument],
    *,
    stop_timeout_s: float = 10.0,
    hint: str | None = None,
    env: Mapping[str, str] | None = None,
    stdin: str | SupportsFileno | None = None,
    pipe_stdout: bool = False,
    keep_open_fds: Sequence[int] = (),
    death_signal: signal.Signals | None = signal.SIGTERM,
    talk: Path | None = None,
) -> Iterator[Child]:
    """Start a command that stays; stop it (terminate, wait, kill) when the block is
    left.

    ``stdin`` is text that it can read, or a file. stderr goes to memory, or to the file
    ``talk``, so that the child can always write, even after our death. It gets
    ``death_signal`` when the thread that called spawn() ends; None is for children that
    notice our end otherwise.
    """
    child: Child | None = None
    try:
        with deferred():
            child = launch(
                argv,
                hint=hint,
                env=env,
                stdin=stdin,
                pipe_stdout=pipe_stdout,
                keep_open_fds=keep_open_fds,
                death_signal=death_signal,
                talk=talk,
            )
        yield child
    finally:
        if child is not None:
            with deferred():
                try:
                    child.stop(timeout_s=stop_timeout_s)
                finally:
                    child.close()


class RunningServer:
    """A process that is known by its pidfd, so no later one is mistaken for it."""

    def __init__(self, identity: ProcessIdentity, child: Child | None = None) -> None:
        """Raise ProcessLookupError when it has ended, unless it is our ``child``."""
        self.identity = identity
        self._child = child
        # A child stays the same process, and is reaped here, even if it has ended.
        self._pidfd = (
            os.pidfd_open(identity.pid) if child is not None else identity.open_pidfd()
        )

    @property
    def pid(self) -> int:
        return self.identity.pid

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when it ends."""
        return self._pidfd

    def signal(self, signum: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signum)

    def wait(self, timeout_s: float) -> bool:
        """Return whether it has ended within ``timeout_s`` seconds."""
        return bool(readable([self._pidfd], timeout_s=timeout_s))

    def kill(self) -> bool:
        """Kill it. Returns False when it hangs in the kernel."""
        self.signal(signal.SIGKILL)
        return self.wait(KILL_TIMEOUT_S)

    def how_it_ended(self) -> tuple[int | None, str]:
        """Return the exit status (None if only its parent knows it), and a text."""
        if self._child is not None:
            status = self._child.wait(0.0)
        else:
            status = self._reap()
        return status, "ended" if status is None else describe_exit(status)

    def _reap(self) -> int | None:
        # If our program has replaced itself since it started it, it is still our child.
        with suppress(ChildProcessError):
            result = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
            if result is not None:
                exited = result.si_code == os.CLD_EXITED
                return result.si_status if exited else -result.si_status
        return None

    def close(self) -> None:
        os.close(self._pidfd)
        if self._child is not None:
            self._child.close()


def close_all_but(kept: Collection[int]) -> None:
    """Close all descriptors but ``kept`` and the standard ones."""
    for fd in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, *kept}:
        with suppress(OSError):
            os.close(fd)


def continue_process(identity: ProcessIdentity) -> None:
    """Continue a stopped process; kill it if a debugger keeps it stopped."""
    with suppress(ProcessLookupError):
        process = RunningServer(identity)
        try:
            process.signal(signal.SIGCONT)
            if is_stopped(identity) and not process.wait(_CONTINUE_TIMEOUT_S):
                if is_stopped(identity):
                    process.kill()
        finally:
            process.close()


def is_stopped(process: ProcessIdentity) -> bool:
    """Return whether a signal or a debugger has stopped the process."""
    with suppress(OSError):
        stat = Path(f"/proc/{process.pid}/stat").read_text(errors="replace")
        return stat.rpartition(")")[2].split()[0] in ("T", "t")
    return False
