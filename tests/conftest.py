"""Fixtures of all tests: directories, capabilities, and checks that nothing is left."""

import ctypes
import functools
import gc as garbage
import shutil
import signal
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from support import workers
from support.needs import Need, Serve
from support.processes import thaw
from support.sanitized_build import (
    bring_helpers_up_to_date,
    sanitized_build,
    sanitized_helpers,
    sanitized_servers,
)
from support.system_state import SystemState, state_after, system_state

from btrfs_ublk.base.capabilities import BTRFS, FUSE, LOOP, ROOT, UBLK, sparse_directory
from btrfs_ublk.base.ledger import process_ledger
from btrfs_ublk.device.locks import registry_locked
from btrfs_ublk.device.state import RUN_VARIABLE, devices_directory
from btrfs_ublk.kernel.mountinfo import read_mountinfo
from btrfs_ublk.server import BlockServer, FrontEndName
from btrfs_ublk.testing.requirements import need as require

#: Fixtures for all.
__all__ = ["sanitized_build", "sanitized_helpers", "sanitized_servers"]

# No deadline, as machines differ in speed. Fixed examples, so that failures come again.
settings.register_profile(
    "btrfs-ublk",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("btrfs-ublk")

#: This is a separate project, whose tests system/test_wheel.py runs.
collect_ignore = ["system/example_project"]
pytest_plugins = ["support.recording"]

#: Sparse files up to the largest seed.
SPARSE_BYTES = 8 << 60
#: Tests with one of these markers must leave the system as it was.
SYSTEM_MARKERS = ("device", "ublk")
_SIGNAL_HANDLERS = {
    number: signal.getsignal(number)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
}
#: What children() returned before the last test: servers of fixtures of a wider scope.
_SERVERS = pytest.StashKey[list[str]]()
_PR_SET_CHILD_SUBREAPER = 36


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--hide-devices",
        action="store_true",
        help="In workers, hide devices from tests, so that those that make one fail.",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Become the parent of orphans, mainly servers, of processes that tests start.
    Otherwise tests would not notice that they have been left (prctl(2)).
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if not workers.is_worker(config):
        bring_helpers_up_to_date()
    else:
        workers.prepare(hide_devices=config.getoption("hide_devices"))
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
    if report.failed and workers.HIDDEN:
        report.sections.append(("with hidden devices", workers.NOTE))
    return report


@pytest.fixture(scope="session")
def need(request: pytest.FixtureRequest) -> Need:
    """``need(ROOT, LOOP)`` skips the test if one is missing, or fails it if
    BTRFS_UBLK_REQUIRE=1 is set.
    """
    return functools.partial(require, request.config)


@pytest.fixture(
    params=[
        pytest.param("fuse", marks=[pytest.mark.device, pytest.mark.fuse]),
        pytest.param("ublk", marks=[pytest.mark.device, pytest.mark.ublk]),
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
    from support.devices import remove_all

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


@pytest.fixture(autouse=True)
def nothing_left(
    request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> Iterator[None]:
    """Check that a test of devices leaves the system as it was. Where devices are
    hidden, only check that mounts are the same.
    """
    # Tests of the plugin load the package a second time, which sets other handlers.
    for number, handler in _SIGNAL_HANDLERS.items():
        signal.signal(number, handler)
    if workers.HIDDEN:
        workers.refuse(request.node)
        mounts = read_mountinfo()
        yield
        thaw()
        assert read_mountinfo() == mounts, "it left mounts, or removed some"
        return
    if not any(map(request.node.get_closest_marker, SYSTEM_MARKERS)):
        yield
        thaw()
        return
    require(request.config, ROOT)
    if not request.node.get_closest_marker("ublk"):
        require(request.config, BTRFS, LOOP)
    root = request.getfixturevalue("test_root")
    known: list[str] = request.config.stash.setdefault(_SERVERS, [])
    before = system_state(root, known)
    known[:] = before.children  # those of a module's or the session's fixtures
    # Each collection would look at all objects again. Without that, 54 short tests took
    # 17 s instead of 40 s.
    garbage.freeze()
    yield
    thaw()
    # pytest keeps what was logged. The traceback of an error there may hold a server.
    for record in caplog.get_records("call"):
        record.msg, record.args, record.exc_info = record.getMessage(), None, None
    # What goes later than its test, other than by a hand that is not ours, is a leak.
    assert state_after(root, before, known) == before


@pytest.fixture
def state_of_system(test_root: Path) -> Callable[[], SystemState]:
    """Return system_state(), for tests that compare it themselves."""
    return lambda: system_state(test_root)
