"""One run of one command in one guest."""

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import children, command, initramfs
from .errors import VmError
from .kernel import Kernel
from .machine import Machine, qemu_argv
from .root_share import Share
from .streams import Flow, FromGuest, ToGuest, poll_flows

EXIT_TIMEOUT = 124
EXIT_GUEST_FAILED = 125
_BOOT_LIMIT_S = 180.0
# Emulated CPUs that run in parallel now and then execute code that another one is
# just patching, which the kernel does a lot while it boots; seen once in 200 boots.
_BOOT_TRIES = 3
# After the command's end its output is waited for as long as any comes.
_IDLE_END_S = 5.0
_SHOWN_LINES = 30
_TROUBLE = re.compile(r"Oops|BUG:|WARNING:|Kernel panic|general protection|vm: ")
# virtiofsd's when QEMU ends, and QEMU's own about features emulation lacks.
_IDLE_TALK = re.compile(r"fv_remove_watch|virtio_loop:|mtrr: your|TCG doesn't support")
_RUN_PREFIX = "btrfs-ublk-vm-"


@dataclass(frozen=True, kw_only=True)
class Run:
    argv: Sequence[str]
    environment: Mapping[str, str]  # added to what is passed on anyway
    project: Path
    kernel: Kernel
    memory: str
    cpus: int
    kvm: bool
    icount: bool
    pmem: str | None
    timeout_s: float | None
    console: Path | None  # where to keep the kernel's log


class _Signalled(Exception):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _DiedBooting(VmError):
    """The guest died before it ran anything, so it can be tried again."""


def run(what: Run) -> int:
    """Boot, run, clean up; returns the command's status or one of the above."""
    end = time.monotonic() + what.timeout_s if what.timeout_s else None
    _remove_dead_runs()
    with _signals_as_bytes() as signals:
        for tries_left in range(_BOOT_TRIES - 1, 0, -1):
            try:
                return _run_once(what, end, signals, tries_left)
            except _DiedBooting as error:
                print(f"vm: {error} while it booted; trying again", file=sys.stderr)
        return _run_once(what, end, signals, 0)


def _run_once(what: Run, end: float | None, signals: int, tries_left: int) -> int:
    keep = False
    with contextlib.ExitStack() as stack:
        run_dir = Path(tempfile.mkdtemp(prefix=_RUN_PREFIX))
        stack.enter_context(_locked(run_dir))
        console = what.console or run_dir / "console.log"

        def clean() -> None:
            for path in run_dir.iterdir():
                if not (keep and path.suffix == ".log"):
                    path.unlink()
            if not keep:
                run_dir.rmdir()

        stack.callback(clean)
        guest = _Guest(what, run_dir, console, signals)
        stack.callback(guest.stop)
        guest.start()
        try:
            return guest.attend(end)
        except _Signalled as signalled:
            return 128 + signalled.number
        except BrokenPipeError:  # nobody reads our output any more
            return 128 + signal.SIGPIPE
        except TimeoutError as error:
            print(f"\nvm: {error}; the guest was ended", file=sys.stderr)
            return EXIT_TIMEOUT
        except VmError as error:
            if tries_left and isinstance(error, _DiedBooting):
                raise
            keep = True
            print(f"\nvm: {error}", file=sys.stderr)
            for line in _last_words(console) + _last_words(run_dir / "host.log"):
                print(f"    {line}", file=sys.stderr)
            print(f"vm: the whole log is {console}", file=sys.stderr)
            return EXIT_GUEST_FAILED


class _Guest:
    def __init__(self, what: Run, run_dir: Path, console: Path, signals: int) -> None:
        self._what, self._run_dir, self._console = what, run_dir, console
        self._signals = signals
        self._cleanup = contextlib.ExitStack()
        self._end_mark = f"\x1e{secrets.token_hex(16)}\x1e"
        self._forward_stdin = _has_input(0)
        self._ports: dict[str, socket.socket] = {}

    def start(self) -> None:
        what = self._what
        self._console.write_bytes(b"")
        log = os.open(self._run_dir / "host.log", os.O_WRONLY | os.O_CREAT, 0o600)
        self._cleanup.callback(os.close, log)
        machine = Machine(
            kernel=what.kernel,
            initramfs=self._run_dir / "initramfs",
            memory=what.memory,
            cpus=what.cpus,
            kvm=what.kvm,
            icount=what.icount,
            pmem=what.pmem,
            console=self._console,
        )
        initramfs.build(machine.initramfs, kernel=what.kernel, files=self._files())
        shares = []
        for tag, directory, read_only in (
            ("hostroot", what.kernel.root, True),
            ("project", what.project, False),
        ):
            share = Share(
                tag, directory, read_only=read_only, run_dir=self._run_dir, log=log
            )
            self._cleanup.callback(share.stop)
            shares.append(share)
        theirs: dict[str, socket.socket] = {}
        for name in ("control", "stdout", "stderr", "stdin"):
            self._ports[name], theirs[name] = socket.socketpair()
            self._cleanup.callback(self._ports[name].close)
            self._cleanup.callback(theirs[name].close)
        fds = {name: end.fileno() for name, end in theirs.items()}
        argv = qemu_argv(machine, shares=shares, ports=fds)
        self._qemu: subprocess.Popen[bytes] = children.spawn(
            argv, log=log, pass_fds=tuple(fds.values())
        )
        self._cleanup.callback(children.stop, self._qemu)
        for end in theirs.values():
            end.close()  # or the ports would not close with the guest

    def _files(self) -> dict[str, bytes]:
        what = self._what
        base = what.kernel.modules_base
        if base:  # as the guest sees it
            base = Path("/") / base.relative_to(what.kernel.root)
        modules = f"{base}/lib/modules/{what.kernel.release}" if base else ""
        accelerator = "icount" if what.icount else "kvm" if what.kvm else "tcg"
        environment = command.guest_environment(
            os.environ,
            # Benchmarks say what their figures are from.
            {"BTRFS_UBLK_VM": accelerator, **what.environment},
            what.project,
            what.kernel.arch,
        )
        config = {
            "PROJECT": str(what.project),
            "MODULES": modules.replace("//", "/"),
            "GUEST_NAME": "btrfs-ublk-vm",
            "END_MARK": self._end_mark,
            "STDIN": "yes" if self._forward_stdin else "no",
        }
        return {
            "config": command.guest_config(config),
            "command": command.command_script(
                what.argv, environment, cwd=os.getcwd(), project=what.project
            ),
        }

    def attend(self, end: float | None) -> int:
        """Carry the streams until the command is done; returns its status."""
        mark = self._end_mark.encode()
        out = FromGuest(self._ports["stdout"].fileno(), 1, mark)
        err = FromGuest(self._ports["stderr"].fileno(), 2, mark)
        flows: list[Flow] = [out, err]
        control = self._ports["control"].fileno()
        watched = {control, self._signals}
        messages = b""
        status: int | None = None
        boot_end: float | None = time.monotonic() + _BOOT_LIMIT_S
        idle_since = time.monotonic()
        while status is None or not (out.done and err.done):
            now = time.monotonic()
            if end is not None and now >= end:
                raise TimeoutError(
                    f"not finished after the {self._what.timeout_s:g} s of --timeout"
                )
            if boot_end is not None and now >= boot_end:
                raise VmError(f"the guest did not start within {_BOOT_LIMIT_S:.0f} s")
            if status is not None and now - idle_since > _IDLE_END_S:
                break  # something unkillable still holds the pipe
            before = (out.interest(), err.interest())
            ready = poll_flows(flows, watched, 0.5)
            if self._signals in ready:
                raise _Signalled(os.read(self._signals, 1)[0])
            if control in ready:
                data = os.read(control, 4096)
                messages += data
                if boot_end is not None and b"started\n" in messages:
                    boot_end = None
                    if self._forward_stdin:  # not before: it can be read only once
                        flows.append(ToGuest(0, self._ports["stdin"]))
                if b"status " in messages and messages.endswith(b"\n"):
                    status = int(messages.split()[-1])
                    idle_since = time.monotonic()
                if not data:
                    watched.discard(control)  # or it would be ready from now on
                if not data and status is None:
                    cause = self._cause_of_death()
                    # QEMU's own refusals are the same the next time.
                    again = boot_end is not None and not self._qemu.returncode
                    raise _DiedBooting(cause) if again else VmError(cause)
            waiting_for_reader = any(1 in i or 2 in i for i in before)
            if (
                ready
                or waiting_for_reader
                or before != (out.interest(), err.interest())
            ):
                idle_since = time.monotonic()
        return status

    def _cause_of_death(self) -> str:
        try:
            self._qemu.wait(5)
        except subprocess.TimeoutExpired:
            pass
        if b"Kernel panic" in self._console.read_bytes():
            return "the guest's kernel panicked"
        if self._qemu.returncode:
            return f"QEMU ended with status {self._qemu.returncode}"
        return "the guest ended by itself"

    def stop(self) -> None:
        self._cleanup.close()


@contextlib.contextmanager
def _signals_as_bytes() -> Iterator[int]:
    """Make the ending signals readable: yields a descriptor of their numbers."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    old_handlers = [signal.signal(n, lambda *_: None) for n in numbers]
    old_fd = signal.set_wakeup_fd(writer)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(old_fd)
        for number, handler in zip(numbers, old_handlers):
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)


def _has_input(fd: int) -> bool:
    """A terminal stays ours (Ctrl-C, job control); anything else is passed on."""
    try:
        return not os.isatty(fd) and os.fstat(fd) is not None
    except OSError:
        return False


def _last_words(log: Path) -> list[str]:
    """What to show of a log: from the first sign of trouble, or else its end."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    lines = [
        line
        for line in text.replace("\r", "").splitlines()
        if not _IDLE_TALK.search(line)
    ]
    for number, line in enumerate(lines):
        if _TROUBLE.search(line):
            return lines[max(0, number - 2) : number + _SHOWN_LINES]
    return lines[-_SHOWN_LINES:]


@contextlib.contextmanager
def _locked(run_dir: Path) -> Iterator[None]:
    """Held for life: a process id says nothing across PID namespaces.

    Raises BlockingIOError when another run has it.
    """
    fd = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


def _remove_dead_runs() -> None:
    """Remove what a killed scripts/vm left; logs that were kept stay."""
    for path in Path(tempfile.gettempdir()).glob(f"{_RUN_PREFIX}*"):
        # NB: looked at first: a directory without it may be about to be locked.
        if not (path / "initramfs").exists():
            continue
        with contextlib.suppress(OSError), _locked(path):
            shutil.rmtree(path, ignore_errors=True)
