"""Checks all abilities of this machine, one after the other."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal

from btrfs_ublk.base.capabilities import (
    BTRFS,
    BTRFS_PROGS,
    FUSE,
    LOOP,
    MKFS_BTRFS,
    REPORT_PACKAGES,
    ROOT,
    UBLK,
    Capability,
    Fio,
    Helper,
    only_looking,
)
from btrfs_ublk.base.helpers import (
    FETCH,
    MKSEED,
    SEED,
    SERVER,
    helper_path,
)
from btrfs_ublk.base.process import run
from btrfs_ublk.device import list_devices, show_device
from btrfs_ublk.errors import BtrfsUblkError, CommandError
from btrfs_ublk.ops.doctor import containerd
from btrfs_ublk.ops.doctor.access import (
    CERTIFICATES,
    DIRECTORIES,
    SYS_ADMIN,
    Openable,
    Unseen,
)
from btrfs_ublk.ops.doctor.install import command_for
from btrfs_ublk.ops.versions import Versions, find_versions, first_line
from btrfs_ublk.server import ServerStats
from btrfs_ublk.server.features import kernel_features

#: "root": only root privileges are missing.
Answer = Literal["yes", "no", "root", "unknown"]

_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Finding:
    """One thing that is needed. ``ok`` is None when this user may not check. ``reason``
    says why, or what is wrong. ``command`` installs it, if one can; else see ``hint``.
    """

    what: str
    ok: bool | None
    reason: str | None = None
    hint: str | None = None
    command: str | None = None


@dataclass(frozen=True)
class Ability:
    """One thing that this machine can do, or not, with what that needs."""

    name: str
    about: str
    answer: Answer
    note: str | None
    findings: tuple[Finding, ...]

    @property
    def missing(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.ok is False]

    @property
    def unseen(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.ok is None]


@dataclass(frozen=True)
class Diagnosis:
    """``usable``: seeds can be made, served by some front end, and mounted.
    ``disk_problems`` are (device, problem) of the maps and caches of running devices.
    """

    versions: Versions
    is_root: bool
    abilities: tuple[Ability, ...]
    disk_problems: tuple[tuple[str, str], ...] = ()

    @property
    def wanting(self) -> list[str]:
        """List what essential abilities are missing; one front end is enough."""
        known = {ability.name: ability for ability in self.abilities}
        core = {
            "make seeds": ("seeds",),
            "serve with fuse or ublk": ("fuse", "ublk"),
            "mount": ("mount",),
        }
        return [
            what
            for what, names in core.items()
            if not any(known[name].answer == "yes" for name in names)
        ]

    @property
    def usable(self) -> bool:
        return not self.wanting

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "usable": self.usable,
            "root": self.is_root,
            "versions": self.versions.to_dict(),
            "abilities": [asdict(ability) for ability in self.abilities],
            "disk_problems": [
                {"device": device, "problem": problem}
                for device, problem in self.disk_problems
            ],
        }


def diagnose() -> Diagnosis:
    """Check everything. Changes nothing: loads no module, makes no file or device."""
    with only_looking():
        return Diagnosis(
            versions=find_versions(),
            is_root=os.geteuid() == 0,
            abilities=tuple(_abilities()),
            disk_problems=tuple(_disk_problems()),
        )


def _disk_problems() -> Iterator[tuple[str, str]]:
    """Yield problems of devices that this user may ask; takes seconds if one hangs."""
    with suppress(BtrfsUblkError, OSError):
        for name in [device.name for device in list_devices()]:
            with suppress(BtrfsUblkError, OSError):
                stats = show_device(name).stats
                for lazy in ServerStats.parse(stats).lazy if stats else ():
                    for problem in lazy.disk_problems():
                        yield name, problem


def _abilities() -> list[Ability]:
    server = Helper(SERVER)
    loop = (LOOP, Openable(LOOP))
    return [
        _look("seeds", "make and check seeds", [Helper(MKSEED), Helper(SEED)]),
        _look(
            "fuse",
            "serve with fuse",
            [ROOT, server, FUSE, Openable(FUSE), *loop],
            lambda: _protocol("fuse"),
        ),
        _look(
            "ublk",
            "serve with ublk",
            [ROOT, server, UBLK, Openable(UBLK)],
            lambda: _protocol("ublk"),
        ),
        _look("mount", "mount and sprout", [ROOT, SYS_ADMIN, BTRFS, *loop]),
        _look("devices", "keep devices", [ROOT, server, DIRECTORIES]),
        _look(
            "lazy", "fetch over HTTP(S)", [server, Helper(FETCH), CERTIFICATES], _fetch
        ),
        _look(
            "btrfs-check",
            "btrfs check of seeds, images",
            [BTRFS_PROGS],
            lambda: first_line("btrfs", "--version"),
        ),
        _look(
            "fallocate",
            "seeds by mkfs.btrfs",
            [ROOT, MKFS_BTRFS, BTRFS, LOOP, Helper(SEED)],
        ),
        _look(
            "benchmarks",
            "benchmarks",
            [ROOT, Fio("io_uring")],
            lambda: first_line("fio", "--version"),
        ),
        _look("report", "report of benchmarks", REPORT_PACKAGES),
        *([_containerd()] if containerd.is_installed() else ()),
    ]


def _containerd() -> Ability:
    about = "containers of containerd"
    return _look("containerd", about, containerd.needs(), containerd.version)


def _look(
    name: str,
    about: str,
    needs: Sequence[Capability],
    note: Callable[[], str | None] = lambda: None,
) -> Ability:
    findings = tuple(_finding(need) for need in needs)
    missing = [finding.what for finding in findings if finding.ok is False]
    answer: Answer = "yes"
    if missing:
        answer = "root" if missing == [ROOT.name] else "no"
    elif any(finding.ok is None for finding in findings):
        answer = "unknown"
    return Ability(name, about, answer, note() if answer == "yes" else None, findings)


def _finding(need: Capability) -> Finding:
    try:
        reason = need.probe()
    except Unseen as error:
        return Finding(need.name, None, str(error))
    except BtrfsUblkError as error:
        reason = error.message
    if reason is None:
        return Finding(need.name, True)
    return Finding(need.name, False, reason, need.hint or None, command_for(need))


def _protocol(name: str) -> str | None:
    with suppress(BtrfsUblkError):
        for each in kernel_features()[0]:
            if each.front_end == name and each.protocol:
                return f"protocol {each.protocol}"
    return None


def _fetch() -> str | None:
    """What the process that asks servers lacks of its confinement here."""
    if os.environ.get("BTRFS_UBLK_FETCH") == "in-process":
        return "by the server itself, as BTRFS_UBLK_FETCH is set"
    try:
        lacks = run(
            [helper_path(FETCH), "--check"], timeout_s=_TIMEOUT_S
        ).stdout.split()
    except (BtrfsUblkError, CommandError) as error:
        return f"the process that asks servers does not start: {error}"
    if not lacks:
        return "by a process without privileges"
    return f"by a process that lacks here: {', '.join(lacks)}"
