"""Kills emulated machines while they work, and starts them with what their disk kept.

``python tests/campaigns/cut_off.py --help``. A guest in QEMU, with Debian's newest
kernel and ublk, does the work of power_work.py on a disk that disks.py serves, and
tells what was acknowledged. At a random moment QEMU is killed. What the disk has then
is what it had at its last flush, and of what was written since nothing, all, or any
sectors of 512 bytes. The next guest looks at it (cut_off_guest.py): `btrfs check`, all
that was acknowledged, all volumes up again; and goes on with it, until it is killed.
Each guest is the same one, whose state was saved when it had booted and done all once.
It has a copy of this machine's files. All random choices follow from --seed.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import random
import select
import shutil
import socket
import subprocess
import sysconfig
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import campaign
import click
from power_work import VOLUMES
from support.disks import (
    MAKE,
    RECORD,
    SECTOR,
    SYNC,
    FileSystem,
    Replay,
    logged_disk,
)
from vmlib import accel, children, command, initramfs, kernel
from vmlib.machine import QEMU, Machine, qemu_argv

from btrfs_ublk.base.capabilities import ROOT, Program, require
from btrfs_ublk.base.entry import run_command
from btrfs_ublk.base.helpers import HELPERS, helper_path
from btrfs_ublk.base.process import run
from btrfs_ublk.bench import options
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.kernel import tempdir
from btrfs_ublk.units import GIB

PROJECT = Path(__file__).parents[2]

_DISK_BYTES = 3 * GIB
_MEMORY = "1G"
_PORTS = ("control", "stdout", "stderr", "stdin")
_LOGS = ("qemu.log", "console")
_BOOT_TIMEOUT_S, _TIMEOUT_S = 900.0, 300.0
_ROOT_DISK = "format=raw,if=none,id=root,readonly=on"
#: It tells the guest of a cache, whose flushes it passes on.
_DATA_DISK = "format=raw,if=none,id=data,cache=none,discard=unmap"
#: Rounds with one disk.
_MOST_ROUNDS = 8
#: How often a guest is killed while it still looks at its disk.
_KILLED_LOOKING = 0.12
#: A guest is killed when so many writes are under way, or after so long.
_UNDER_WAY, _PATIENCE_S = (0, 1, 1, 5, 20), 4.0
#: Of this machine's files, what guests have, beside Python and the project.
_KEPT = (
    *("bin", "etc", "lib", "lib64", "sbin", "usr/bin", "usr/sbin", "usr/lib64"),
    f"usr/lib/{os.uname().machine}-linux-gnu",
)
#: Of the project, what guests run and import.
_PROGRAMS = ("btrfs_ublk", "tests", "tests/campaigns", "scripts/lib/vmlib")


def programs(project: Path, release: str) -> str:
    """Return a digest of what a guest has in its memory once it has been saved: the
    kernel of this release, and the project's programs."""
    digest = hashlib.sha256(release.encode())
    paths = [helper_path(name) for name in HELPERS]
    for name in _PROGRAMS:
        top = project / name
        paths += top.rglob("*.py") if name == "btrfs_ublk" else top.glob("*.py")
    for path in sorted(paths):
        digest.update(
            f"\n{path} ".encode() + hashlib.sha256(path.read_bytes()).digest()
        )
    return digest.hexdigest()


class Writes:
    """Counts, in the log of a disk, how many writes no flush has followed."""

    def __init__(self, log: Path) -> None:
        self._file = log.open("rb")
        self._count = 0

    def under_way(self) -> int:
        at = self._file.tell()
        while len(head := self._file.read(RECORD.size)) == RECORD.size:
            kind, *_, size = RECORD.unpack(head)
            self._count = 0 if kind == SYNC else self._count + 1
            at = self._file.seek(size, os.SEEK_CUR)
        self._file.seek(at)
        return self._count

    def close(self) -> None:
        self._file.close()


class EndedError(BtrfsUblkError):
    """A guest is no more."""


class Guest:
    """A QEMU that runs. Its streams end when it is killed."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        ends: dict[str, socket.socket],
        writes: Writes,
    ) -> None:
        self._process, self._ends, self.writes = process, ends, writes
        self._said = b""

    def say(self, text: str) -> None:
        self._ends["stdin"].sendall(text.encode())

    def hear(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the next message, or None after this time. Raises EndedError when it
        has ended and all has been heard."""
        end_s = time.monotonic() + timeout_s
        while b"\n" not in self._said:
            left_s = max(0.0, end_s - time.monotonic())
            if not select.select([self._ends["stdout"]], [], [], left_s)[0]:
                return None
            got = self._ends["stdout"].recv(1 << 20)
            if not got:
                raise EndedError("QEMU has ended")
            self._said += got
        line, _, self._said = self._said.partition(b"\n")
        try:
            message: dict[str, Any] = json.loads(line)
        except ValueError:
            raise BtrfsUblkError(f"the guest: {self.complaint()}") from None
        return message

    def complaint(self) -> str:
        """Return the end of what it has written to standard error."""
        time.sleep(1)
        self._ends["stderr"].setblocking(False)
        try:
            said = bytes(self._ends["stderr"].recv(1 << 20))[-2000:]
            return said.decode(errors="replace")
        except BlockingIOError:
            return "it said nothing"

    def ask_qemu(self, name: str, **arguments: Any) -> Any:
        """Do a command of the QEMU machine protocol."""
        monitor = self._ends["qmp"]
        monitor.sendall(json.dumps({"execute": name, "arguments": arguments}).encode())
        got = b""
        while chunk := monitor.recv(1 << 16):
            got += chunk
            for line in got.splitlines(keepends=True):
                if line.endswith(b"\n"):
                    answer = json.loads(line)
                    if "return" in answer:
                        return answer["return"]
                    if "error" in answer:
                        raise BtrfsUblkError(f"QEMU: {answer['error']['desc']}")
        raise EndedError("QEMU has ended")

    def kill(self) -> None:
        children.stop(self._process)


class Machines:
    """Makes guests, which are all the same, by what is in the directory ``saved``,
    if that is of the programs that there are now; other files are in ``top``."""

    def __init__(self, top: Path, saved: Path) -> None:
        self._top = top
        self._kernel = kernel.find("latest")
        self._root, self._state = saved / "root", saved / "state"
        self._initramfs = saved / "initramfs"
        made_of, now = saved / "programs", programs(PROJECT, self._kernel.release)
        if self._state.exists():
            if made_of.exists() and made_of.read_text() == now:
                return
            options.progress(f"{saved} has a guest of other programs: one boots anew")
            self._state.unlink()
            self._root.unlink(missing_ok=True)
        made_of.write_text(now)
        self._copy_root()
        self._make_initramfs()
        self._boot()

    def _make_initramfs(self) -> None:
        guest = PROJECT / "tests/campaigns/cut_off_guest.py"
        environment = command.guest_environment({}, {}, PROJECT)
        modules = f"{self._kernel.modules_base}/lib/modules/{self._kernel.release}"
        config = {
            "PROJECT": str(PROJECT),
            "MODULES": modules,
            "GUEST_NAME": "btrfs-ublk-vm",
            "ROOT_DISK": "/dev/vda",
            "END_MARK": "",
            "STDIN": "yes",
        }
        initramfs.build(
            self._initramfs,
            kernel=self._kernel,
            modules=("virtio_blk", "erofs"),
            files={
                "config": command.guest_config(config),
                "command": command.command_script(
                    [str(PROJECT / ".venv/bin/python"), str(guest), "/dev/vdb"],
                    environment,
                    cwd=str(PROJECT),
                    project=PROJECT,
                ),
            },
        )

    def _copy_root(self) -> None:
        assert self._kernel.modules_base is not None
        python = Path(sysconfig.get_path("stdlib"))
        kept = [Path("/", name) for name in _KEPT]
        kept += [PROJECT, python, self._kernel.modules_base]
        if python.parent != Path("/usr/lib"):
            kept += [python.parent, python.parents[1] / "bin"]
        left_out = [f"{str(python)[1:]}/{name}" for name in ("site-packages", "test")]
        for above in {parent for path in kept for parent in path.parents}:
            if any(above.is_relative_to(path) for path in kept):
                continue
            for path in above.iterdir():
                if not any(each.is_relative_to(path) for each in kept):
                    left_out.append(str(path.relative_to("/")))
        words = [f"--exclude-path={path}" for path in left_out]
        run(
            ["mkfs.erofs", "--quiet", "-x-1", *words, self._root, "/"],
            timeout_s=_TIMEOUT_S,
        )

    @contextmanager
    def guest(self, log: Path, *, is_saved: bool = True) -> Iterator[Guest]:
        """Start a guest with the disk top/disk; it goes on from the saved state, or
        boots. It is killed when the block ends."""
        machine = Machine(
            kernel=self._kernel,
            initramfs=self._initramfs,
            memory=_MEMORY,
            cpus=2,
            kvm=accel.kvm_works(self._kernel),
            icount=False,
            console=self._top / _LOGS[1],
        )
        with ExitStack() as stack:
            shown = self._top / "shown"
            shown.mkdir(exist_ok=True)
            disk = stack.enter_context(logged_disk(self._top / "disk", log, shown))
            writes = stack.enter_context(closing(Writes(log)))
            ends, theirs = dict[str, socket.socket](), dict[str, socket.socket]()
            for name in (*_PORTS, "qmp"):
                pair = socket.socketpair()
                ends[name], theirs[name] = map(stack.enter_context, pair)
                ends[name].settimeout(_TIMEOUT_S)
            ports = {name: theirs[name].fileno() for name in _PORTS}
            argv = [
                *qemu_argv(machine, ports=ports),
                *("-drive", f"file={self._root},{_ROOT_DISK}"),
                *("-device", "virtio-blk-pci,drive=root"),
                *("-drive", f"file={disk},{_DATA_DISK}"),
                *("-device", "virtio-blk-pci,drive=data"),
                *("-chardev", f"socket,id=qmp,fd={theirs['qmp'].fileno()}"),
                *("-mon", "chardev=qmp,mode=control"),
            ]
            if is_saved:
                argv += ["-incoming", f"exec:cat {self._state}"]
            with (self._top / _LOGS[0]).open("ab") as talk:
                process = children.spawn(
                    argv,
                    log=talk.fileno(),
                    pass_fds=[each.fileno() for each in theirs.values()],
                )
            stack.callback(children.stop, process)
            for each in theirs.values():
                each.close()
            guest = Guest(process, ends, writes)
            try:
                guest.ask_qemu("qmp_capabilities")
                yield guest
            except (BtrfsUblkError, OSError) as error:
                logs = [self._top / name for name in _LOGS]
                said = [x.read_text(errors="replace")[-1500:] for x in logs]
                raise BtrfsUblkError("\n".join([str(error), *said])) from error

    def _boot(self) -> None:
        """Boot, and save the state when the guest is ready."""
        _make_disk(self._top / "disk", "btrfs")
        with self.guest(Path("/dev/null"), is_saved=False) as guest:
            if guest.hear(_BOOT_TIMEOUT_S) != {"ready": True}:
                raise BtrfsUblkError(f"the guest is not ready: {guest.complaint()}")
            guest.ask_qemu("stop")
            state = self._top / "state"
            guest.ask_qemu("migrate", uri=f"exec:cat > {state}")
            _wait_for_state(guest)
        shutil.move(state, self._state)


def _wait_for_state(guest: Guest) -> None:
    """Wait until the state of a guest has been saved, or loaded."""
    end_s = time.monotonic() + _TIMEOUT_S
    while (found := guest.ask_qemu("query-migrate").get("status")) != "completed":
        if found == "failed" or time.monotonic() > end_s:
            raise BtrfsUblkError("the guest's state cannot be saved, or loaded")
        time.sleep(0.1)


def _make_disk(disk: Path, kind: FileSystem) -> None:
    disk.unlink(missing_ok=True)
    with disk.open("wb") as file:
        file.truncate(_DISK_BYTES)
    run([*MAKE[kind], disk], timeout_s=_TIMEOUT_S)


class Rounds:
    def __init__(
        self,
        machines: Machines,
        top: Path,
        *,
        seed: int,
        work_s: float,
        kept: Path | None,
    ) -> None:
        self._kept = kept
        self._machines, self._top, self._work_s = machines, top, work_s
        self._chances = random.Random(seed)
        self._kind: FileSystem = "btrfs"
        self._left = 0
        #: As the guest gets them: begun, done, values, whole.
        self._events: list[list[Any]] = []
        self._number = 0

    def run(self) -> dict[str, Any]:
        """Start a guest, have it look and work, and kill it. Return what was, with a
        list of ``problems``, after which there is a new disk, and whether it has
        ``looked`` at what an earlier one left."""
        try:
            result = self._run()
        except BtrfsUblkError as error:
            result = {"problems": [str(error)], "looked": True}
        if result["problems"]:
            self._left, self._events = 0, []
            initial = self._top / "initial"
            if self._kept is not None and initial.exists():
                shutil.move(initial, self._kept / f"disk-{self._number}")
        return result

    def _run(self) -> dict[str, Any]:
        begun_s = time.monotonic()
        disk, log, initial = (self._top / x for x in ("disk", "log", "initial"))
        has_worked = bool(self._events)
        is_last = has_worked and not self._left  # only looks
        if not has_worked:
            self._kind = self._chances.choice(["btrfs", "btrfs", "ext4"])
            self._left = self._chances.randint(2, _MOST_ROUNDS)
            _make_disk(disk, self._kind)
        self._left -= not is_last
        self._number += 1
        initial.unlink(missing_ok=True)
        run(["cp", "--sparse=always", disk, initial], timeout_s=_TIMEOUT_S)
        log.unlink(missing_ok=True)
        if self._kind == "btrfs":
            run(["btrfs", "check", "--readonly", disk], timeout_s=_TIMEOUT_S)
        work_s = self._chances.uniform(0, self._work_s)
        wanted = self._chances.choice(_UNDER_WAY)
        may_be_short = has_worked and not is_last
        is_cut_short = may_be_short and self._chances.random() < _KILLED_LOOKING
        asked = {
            "seed": self._chances.randrange(1 << 30),
            "boot_id": str(uuid.UUID(int=self._chances.getrandbits(128))),
            "random": base64.b64encode(self._chances.randbytes(64)).decode(),
            "number": 10_000 * self._number,
            "kind": self._kind,
            "events": self._events,
        }
        with self._machines.guest(log) as guest:
            _wait_for_state(guest)
            guest.ask_qemu("cont")
            guest.say(json.dumps(asked) + "\n")
            found = guest.hear(work_s if is_cut_short else _TIMEOUT_S)
            if found is None:
                if not is_cut_short:
                    raise BtrfsUblkError(f"the guest hangs: {guest.complaint()}")
                guest.kill()
                found, events = {"problems": [], "found": None}, self._may_be_done()
            elif is_last:
                events = []
            else:
                events = self._attend(guest, work_s, wanted, found["problems"])
            looked_s = time.monotonic() - begun_s - work_s
        if found["found"] is not None:
            self._events = [[0, 1, found["found"], True]]
        self._events = [] if is_last else [*self._events, *events]
        mode = self._chances.choice(["none", "all", "some", "some", "some"])
        replay = Replay(initial, log, self._top / "durable", sector_bytes=SECTOR)
        replay.advance(len(replay.records))
        replay.lay_out(disk, mode, self._chances)
        return {
            "problems": found["problems"],
            "looked": has_worked and found["found"] is not None,
            "file system": self._kind,
            "looked_s": looked_s,
            "work_s": work_s,
            "took_s": time.monotonic() - begun_s,
            "acknowledged": sum(each[1] == 1 for each in events),
            "writes": len(replay.records),
            "under way": replay.under_way()[-1],
            "kept": mode,
        }

    def _may_be_done(self) -> list[list[Any]]:
        """Return what a guest may have done that was killed while it still looked:
        volumes come up, and images go that nobody uses."""
        keys = [key for *_, values, _ in self._events for key, _ in values]
        up = [[["volume", name], True] for name in VOLUMES]
        gone = [[key, None] for key in keys if key[0] == "image"]
        writable = [[["writable", name], 0] for name in VOLUMES]
        return [[0, 2, [*up, *gone], True], [0, 2, writable, False]]

    def _attend(
        self, guest: Guest, work_s: float, under_way: int, problems: list[str]
    ) -> list[list[Any]]:
        """Let the guest work for so long, and kill it while so many writes are under
        way; return what it has promised."""
        events: dict[int, list[Any]] = {}
        end_s = time.monotonic() + work_s
        try:
            while True:
                now_s = time.monotonic()
                late = now_s > end_s + _PATIENCE_S
                if late or (now_s > end_s and guest.writes.under_way() >= under_way):
                    guest.kill()
                message = guest.hear(max(0.001, end_s - now_s))
                if message is None:
                    continue
                if "problems" in message:
                    problems += message["problems"]
                elif "done" in message:
                    events[message["done"]][1] = 1
                else:
                    values, whole = message["values"], message["whole"]
                    events[message["begun"]] = [0, 2, values, whole]
        except EndedError:
            return list(events.values())


@click.command(context_settings=campaign.SETTINGS)
@click.option(
    "--rounds",
    type=campaign.COUNT,
    default=100,
    help="Guests to look at what one that was killed has left.",
)
@click.option(
    "--work",
    "work_s",
    type=click.FloatRange(min=0),
    default=20,
    metavar="SECONDS",
    help="A guest is killed at most so long after it has looked.",
)
@campaign.seed_option
@campaign.limit_option
@options.parent_option
@click.option(
    "--saved",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="A directory for the guest that has booted, or with that of an earlier run;"
    " one of other programs than now is made anew.",
)
@click.option(
    "--keep",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="A directory for the disks of which something was wrong.",
)
def main(
    rounds: int,
    work_s: float,
    seed: int,
    limit_s: float,
    parent: Path,
    saved: Path | None,
    keep: Path | None,
) -> None:
    """Kill emulated machines that work, with the cache of their disks.

    Fails when anything that was acknowledged is missing or wrong, or does not go on.
    """
    require(
        ROOT, Program(QEMU, "qemu-system-x86"), Program("mkfs.erofs", "erofs-utils")
    )
    os.umask(0o077)  # guests have files that not everybody may read
    begun_s = time.monotonic()
    end_s = begun_s + limit_s
    faults: list[str] = []
    done = 0
    with tempdir(parent=parent) as top:
        machines = Machines(top, saved or top)
        options.progress(f"ready after {time.monotonic() - begun_s:.0f} s")
        made = Rounds(machines, top, seed=seed, work_s=work_s, kept=keep)
        while done < rounds and time.monotonic() < end_s:
            result = made.run()
            done += result["looked"]
            faults += [f"round {done}: {each}" for each in result["problems"]]
            options.progress(f"{done}: {json.dumps(result)}")
    campaign.conclude(faults, rounds=done, seed=seed)


if __name__ == "__main__":
    run_command(main, name="cut_off.py")
