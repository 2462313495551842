"""Fixtures of all tests: a place of their own, capabilities, and "nothing is left"."""

from __future__ import annotations

import ctypes
import functools
import gc as garbage
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import psutil
import pytest
from hypothesis import HealthCheck, settings
from sanitized_build import (  # noqa: F401  (fixtures for all)
    sanitized_build,
    sanitized_helpers,
)

from btrfs_ublk.capabilities import (
    BTRFS,
    FUSE,
    LOOP,
    ROOT,
    UBLK,
    sparse_directory,
)
from btrfs_ublk.device.locks import registry_locked
from btrfs_ublk.device.state import RUN_VARIABLE, devices_directory
from btrfs_ublk.ledger import process_ledger
from btrfs_ublk.resources.mountinfo import read_mountinfo
from btrfs_ublk.resources.ublk_devices import list_ublk_devices
from btrfs_ublk.server import BlockServer, FrontEndName
from btrfs_ublk.server.features import kernel_features
from btrfs_ublk.testing.requirements import need as require
from btrfs_ublk.testing.settings import REQUIRE_VARIABLE

# Machines differ in speed, and a failure must come again: no deadline, fixed examples.
settings.register_profile(
    "btrfs-ublk",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("btrfs-ublk")

#: A project of its own, whose tests test_wheel.py runs.
collect_ignore = ["example_project"]

#: Sparse files up to the largest seed.
SPARSE_BYTES = 8 << 60
#: Tests with one of these markers must leave the system as it was.
SYSTEM_MARKERS = ("native", "ublk")
#: What the backing files of loop devices on servers' files are called, before the tag.
SERVED_PREFIX = "/btrfs-ublk-"
#: Where other users of this machine may keep ledgers: real ones, and other test runs'.
LEDGERS = (
    *("var/lib/btrfs-ublk", "run/btrfs-ublk"),
    *(f"{x}/btrfs-ublk-tests-*/state" for x in ("tmp", "dev/shm")),
)

#: The same of devices that outlive their makers.
DEVICES = (
    "run/btrfs-ublk/devices",
    *(f"{x}/btrfs-ublk-tests-*/run/devices" for x in ("tmp", "dev/shm")),
)

#: How long a process that was killed, or lost its parent, may take to be gone.
ORPHAN_TIMEOUT_S = 5.0
_SIGNAL_HANDLERS = {
    number: signal.getsignal(number)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
}
_GUARDIAN = " -m btrfs_ublk.testing.guardian "
_PR_SET_CHILD_SUBREAPER = 36

Need = Callable[..., None]
Serve = Callable[..., BlockServer]


def pytest_configure() -> None:
    """Orphans of the processes that tests start, servers above all, become ours: they
    would not be seen as left otherwise (prctl(2)).
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def inapplicable(reason: str) -> NoReturn:
    """End a test that is about what this kernel cannot have. Unlike a skip, that is
    nothing missing: scripts/test does not count it, and another kernel's part has it.
    """
    pytest.skip(f"does not apply: {reason}")


@functools.cache
def _driver_has_known_crash() -> bool:
    # 6.16 is the first with the fix that can be told from those without.
    ublk = kernel_features()[0][0]
    return not any(x.name == "quiesce" and x.offered for x in ublk.features)


def may_be_killed(front_end: FrontEndName) -> None:
    """End a test that kills servers under load where the kernel would crash of that:
    ublk of Linux 6.7 to 6.14 (f40139fde527 is in 6.15), a panic in some 25 kills.
    """
    if front_end == "ublk" and _driver_has_known_crash():
        inapplicable(
            "this kernel may crash when ublk servers are killed: docs/limits.md"
        )


@pytest.fixture(scope="session")
def need(request: pytest.FixtureRequest) -> Need:
    """``need(ROOT, LOOP)`` skips the test where one is missing; fails it under
    BTRFS_UBLK_REQUIRE=1.
    """
    return functools.partial(require, request.config)


@pytest.fixture(
    params=[
        pytest.param("fuse", marks=[pytest.mark.native, pytest.mark.fuse]),
        pytest.param("ublk", marks=pytest.mark.ublk),
    ]
)
def front_end(request: pytest.FixtureRequest) -> FrontEndName:
    """Each in turn, where the kernel has it: what must hold for all front ends."""
    name: FrontEndName = request.param
    require(request.config, *((UBLK,) if name == "ublk" else (FUSE, LOOP)))
    return name


@pytest.fixture
def no_devices() -> Iterator[None]:
    """After the test: what it has added by `btrfs-ublk device` is removed."""
    from device_support import remove_all

    yield
    remove_all()


@pytest.fixture
def serve(front_end: FrontEndName) -> Serve:
    """BlockServer(), with each front end in turn."""
    return functools.partial(BlockServer, front_end=front_end)


@pytest.fixture(scope="session", autouse=True)
def test_root() -> Iterator[Path]:
    """Where everything that the tests make stands: state directory, temporary files."""
    where = sparse_directory(
        SPARSE_BYTES - 4096, candidates=(tempfile.gettempdir(), "/dev/shm")
    )
    root = Path(tempfile.mkdtemp(prefix="btrfs-ublk-tests-", dir=where))
    state = root / "state"
    state.mkdir(mode=0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BTRFS_UBLK_STATE_DIR", str(state))
        patch.setenv(RUN_VARIABLE, str(root / "run"))
        patch.setenv("TMPDIR", str(root))
        patch.setattr(tempfile, "tempdir", str(root))
        # Made before the first snapshot: they are in all of them.
        process_ledger()
        with registry_locked(devices_directory(make=True)):
            pass
        yield root
        process_ledger().close()
    shutil.rmtree(root)


@pytest.fixture
def sparse_path(test_root: Path) -> Iterator[Path]:
    """An empty directory for one test, which holds sparse files of any size."""
    path = Path(tempfile.mkdtemp(prefix="test-", dir=test_root))
    yield path
    shutil.rmtree(path)


@dataclass(frozen=True)
class SystemState:
    """What a test must leave as it was."""

    loop_devices: dict[str, str]
    mounts: dict[str, str]
    ublk_devices: list[int]
    children: list[str]
    files: list[str]
    ledger_entries: list[str]
    open_files: int


def children() -> list[str]:
    """The living processes that tests have started, and those which they started.

    Orphans may still be ending, so there is some time for all to go. Zombies do not
    count: whoever made one may not have asked for its status yet. Nor does the plugin's
    guardian, which stays for as long as the session.
    """
    deadline_s = time.monotonic() + ORPHAN_TIMEOUT_S
    while True:
        found = []
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                command = " ".join(child.cmdline())
                if child.status() != psutil.STATUS_ZOMBIE and _GUARDIAN not in command:
                    found.append(f"{child.pid} {command}")
        if not found or time.monotonic() > deadline_s:
            return found
        time.sleep(0.02)


def system_state(root: Path) -> SystemState:
    """The state as far as it is the tests' own: others may use this machine too. With
    BTRFS_UBLK_REQUIRE=1, in CI, they may not, and all of it counts.
    """
    garbage.collect()  # an error's traceback may still hold files open
    everything = os.environ.get(REQUIRE_VARIABLE) == "1"
    loops = {}
    for link in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            backing = link.read_text().strip()
        except OSError:
            continue
        served = backing.startswith(SERVED_PREFIX) and not _is_elsewhere(link, backing)
        if everything or served or backing.startswith(str(root)):
            loops[link.parent.parent.name] = backing
    mounts = {
        str(mount.target): mount.source
        for mount in read_mountinfo()
        if everything
        or root in mount.target.parents
        or Path(mount.source).name in loops
    }
    return SystemState(
        loop_devices=loops,
        mounts=mounts,
        ublk_devices=[device.device_id for device in list_ublk_devices()],
        children=children(),
        files=sorted(
            str(path)
            for path in root.rglob("*")
            # pytest's own tmp_path keeps directories on purpose.
            if not path.relative_to(root).parts[0].startswith("pytest-of-")
        ),
        ledger_entries=[str(entry) for entry in process_ledger().entries()],
        open_files=len(os.listdir("/proc/self/fd")),
    )


def _is_elsewhere(link: Path, backing: str) -> bool:
    """Whether a device on a server's file is of others than these tests."""
    tag = backing.removeprefix(SERVED_PREFIX)
    ours = Path(os.environ["BTRFS_UBLK_STATE_DIR"]).parent
    patterns = [f"{ledgers}/*.ledger" for ledgers in LEDGERS]
    patterns += [f"{devices}/*/device.json" for devices in DEVICES]
    for pattern in patterns:
        for file in Path("/").glob(pattern):
            with suppress(OSError):
                if ours not in file.parents and tag in file.read_text():
                    return True
    state = os.environ["BTRFS_UBLK_STATE_DIR"]
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # its server has the environment of its owner
            if tag in process.cmdline():
                return process.environ().get("BTRFS_UBLK_STATE_DIR") != state
    return not link.exists()  # and its ledger with it, while we looked


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test with a system marker leaves the system as it was."""
    # Of tests of the plugin, which load the package a second time.
    for number, handler in _SIGNAL_HANDLERS.items():
        signal.signal(number, handler)
    if not any(map(request.node.get_closest_marker, SYSTEM_MARKERS)):
        yield
        return
    require(request.config, ROOT)
    if request.node.get_closest_marker("native"):
        require(request.config, BTRFS, LOOP)
    root = request.getfixturevalue("test_root")
    before = system_state(root)
    # What lives now need not be looked at again, at each test, by each collection: with
    # that, 54 short tests took 40 s, without 17.
    garbage.freeze()
    yield
    assert system_state(root) == before


@pytest.fixture
def state_of_system(test_root: Path) -> Callable[[], SystemState]:
    """For tests that compare in their midst: after each of many runs, say."""
    return lambda: system_state(test_root)
