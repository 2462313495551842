"""Seeds and sprouts: what is made, and that no step leaves anything when it fails."""

import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.faults import fail_at
from support.needs import Need
from support.system_state import SystemState

from btrfs_ublk.base.capabilities import BTRFS_PROGS, MKFS_BTRFS, Helper
from btrfs_ublk.base.helpers import MKSEED
from btrfs_ublk.base.process import run
from btrfs_ublk.errors import BtrfsUblkError, CommandError
from btrfs_ublk.kernel import clone_file, loop_device
from btrfs_ublk.kernel.mount import Mount
from btrfs_ublk.seed import Seed, make_seed
from btrfs_ublk.units import GIB
from btrfs_ublk.volume import sprout as module
from btrfs_ublk.volume.sprout import Sprout, sprout
from btrfs_ublk.volume.temporary import virtual_file_of


@pytest.fixture(autouse=True)
def _needs(need: Need) -> None:
    need(Helper(MKSEED))


@pytest.fixture
def seed(sparse_path: Path) -> Seed:
    return make_seed(sparse_path / "seed.img", virtual_data_size=GIB)


@pytest.fixture
def device(seed: Seed) -> Iterator[Path]:
    with loop_device(seed.path, read_only=True) as loop:
        yield loop.path


@pytest.fixture
def target(sparse_path: Path) -> Path:
    path = sparse_path / "mnt"
    path.mkdir()
    return path


class TestSprout:
    @pytest.mark.data
    def test_it_is_writable_and_clones(
        self, device: Path, target: Path, seed: Seed, sparse_path: Path
    ) -> None:
        seen = []
        with sprout(
            device,
            target,
            parent=sparse_path,
            validate=lambda mount: seen.append(sorted(os.listdir(mount))),
        ) as made:
            assert made.seed_fsid == seed.fsid != made.fsid
            assert made.seed_device == device and made.target == target
            with virtual_file_of(seed, target) as virtual:
                clone_file(virtual, target / "clone", source_offset=0, size_bytes=5000)
            assert (target / "clone").read_bytes() == bytes(5000)
            (target / "file").write_text("written")
        assert seen == [[]]
        assert list(target.iterdir()) == []

    def test_an_ordinary_btrfs_is_refused(
        self, need: Need, target: Path, sparse_path: Path
    ) -> None:
        need(MKFS_BTRFS, BTRFS_PROGS)
        image = sparse_path / "image"
        with image.open("wb") as file:
            file.truncate(256 << 20)
        run(["mkfs.btrfs", "-q", image], timeout_s=60)
        with loop_device(image) as loop:
            with pytest.raises(BtrfsUblkError, match="no seed|cannot add"):
                with sprout(loop.path, target, parent=sparse_path):
                    pass

    @pytest.mark.data
    @pytest.mark.parametrize(
        ("step", "when"),
        [
            ("add_device", "after"),
            ("validate", "before"),
            ("body", "before"),
            *(
                pytest.param(step, "after", marks=pytest.mark.thorough)
                for step in ("tempdir", "loop_device", "mounted", "Mount.remount")
            ),
        ],
    )
    def test_an_error_at_any_step_leaves_nothing(
        self,
        device: Path,
        target: Path,
        sparse_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        state_of_system: Callable[[], SystemState],
        step: str,
        when: str,
    ) -> None:
        error: BaseException = KeyboardInterrupt()
        if step == "validate":
            error = BtrfsUblkError("injected")

        def fail(*_arguments: object) -> None:
            raise error

        if step not in ("validate", "body"):
            fail_at(monkeypatch, module, step, when, error)
        before = state_of_system()
        with pytest.raises(type(error)) as caught:
            with sprout(
                device,
                target,
                parent=sparse_path,
                validate=fail if step == "validate" else None,
            ):
                raise error
        assert caught.value is error
        assert state_of_system() == before


def test_a_seed_waits_for_another_of_its_fsid(
    seed: Seed, device: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of volumes of one image that come up at once: the second is refused until the
    first has become a sprout."""
    uuids = {"fsid": seed.fsid, "device_uuid": seed.device_uuid}
    other = seed.path.with_name("other.img")
    make_seed(other, virtual_data_size=GIB, **uuids)
    at = target.with_name("other")
    at.mkdir()
    refused = threading.Event()
    mounted = module.mounted

    @contextmanager
    def watched(source: Path, *arguments: Any, **options: Any) -> Iterator[Mount]:
        try:
            made = mounted(source, *arguments, **options)
            mount = made.__enter__()
        except CommandError:
            refused.set()
            raise
        try:
            yield mount
        finally:
            made.__exit__(None, None, None)

    monkeypatch.setattr(module, "mounted", watched)
    with (
        loop_device(other, read_only=True) as loop,
        ThreadPoolExecutor(1) as pool,
        ExitStack() as stack,
    ):
        later = []

        def start_the_other(_: Path) -> None:
            made = sprout(loop.path, at, parent=seed.path.parent)
            later.append(pool.submit(stack.enter_context, made))
            assert refused.wait(60)

        first = sprout(
            *(device, target), parent=seed.path.parent, validate=start_the_other
        )
        with first as one:
            two = later[0].result(60)
            assert one.fsid != two.fsid and one.seed_fsid == two.seed_fsid
            stack.close()


TIMEOUT_S = 120
SEED_BYTES = 3 * GIB


@pytest.fixture
def made(need: Need, sparse_path: Path) -> Iterator[Sprout]:
    """Of a seed whose virtual data do not fit on it."""
    need(BTRFS_PROGS, Helper(MKSEED))
    target = sparse_path / "mnt"
    target.mkdir()
    seed = make_seed(sparse_path / "seed.img", virtual_data_size=SEED_BYTES)
    with loop_device(seed.path, read_only=True) as device:
        with sprout(device.path, target, parent=sparse_path) as it:
            (target / "own").write_bytes(bytes(1 << 20))
            yield it


def btrfs(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["btrfs", *words], capture_output=True, text=True, timeout=TIMEOUT_S
    )


def test_of_an_unmounted_sprout(need: Need, sparse_path: Path) -> None:
    """Its subvolume is restored without the virtual file; nothing is repaired."""
    need(BTRFS_PROGS, Helper(MKSEED))
    target, found = sparse_path / "mnt", sparse_path / "found"
    target.mkdir()
    found.mkdir()
    seed = make_seed(sparse_path / "seed.img", virtual_data_size=SEED_BYTES)
    image = sparse_path / "writable.img"
    with image.open("xb") as file:
        file.truncate(GIB)
    with loop_device(seed.path, read_only=True) as device:
        with sprout(device.path, target, writable_file=image):
            (target / "own").write_bytes(b"mine")
        with loop_device(image) as writable:
            done = btrfs("restore", "--root", "256", writable.path, found)
            assert done.returncode == 0, done.stderr
            assert [path.name for path in found.iterdir()] == ["own"]
            assert btrfs("check", writable.path).returncode == 0
            done = btrfs("check", "--repair", "--force", writable.path)
            assert done.returncode == 1
            assert "with seed device is not supported" in done.stderr
            assert btrfs("check", writable.path).returncode == 0


def test_scrub(made: Sprout) -> None:
    """Of its own device it is of use; of the mount, it fails or complains."""
    done = btrfs("scrub", "start", "-B", made.writable.path)
    assert done.returncode == 0 and "no errors found" in done.stdout, done.stderr
    done = btrfs("scrub", "start", "-B", made.target)
    assert done.returncode == 1 and "Read-only file system" in done.stderr
    done = btrfs("scrub", "start", "-B", "-r", made.target)
    assert done.returncode == 3 and "uncorrectable errors" in done.stderr
    assert re.search(r"super=\d+ verify=\d+", done.stdout)
    done = btrfs("device", "stats", "--check", made.target)
    assert done.returncode == 0, done.stdout


def test_balance_relocates_virtual_data(made: Sprout) -> None:
    """There is no room for them, so it ends at once, and harms nothing."""
    for words in (["-d"], ["--full-balance"]):
        done = btrfs("balance", "start", *words, made.target)
        assert done.returncode != 0 and "No space left" in done.stderr, words
    for filtered in ("-dusage=50", "-m"):
        done = btrfs("balance", "start", filtered, made.target)
        assert done.returncode == 0, (filtered, done.stderr)
    assert (made.target / "own").read_bytes() == bytes(1 << 20)
