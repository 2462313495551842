"""Overloads devices in several ways, and verifies what is read from them meanwhile.

``scripts/torture load --help``. Many readers verify reads of many devices, while many
clients of another user, whom the sockets of the servers were opened to, connect to
these: they say nothing, half a line, nonsense, or more than they read the answers of.
Beside that, each round takes something away: memory (of the servers, or of others,
until the OOM killer takes one), CPUs, descriptors, or the disk of all that servers and
daemon write. No read may be wrong, none may
take longer than the deadline, and root has to get answers. What is read comes from the
servers each time (O_DIRECT).
"""

import ctypes
import errno
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

import campaign
import click
from campaign import Run
from support.cgroups import MEMORY_GROUPS, memory_group
from support.devices import DESCRIPTION, reading

from btrfs_ublk.base.capabilities import FUSE, LOOP, ROOT
from btrfs_ublk.base.entry import run_command
from btrfs_ublk.bench import options
from btrfs_ublk.bench.cpu_load import hogs
from btrfs_ublk.bench.report import Result
from btrfs_ublk.device import Device, DeviceOptions, show_device, supervised_device
from btrfs_ublk.device.state import RUN_VARIABLE, device_directory
from btrfs_ublk.kernel import mounted
from btrfs_ublk.units import KIB, MIB

_NOBODY = 65534
_PR_SET_DUMPABLE = 4
_SERVERS_BYTES = 128 * MIB
_OTHERS_BYTES = 64 * MIB
#: Of what servers and daemon write, except caches; a round fills it.
_DISK_BYTES = 16 * MIB
_FEW_FILES = 3
_WORDS = (
    b"",
    b'{"request": "st',
    b"\x00\xff\n" * 100,
    b'{"request": "info"}\n' * 400,
    b'{"request": "stats"}\n',
    b"x" * 100_000,
)


def _crowd(sockets: Sequence[Path], count: int, seed: int) -> None:
    """Keep ``count`` clients busy, for ever."""
    chances = random.Random(seed)
    clients: list[socket.socket | None] = [None] * count
    while True:
        for number in range(count):
            client = clients[number]
            try:
                if client is None:
                    client = socket.socket(socket.AF_UNIX)
                    client.setblocking(False)
                    client.connect(str(sockets[number % len(sockets)]))
                    clients[number] = client
                client.send(chances.choice(_WORDS))
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    raise
                if client is not None and error.errno != errno.EAGAIN:
                    client.close()
                    clients[number] = None
                elif client is not None and clients[number] is None:
                    client.close()  # There was no room in the socket's queue.


@contextmanager
def crowd(sockets: Sequence[Path], count: int, seed: int) -> Iterator[int]:
    """Have that many clients, in a process of their own. Yields its number."""
    parent = os.getpid()
    fds = [os.open(path, os.O_PATH) for path in sockets]
    for path in sockets:
        path.chmod(0o777)
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setresgid(_NOBODY, _NOBODY, _NOBODY)
            os.setresuid(_NOBODY, _NOBODY, _NOBODY)
            # Otherwise it could not open its own /proc/self/fd (prctl(2)).
            ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
            _crowd([Path(f"/proc/self/fd/{fd}") for fd in fds], count, seed)
        finally:
            os._exit(1)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        for fd, path in zip(fds, sockets, strict=True):
            os.close(fd)
            path.chmod(0o600)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


@contextmanager
def _nothing(_servers: Sequence[int]) -> Iterator[None]:
    yield


@contextmanager
def _memory_of_servers(servers: Sequence[int]) -> Iterator[None]:
    """All servers together get 128 MiB."""
    with memory_group() as group:
        group.limit(_SERVERS_BYTES)
        before = {pid: _group_of(pid) for pid in servers}
        try:
            for pid in servers:
                group.members.write_text(str(pid))
            yield
        finally:
            for pid, path in before.items():
                with suppress(OSError):
                    (path / "cgroup.procs").write_text(str(pid))


def _group_of(pid: int) -> Path:
    """Return the group with that process; where version 2 has memory, it is the only
    line of the file (cgroups(7))."""
    with memory_group() as group:
        root = group.path.parent
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        if names in ("", "memory") and (found := root / path.lstrip("/")).is_dir():
            return found
    return root


@contextmanager
def _memory_of_others(_servers: Sequence[int]) -> Iterator[None]:
    """Others take memory until the OOM killer takes them, again and again."""
    code = "a = []\nwhile True: a.append(bytearray(1 << 20))"
    with memory_group() as group:
        group.limit(_OTHERS_BYTES)
        join = f"open({str(group.members)!r}, 'w').write('0')\n"
        killed = [0]

        def take() -> None:
            done = subprocess.run([sys.executable, "-c", join + code])
            killed[0] += done.returncode == -signal.SIGKILL

        with campaign.repeated(take):
            yield
        options.progress(f"the OOM killer took {killed[0]} other processes")


@contextmanager
def _cpus(_servers: Sequence[int]) -> Iterator[None]:
    with ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(hogs("normal"))
        yield


@contextmanager
def _descriptors(servers: Sequence[int]) -> Iterator[None]:
    """The soft limits of servers and daemon are below what each has open, again and
    again; both may raise them."""
    supervisors = {_parent_of(pid) for pid in servers} - {1}

    def lower() -> None:
        for pid in (*servers, *supervisors):
            with suppress(OSError):
                _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
                resource.prlimit(pid, resource.RLIMIT_NOFILE, (_FEW_FILES, hard))

    try:
        with campaign.repeated(lower, pause_s=0.2):
            yield
    finally:
        for pid in (*servers, *supervisors):
            with suppress(OSError):
                _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
                resource.prlimit(pid, resource.RLIMIT_NOFILE, (hard, hard))


def _parent_of(pid: int) -> int:
    text = Path(f"/proc/{pid}/stat").read_text()
    return int(text.rpartition(")")[2].split()[1])


@contextmanager
def _disk(_servers: Sequence[int]) -> Iterator[None]:
    """The disk of run and state directories, as of logs, is full."""
    filler = Path(os.environ[RUN_VARIABLE]).parent / "filler"
    try:
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4 * KIB))
        yield
    finally:
        filler.unlink()


KINDS: dict[str, Callable[[Sequence[int]], object]] = {
    "clients": _nothing,
    "memory of servers": _memory_of_servers,
    "memory of others": _memory_of_others,
    "CPUs": _cpus,
    "descriptors": _descriptors,
    "disk": _disk,
}


def _round(
    result: Result,
    devices: Sequence[Device],
    readers: int,
    clients: int,
    seed: int,
    length_s: float,
    deadline_s: float,
) -> None:
    """Note what of one round is wrong."""
    kind, faults = result["kind"], result["problems"]
    names = [device.name for device in devices]
    servers = []
    for name in names:
        state = show_device(name).state
        assert state.server is not None
        servers.append(state.server.pid)
    sockets = [device_directory(name).path / "control" for name in names]
    paths = [device.path for device in devices if device.path is not None]
    answered_s = 0.0
    with (
        crowd(sockets, clients, seed) as crowd_pid,
        KINDS[kind](servers),  # type: ignore[attr-defined]
        ExitStack() as stack,
    ):
        each_has = max(1, readers // len(paths))
        reads = [stack.enter_context(reading(x, threads=each_has)) for x in paths]
        end_s = time.monotonic() + length_s
        while time.monotonic() < end_s:
            begin_s = time.monotonic()
            for name in names[:2]:
                if not show_device(name).is_well:
                    faults.append(f"{name}: {show_device(name).reason}")
            answered_s = max(answered_s, time.monotonic() - begin_s)
            time.sleep(0.5)
        if os.waitpid(crowd_pid, os.WNOHANG)[0]:
            raise RuntimeError("the crowd has ended")
    for path, each in zip(paths, reads, strict=True):
        if each.wrong or each.errors:
            faults.append(f"{path}: {each.wrong} wrong, {each.errors[:3]}")
        if not each.reads:
            faults.append(f"{path}: nothing was read")
    longest_s = max(each.longest_s for each in reads)
    for what, took_s in (("a read", longest_s), ("an answer", answered_s)):
        if took_s > deadline_s:
            faults.append(f"{what} took {took_s:.1f} s")
    for name, pid in zip(names, servers, strict=True):
        state = show_device(name).state
        if state.server is None or state.server.pid != pid:
            log = show_device(name).log.read_text().splitlines()[-12:]
            faults.append(f"the server of {name} has ended: {log}")
    result["reads"] = sum(each.reads for each in reads)
    result |= {"longest_s": longest_s, "answered_s": answered_s}


@campaign.command(
    "load",
    click.option("--devices", "count", type=click.IntRange(1, 64), default=64),
    click.option("--readers", type=campaign.COUNT, default=256),
    click.option("--clients", type=campaign.COUNT, default=10_000),
    click.option(
        "--length", "length_s", type=float, default=15.0, help="Of one, in s."
    ),
    campaign.deadline_option,
    needs=(ROOT, FUSE, LOOP, MEMORY_GROUPS),
    rounds=len(KINDS),
    kinds=KINDS,
    recorded=("count", "readers", "clients"),
)
def command(
    run: Run, count: int, readers: int, clients: int, length_s: float, deadline_s: int
) -> None:
    """Read from many devices while crowds ask their servers, and resources are short.

    Fails when a read is wrong or late, or a server ends or does not answer.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    top = run.directory / "small"
    top.mkdir()
    size = [f"size={_DISK_BYTES}"]
    run.stack.enter_context(mounted("none", top, fs_type="tmpfs", options=size))
    run.stack.enter_context(campaign.apart(top))
    made = DeviceOptions(front_end="fuse", queues=1)
    devices = [
        run.stack.enter_context(supervised_device(DESCRIPTION, made))
        for _ in range(count)
    ]
    options.progress(f"{count} devices")

    def do(result: Result) -> None:
        seed = run.chances.randrange(1 << 31)
        _round(result, devices, readers, clients, seed, length_s, deadline_s)

    run.do_rounds(
        lambda _: nullcontext(do),
        lambda x: f"{x['reads']} reads, the longest took {x['longest_s']:.2f} s, "
        f"status of two devices {x['answered_s']:.2f} s",
    )


if __name__ == "__main__":
    run_command(command, name="load.py")
