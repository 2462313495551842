"""NBD: nbdkit serves memory, or a file on tmpfs; the kernel's client is the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from btrfs_ublk.bench.peer import Peer, Setting, Subject
from btrfs_ublk.bench.stamps import STAMPS, write_content
from btrfs_ublk.capabilities import ROOT, Capability, LoadableModule, Program
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.process import Child, spawn
from btrfs_ublk.resources import blockdev
from btrfs_ublk.resources.kernel_module import loaded_module
from btrfs_ublk.resources.nbd import NBD_CLIENT, connected_nbd
from btrfs_ublk.resources.uevents import wait_until

NBDKIT = Program("nbdkit", "nbdkit")

_DEVICES = 4
_TIMEOUT_S = 20.0


@contextmanager
def _all_devices() -> Iterator[list[Path]]:
    """Those that nobody has taken yet."""
    with loaded_module("nbd", {"nbds_max": _DEVICES, "max_part": 0}):
        devices = [Path(f"/dev/nbd{number}") for number in range(_DEVICES)]
        blockdev.wait_for_node(devices[-1], timeout_s=_TIMEOUT_S)
        yield devices


@dataclass(frozen=True)
class Nbd:
    plugin: Literal["memory", "file"]
    description: str

    layer: ClassVar[Literal["device"]] = "device"
    needs: ClassVar[Sequence[Capability]] = (
        *(ROOT, NBDKIT, NBD_CLIENT),
        LoadableModule("nbd"),
    )

    @property
    def name(self) -> str:
        return f"nbd-{self.plugin}"

    @contextmanager
    def serving(self, setting: Setting) -> Iterator[Subject]:
        devices = setting.shared("nbd", _all_devices)
        server_socket = setting.new_directory("nbd") / "socket"
        with ExitStack() as stack:
            source = str(setting.size_bytes)
            if self.plugin == "file":
                source = str(stack.enter_context(setting.content_file()))
            argv = ["nbdkit", "--foreground", "--unix", str(server_socket)]
            if setting.queues is not None:
                argv += ["--threads", str(setting.queues)]
            server = stack.enter_context(spawn([*argv, self.plugin, source]))
            _wait_listening(server, server_socket)
            device = devices.pop()
            stack.enter_context(connected_nbd(device, server_socket))
            if self.plugin == "memory":
                write_content(device, STAMPS, setting.size_bytes)
            yield Subject(device, STAMPS, [server.pid], writable=setting.writable)


def _wait_listening(server: Child, server_socket: Path) -> None:
    def listening() -> bool:
        if server.returncode is not None:
            raise BtrfsUblkError(server.failure("ended before it listened"))
        return server_socket.exists()

    wait_until(listening, timeout_s=_TIMEOUT_S, what=f"no {server_socket}")


PEERS: Sequence[Peer] = [
    Nbd("memory", "NBD: nbdkit's memory plugin, and the kernel's client"),
    Nbd("file", "NBD: nbdkit's file plugin on tmpfs, and the kernel's client"),
]
