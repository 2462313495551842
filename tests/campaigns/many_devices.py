"""Measures what many idle devices or volumes cost, and how soon they recover.

``python tests/campaigns/many_devices.py --help``
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import campaign
import click
import psutil

from btrfs_ublk.base.entry import run_command
from btrfs_ublk.base.readers import read_direct
from btrfs_ublk.device import Device, DeviceOptions, show_device, supervised_device
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.image import BuildOptions, build_image
from btrfs_ublk.image.build import BuiltImage
from btrfs_ublk.server import Description, FrontEndName, PatternSegment
from btrfs_ublk.units import MIB
from btrfs_ublk.volume import VolumeDefinition, Volumes, fork_image

_DESCRIPTION = Description(64 * MIB, [PatternSegment(offset=0, length=64 * MIB)])
_TIMEOUT_S = 120.0
#: Servers give back what they do not need at rest within this time.
_REST_S = 5.0


def _processes(devices: list[Device]) -> dict[int, str]:
    found = {}
    for device in devices:
        state = show_device(device.name).state
        assert state.supervisor and state.server
        found[state.supervisor.pid] = "daemon"
        found[state.server.pid] = "servers"
        found |= {keeper.process.pid: "keepers" for keeper in state.keepers}
    return found


def pss_bytes(pid: int) -> int:
    """Return what a process has of memory; what n share counts 1/n for each."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    (line,) = [line for line in rollup.splitlines() if line.startswith("Pss:")]
    return int(line.split()[1]) << 10


def _used_bytes() -> int:
    """Return what all processes and the kernel use. NB: images of volumes that are in
    memory (tmpfs) count as well, caches do not."""
    memory = psutil.virtual_memory()
    return int(memory.total - memory.available)


@contextmanager
def _volume_device(
    name: str, base: Path, front_end: FrontEndName, image: bool
) -> Iterator[Device]:
    """Have a new volume up, which is removed at the end, and yield its device. With
    ``image``, it is of an image of its own, with a fork that was written to."""
    volume = Volumes(base).get(name)
    definition = VolumeDefinition(front_end=front_end)
    if image:
        built = _build(base / f"{name}.image", name)
        definition = replace(definition, image=str(built.name))
    try:
        with volume.mounted(definition):
            if image:
                fork = fork_image(name, "one", base=base)
                (fork / "written").write_bytes(os.urandom(4096))
            yield show_device(name)
    finally:
        with suppress(UsageError):  # It was not made.
            volume.remove()


def _build(layout: Path, name: str) -> BuiltImage:
    """Make an image of 16 MiB, which no other one has in common."""
    tree = layout.with_suffix(".tree")
    tree.mkdir()
    for number in range(16):
        (tree / str(number)).write_bytes(os.urandom(MIB))
    built = build_image(tree, layout, BuildOptions(), tag=name)
    shutil.rmtree(tree)
    return built


def _kill_all_and_read(devices: list[Device]) -> float:
    """Kill daemon and servers; return seconds until each device answers a read."""
    processes = _processes(devices)
    (daemon,) = [pid for pid, what in processes.items() if what == "daemon"]
    os.kill(daemon, signal.SIGSTOP)
    for pid, what in processes.items():
        if what == "servers":
            os.kill(pid, signal.SIGKILL)
    started_s = time.monotonic()
    os.kill(daemon, signal.SIGKILL)
    for device in devices:
        assert device.path is not None
        read_direct(device.path, 0, 4096)
    elapsed_s = time.monotonic() - started_s
    while any(show_device(device.name).health != "serving" for device in devices):
        if time.monotonic() > started_s + _TIMEOUT_S:
            raise BtrfsUblkError(f"not all serve again after {_TIMEOUT_S:g} s")
        time.sleep(0.1)
    return elapsed_s


@click.command()
@click.option("--front-end", type=click.Choice(["fuse", "ublk"]), default="fuse")
@click.option("--devices", "count", type=campaign.COUNT, default=64)
@click.option("--volumes", is_flag=True, help="Devices of mounted, empty volumes.")
@click.option("--images", is_flag=True, help="Volumes of images, each with a fork.")
@click.option(
    "--rounds", type=click.IntRange(min=0), default=3, help="In which all is killed."
)
@click.option("--most", "most_mib", type=campaign.COUNT, help="Fail above, in MiB.")
def command(
    front_end: FrontEndName,
    count: int,
    volumes: bool,
    images: bool,
    rounds: int,
    most_mib: int | None,
) -> None:
    """Add devices, one after the other; weigh all processes; kill daemon and servers.

    Memory of processes is Pss: what several of them share counts once in all. With the
    kernel's, it is what the machine has less of than before; --most is for that.
    """
    made = DeviceOptions(front_end=front_end)
    with ExitStack() as stack:
        base = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        used_before = _used_bytes()
        started_s = time.monotonic()
        devices = [
            stack.enter_context(
                _volume_device(f"many-{number}", base, front_end, images)
                if volumes or images
                else supervised_device(_DESCRIPTION, made)
            )
            for number in range(count)
        ]
        print(f"{count} devices of {front_end} in {time.monotonic() - started_s:.1f} s")
        time.sleep(_REST_S)
        used = _used_bytes() - used_before
        sums: defaultdict[str, list[int]] = defaultdict(list)
        for pid, what in _processes(devices).items():
            sums[what].append(pss_bytes(pid))
        for what, sizes in sums.items():
            print(f"{what:8} {len(sizes):4}  {sum(sizes) / MIB:7.1f} MiB")
        total = sum(sum(sizes) for sizes in sums.values())
        each = total / count / MIB
        print(f"all           {total / MIB:7.1f} MiB, {each:.1f} MiB for each device")
        print(f"with kernel   {used / MIB:7.1f} MiB, {used / count / MIB:.1f} for each")
        for _ in range(rounds):
            took_s = _kill_all_and_read(devices)
            print(f"daemon and all servers killed: all read again after {took_s:.1f} s")
        too_much = [f"{count} devices take {used / MIB:.0f} MiB, more than {most_mib}"]
        is_too_much = most_mib is not None and used > most_mib * MIB
        campaign.conclude(too_much if is_too_much else [], rounds=rounds)


if __name__ == "__main__":
    run_command(command, name="many_devices.py")
