"""Other projects' block servers: nbdkit with the kernel's NBD client, rublk, and ubdsrv
(ublksrv), the ublk server by the author of ublk.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from btrfs_ublk.base.capabilities import ROOT, UBLK, Capability, Program
from btrfs_ublk.base.process import Child, spawn
from btrfs_ublk.bench.known_content import STAMPS, Content, write_content
from btrfs_ublk.bench.peer import Peer, Setting, Subject
from btrfs_ublk.bench.resources.foreign import foreign_device
from btrfs_ublk.bench.resources.kernel_module import LoadableModule, loaded_module
from btrfs_ublk.bench.resources.nbd import NBD_CLIENT, connected_nbd
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.kernel import blockdev
from btrfs_ublk.kernel.uevents import wait_until
from btrfs_ublk.server import ZeroSegment

NBDKIT = Program("nbdkit", "nbdkit")
_NBD_DEVICES = 4
_TIMEOUT_S = 20.0
#: Variables that name the programs if they are not on PATH.
RUBLK_VARIABLE, UBDSRV_VARIABLE = "BTRFS_UBLK_RUBLK", "BTRFS_UBLK_UBDSRV"


@contextmanager
def _all_nbd() -> Iterator[list[Path]]:
    """Yield the devices that no peer has taken yet."""
    with loaded_module("nbd", {"nbds_max": _NBD_DEVICES, "max_part": 0}):
        devices = [Path(f"/dev/nbd{number}") for number in range(_NBD_DEVICES)]
        blockdev.wait_for_node(devices[-1], timeout_s=_TIMEOUT_S)
        yield devices


@contextmanager
def _nbd(plugin: str, setting: Setting) -> Iterator[Subject]:
    devices = setting.shared("nbd", _all_nbd)
    server_socket = setting.new_directory("nbd") / "socket"
    with ExitStack() as stack:
        source = str(setting.size_bytes)
        if plugin == "file":
            source = str(stack.enter_context(setting.content_file()))
        argv = ["nbdkit", "--foreground", "--unix", str(server_socket)]
        if setting.queues is not None:
            argv += ["--threads", str(setting.queues)]
        server = stack.enter_context(spawn([*argv, plugin, source]))
        _wait_listening(server, server_socket)
        device = devices.pop()
        stack.enter_context(connected_nbd(device, server_socket))
        if plugin == "memory":
            write_content(device, STAMPS, setting.size_bytes)
        yield Subject(device, STAMPS, [server.pid], writable=setting.writable)


def _wait_listening(server: Child, server_socket: Path) -> None:
    def listening() -> bool:
        if server.returncode is not None:
            raise BtrfsUblkError(server.failure("ended before it listened"))
        return server_socket.exists()

    wait_until(listening, timeout_s=_TIMEOUT_S, what=f"no {server_socket}")


def _found(name: str, variable: str) -> str | None:
    return shutil.which(os.environ.get(variable) or name)


def _missing(name: str, variable: str) -> str | None:
    if _found(name, variable):
        return None
    named = os.environ.get(variable)
    where = f"at {named}, as {variable} says" if named else "on PATH"
    return f"the program {name} is not {where}"


@dataclass(frozen=True)
class _Rublk:
    name: ClassVar[str] = "rublk"
    cure: ClassVar[str] = f"cargo install rublk; or name it in {RUBLK_VARIABLE}"

    def path(self) -> str:
        return _found(self.name, RUBLK_VARIABLE) or self.name

    def probe(self) -> str | None:
        return _missing(self.name, RUBLK_VARIABLE)


RUBLK = _Rublk()


@dataclass(frozen=True)
class Ubdsrv:
    """The program of one target, ublk.TARGET, beside "ublk". Unlike "ublk", which
    starts it in the background, it stays in the foreground itself.
    """

    target: str

    name: ClassVar[str] = "ubdsrv"
    cure: ClassVar[str] = (
        f"build ublksrv (github.com/ublk-org), name its ublk in {UBDSRV_VARIABLE}"
    )

    def manager(self) -> str:
        """Return the path of "ublk" itself, which removes devices."""
        return os.path.realpath(_found("ublk", UBDSRV_VARIABLE) or "ublk")

    def path(self) -> Path:
        return Path(f"{self.manager()}.{self.target}")

    def probe(self) -> str | None:
        missing = _missing("ublk", UBDSRV_VARIABLE)
        if missing is None and not os.access(self.path(), os.X_OK):
            return f"there is no {self.path()} (before version 1.2 it had none)"
        return missing


@contextmanager
def _ublk_server(project: str, target: str, setting: Setting) -> Iterator[Subject]:
    if project == RUBLK.name:
        argv = [RUBLK.path(), "add", target, "--foreground", "--quiet"]
        queues, depth, file = "--queue", "--depth", ["--read-only", "--file"]
        delete = [RUBLK.path(), "del", "--number"]
    else:
        program = Ubdsrv(target)
        argv = [str(program.path()), "add", "-t", target]
        queues, depth, file = "-q", "-d", ["-f"]
        delete = [program.manager(), "del", "-n"]
    for option, value in ((queues, setting.queues), (depth, setting.depth)):
        argv += [] if value is None else [option, str(value)]
    content: Content = ZeroSegment(offset=0, length=setting.size_bytes)
    if target == "loop":
        content = STAMPS
        argv += [*file, str(setting.source_file())]
    with foreign_device(argv, delete=delete) as device:
        yield Subject(device.path, content, [device.pid])


def _peers() -> Iterator[Peer]:
    needs: Sequence[Capability] = (ROOT, NBDKIT, NBD_CLIENT, LoadableModule("nbd"))
    for plugin, what in (("memory", "memory plugin"), ("file", "file plugin on tmpfs")):
        description = f"NBD: nbdkit's {what}, and the kernel's client"
        yield Peer(f"nbd-{plugin}", "device", description, needs, partial(_nbd, plugin))
    for project in ("rublk", "ubdsrv"):
        for target, what in (
            ("null", "completes every request at once, reads zeroes"),
            ("loop", "a file on tmpfs, by io_uring and direct I/O"),
        ):
            program = RUBLK if project == "rublk" else Ubdsrv(target)
            yield Peer(
                f"{project}-{target}",
                "device",
                f"{project}: {what}",
                (ROOT, UBLK, program),
                partial(_ublk_server, project, target),
            )


PEERS = list(_peers())
