"""Fixtures of all tests: directories, capabilities, and checks that nothing is left."""

from __future__ import annotations

import ctypes
import functools
import gc as garbage
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import parallel
import psutil
import pytest
from hypothesis import HealthCheck, settings
from sanitized_build import (  # noqa: F401  (fixtures for all)
    sanitized_build,
    sanitized_helpers,
)

from btrfs_ublk.base.capabilities import (
    BTRFS,
    FUSE,
    LOOP,
    ROOT,
    UBLK,
    sparse_directory,
)
from btrfs_ublk.base.ledger import process_ledger
from btrfs_ublk.device.locks import registry_locked
from btrfs_ublk.device.state import RUN_VARIABLE, devices_directory
from btrfs_ublk.kernel.mountinfo import read_mountinfo
from btrfs_ublk.kernel.ublk_devices import list_ublk_devices
from btrfs_ublk.server import BlockServer, FrontEndName
from btrfs_ublk.server.features import kernel_features
from btrfs_ublk.testing.requirements import need as require
from btrfs_ublk.testing.settings import REQUIRE_VARIABLE

# No deadline, as machines differ in speed. Fixed examples, so that failures come again.
settings.register_profile(
    "btrfs-ublk",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("btrfs-ublk")

#: This is a separate project, whose tests test_wheel.py runs.
collect_ignore = ["example_project"]

#: Sparse files up to the largest seed.
SPARSE_BYTES = 8 << 60
#: Tests with one of these markers must leave the system as it was.
SYSTEM_MARKERS = ("native", "ublk")
#: Backing files of FUSE servers' loop devices are called this and the tag.
SERVED_PREFIX = "/btrfs-ublk-"
#: Where other processes of this machine may keep ledgers, other test runs included.
LEDGERS = (
    *("var/lib/btrfs-ublk", "run/btrfs-ublk"),
    *(f"{x}/btrfs-ublk-tests-*/state" for x in ("tmp", "dev/shm")),
)

#: Where they may keep the state of devices that outlive their makers.
DEVICES = (
    "run/btrfs-ublk/devices",
    *(f"{x}/btrfs-ublk-tests-*/run/devices" for x in ("tmp", "dev/shm")),
)

#: Backing files of servers that others made: a tag is used once, and to look is slow.
_elsewhere: set[str] = set()

#: How long a killed or orphaned process may take to end.
ORPHAN_TIMEOUT_S = 5.0
_SIGNAL_HANDLERS = {
    number: signal.getsignal(number)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
}
_GUARDIAN = " -m btrfs_ublk.testing.guardian "
#: What children() returned before the last test: servers of fixtures of a wider scope.
_SERVERS = pytest.StashKey[list[str]]()
_PR_SET_CHILD_SUBREAPER = 36

Need = Callable[..., None]
Serve = Callable[..., BlockServer]


def pytest_configure(config: pytest.Config) -> None:
    """Become the parent of orphans, mainly servers, of processes that tests start.
    Otherwise tests would not notice that they have been left (prctl(2)).
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if parallel.is_worker(config):
        parallel.hide_devices()
        # Else pytest-xdist chooses /tmp, where large sparse files may not be possible.
        config.option.basetemp = config.workerinput["btrfs_ublk_basetemp"]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give a worker of pytest-xdist a base directory, before it starts."""
    chosen = node.config.option.basetemp
    node.workerinput["btrfs_ublk_basetemp"] = chosen and f"{chosen}/{node.gateway.id}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and parallel.is_worker(item.config):
        report.sections.append(("in parallel", parallel.NOTE))
    return report


def inapplicable(reason: str) -> NoReturn:
    """End a test of what this kernel cannot have. Unlike after a skip, nothing is
    missing: scripts/test does not count it, as the test runs with another kernel.
    """
    pytest.skip(f"does not apply: {reason}")


@functools.cache
def _driver_has_known_crash() -> bool:
    # The fix itself cannot be detected, but kernels with `quiesce` (6.16) have it.
    ublk = kernel_features()[0][0]
    return not any(x.name == "quiesce" and x.offered for x in ublk.features)


def may_be_killed(front_end: FrontEndName) -> None:
    """End a test that kills servers under load if that may crash the kernel: with ublk
    of Linux 6.7 to 6.14 (f40139fde527 is in 6.15), one of some 25 kills is a panic.
    """
    if front_end == "ublk" and _driver_has_known_crash():
        inapplicable(
            "this kernel may crash when ublk servers are killed: docs/limits.md"
        )


@pytest.fixture(scope="session")
def need(request: pytest.FixtureRequest) -> Need:
    """``need(ROOT, LOOP)`` skips the test if one is missing, or fails it if
    BTRFS_UBLK_REQUIRE=1 is set.
    """
    return functools.partial(require, request.config)


@pytest.fixture(
    params=[
        pytest.param("fuse", marks=[pytest.mark.native, pytest.mark.fuse]),
        pytest.param("ublk", marks=pytest.mark.ublk),
    ]
)
def front_end(request: pytest.FixtureRequest) -> FrontEndName:
    """Run the test with each front end that the kernel has."""
    name: FrontEndName = request.param
    require(request.config, *((UBLK,) if name == "ublk" else (FUSE, LOOP)))
    return name


@pytest.fixture
def no_devices() -> Iterator[None]:
    """Remove devices that the test has added by `btrfs-ublk device`."""
    from device_support import remove_all

    yield
    remove_all()


@pytest.fixture
def serve(front_end: FrontEndName) -> Serve:
    """Return BlockServer() for the test's front end."""
    return functools.partial(BlockServer, front_end=front_end)


@pytest.fixture(params=["http1", "libcurl"])
def carrier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who makes plain HTTP requests: a client of our own where it can, or libcurl."""
    name: str = request.param
    monkeypatch.setenv("BTRFS_UBLK_HTTP", name)
    return name


@pytest.fixture(scope="session", autouse=True)
def test_root() -> Iterator[Path]:
    """Return the directory of all that tests make: state directory, temporary files."""
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
        # Make these before the first system_state(), so that they are in all of them.
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
    """The state of the system that a test must not change."""

    loop_devices: dict[str, str]
    mounts: dict[str, str]
    ublk_devices: list[int]
    children: list[str]
    files: list[str]
    ledger_entries: list[str]
    open_files: int


def children(known: Collection[str] = ()) -> list[str]:
    """Return the living processes that tests have started, and their descendants.

    Wait for some time for those that are not ``known`` to end, as orphans may be about
    to. Zombies do not count, as their parents may not have asked for their status yet.
    Nor does the plugin's guardian, which stays as long as the session, nor a server's
    own process that asks others, as long as that server lives.
    """
    deadline_s = time.monotonic() + ORPHAN_TIMEOUT_S
    while True:
        found = []
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                command = " ".join(child.cmdline())
                if child.status() == psutil.STATUS_ZOMBIE or _GUARDIAN in command:
                    continue
                if command == "btrfs-ublk-fetch" and child.ppid() != os.getpid():
                    parent = child.parent()
                    if parent and "btrfs-ublk-server" in parent.cmdline()[0]:
                        continue
                found.append(f"{child.pid} {command}")
        if set(found) <= set(known) or time.monotonic() > deadline_s:
            return found
        time.sleep(0.02)


def system_state(root: Path, known: Collection[str] = ()) -> SystemState:
    """Return the state as far as it is the tests' own, as others may use this machine.
    With BTRFS_UBLK_REQUIRE=1, in CI, they may not, and all of the state counts.
    ``known`` processes, which children() has returned, are not waited for.
    """
    garbage.collect()  # an error's traceback may still hold files open
    living = children(known)  # first: what these hold goes with them
    everything = os.environ.get(REQUIRE_VARIABLE) == "1"
    loops = {}
    for link in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            backing = link.read_text().strip()
        except OSError:
            continue
        ours = everything or backing.startswith(str(root))
        if not ours and backing.startswith(SERVED_PREFIX):
            if backing not in _elsewhere and _is_elsewhere(link, backing):
                _elsewhere.add(backing)
            ours = backing not in _elsewhere
        if ours:
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
        children=living,
        files=sorted(
            str(path)
            for path in root.rglob("*")
            # pytest's tmp_path and a daemon keep files on purpose.
            if not path.relative_to(root).parts[0].startswith("pytest-of-")
            and path.relative_to(root).parts[:2] != ("run", "daemon")
        ),
        ledger_entries=[str(entry) for entry in process_ledger().entries()],
        open_files=len(os.listdir("/proc/self/fd")),
    )


def _is_elsewhere(link: Path, backing: str) -> bool:
    """Return whether another process than these tests made a server's loop device."""
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
        with suppress(psutil.Error):  # a server inherits its owner's environment
            if tag in process.cmdline():
                return process.environ().get("BTRFS_UBLK_STATE_DIR") != state
    return not link.exists()  # or it was removed, with its ledger, meanwhile


@pytest.fixture(autouse=True)
def nothing_left(
    request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> Iterator[None]:
    """Check that a test with a system marker leaves the system as it was. Workers of
    pytest-xdist do not run such tests: there, only check that mounts are the same.
    """
    # Tests of the plugin load the package a second time, which sets other handlers.
    for number, handler in _SIGNAL_HANDLERS.items():
        signal.signal(number, handler)
    if parallel.is_worker(request.config):
        parallel.refuse_alone(request.node)
        mounts = read_mountinfo()
        yield
        assert read_mountinfo() == mounts, "it left mounts, or removed some"
        return
    if not any(map(request.node.get_closest_marker, SYSTEM_MARKERS)):
        yield
        return
    require(request.config, ROOT)
    if request.node.get_closest_marker("native"):
        require(request.config, BTRFS, LOOP)
    root = request.getfixturevalue("test_root")
    known: list[str] = request.config.stash.setdefault(_SERVERS, [])
    before = system_state(root, known)
    known[:] = before.children  # those of a module's or the session's fixtures
    # Each collection would look at all objects again. Without that, 54 short tests took
    # 17 s instead of 40 s.
    garbage.freeze()
    yield
    # pytest keeps what was logged. The traceback of an error there may hold a server.
    for record in caplog.get_records("call"):
        record.msg, record.args, record.exc_info = record.getMessage(), None, None
    # A loop device that udev, say, still has open is detached when that closes it. gRPC
    # closes its four descriptors by a thread, some time after its last user has gone.
    # Nothing else is waited for here: what goes later than its test is a leak.
    has_grpc = "grpc" in sys.modules
    deadline_s = time.monotonic() + ORPHAN_TIMEOUT_S
    while (after := system_state(root, known)).loop_devices != before.loop_devices or (
        has_grpc and after.open_files > before.open_files
    ):
        if time.monotonic() > deadline_s:
            break
        time.sleep(0.05)
    assert after == before


@pytest.fixture
def state_of_system(test_root: Path) -> Callable[[], SystemState]:
    """Return system_state(), for tests that compare it themselves."""
    return lambda: system_state(test_root)


def fail_at(
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    name: str,
    when: str,
    error: BaseException,
) -> None:
    """Have what ``module`` calls as ``name`` raise an error, instead of its work or
    ("after") when it is done. A context manager's work is done when it is left."""
    *path, last = name.split(".")
    owner = functools.reduce(getattr, path, module)
    real = getattr(owner, last)

    def failing(*arguments: Any, **keywords: Any) -> Any:
        if when == "after":
            result = real(*arguments, **keywords)
            if hasattr(result, "__enter__"):
                result.__enter__()
                result.__exit__(type(error), error, None)
        raise error

    monkeypatch.setattr(owner, last, failing)
