"""Seeds and sprouts: what is made, and that no step leaves anything when it fails."""

from __future__ import annotations

import os
import resource
import threading
import uuid
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
from btrfs_ublk.errors import BtrfsUblkError, CommandError, UsageError
from btrfs_ublk.kernel import clone_file, loop_device
from btrfs_ublk.kernel.mount import Mount
from btrfs_ublk.seed import Seed, make_seed
from btrfs_ublk.seed.layout import END_BYTES
from btrfs_ublk.seed.mega_extent import parse_report
from btrfs_ublk.server import MemsetSegment, PatternSegment
from btrfs_ublk.volume import sprout as module
from btrfs_ublk.volume.sprout import sprout
from btrfs_ublk.volume.temporary import virtual_file_of

GIB = 1 << 30


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


class TestSeed:
    def test_everything_that_was_asked_for_is_there(self, sparse_path: Path) -> None:
        fsid, device_uuid = uuid.uuid4(), uuid.uuid4()
        path = sparse_path / "seed.img"
        seed = make_seed(
            path,
            virtual_data_size=4 << 60,
            virtual_data_filename="-data",
            label="a label",
            fsid=fsid,
            device_uuid=device_uuid,
            time=1234567890,
            metadata_only=True,
        )
        assert (seed.path, seed.label) == (path, "a label")
        assert (seed.fsid, seed.device_uuid) == (fsid, device_uuid)
        assert seed.virtual_data.filename == "-data"
        assert seed.virtual_data.size == 4 << 60
        assert path.stat().st_size == seed.file_bytes == seed.local_bytes
        before = path.read_bytes()[:65536] if seed.local_bytes < GIB else b""
        again = make_seed(
            path,
            virtual_data_size=4 << 60,
            virtual_data_filename="-data",
            label="a label",
            fsid=fsid,
            device_uuid=device_uuid,
            time=1234567890,
            metadata_only=True,
            force=True,
        )
        assert again == seed
        assert before == (path.read_bytes()[:65536] if before else b"")

    def test_an_existing_file_is_kept(self, seed: Seed) -> None:
        before = seed.path.stat()
        with pytest.raises(BtrfsUblkError, match="exists"):
            make_seed(seed.path, virtual_data_size=GIB)
        assert seed.path.stat() == before

    def test_a_wrong_size_is_wrong_usage(self, sparse_path: Path) -> None:
        with pytest.raises(UsageError, match="size"):
            make_seed(sparse_path / "seed.img", virtual_data_size=4096)
        assert list(sparse_path.iterdir()) == []

    def test_nonsense_is_no_seed(self) -> None:
        for text in ("", "[]", "{}", '{"path": 3}'):
            with pytest.raises(BtrfsUblkError, match="describes no seed"):
                parse_report(text)

    def test_the_address_space_of_its_device(self, seed: Seed) -> None:
        start = seed.virtual_data.device_offset
        description = seed.description(
            [
                PatternSegment(offset=1 << 20, length=1 << 20),
                MemsetSegment(offset=0, length=4096, byte=97),
            ]
        )
        assert description.size == seed.device_bytes + END_BYTES
        assert description.read_only
        kinds = [segment.kind for segment in description.segments]
        assert kinds[:6] == ["file", "zero", "memset", "error", "pattern", "error"]
        assert set(kinds[6:]) <= {"zero"}
        metadata, _, memset, _, pattern, _ = description.segments[:6]
        assert (metadata.offset, metadata.length) == (0, seed.local_bytes)
        assert memset.offset == start and pattern.offset == start + (1 << 20)

    def test_segments_outside_of_the_virtual_file_are_refused(self, seed: Seed) -> None:
        outside = MemsetSegment(offset=GIB, length=4096, byte=0)
        with pytest.raises(UsageError, match="ends after"):
            seed.description([outside])


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

    def test_a_file_of_the_caller_is_kept(
        self, device: Path, target: Path, sparse_path: Path
    ) -> None:
        file = sparse_path / "writable.img"
        with file.open("wb") as image:
            image.truncate(256 << 20)
        with sprout(device, target, writable_file=file) as made:
            assert made.writable.backing_file == file
            (target / "file").write_text("written")
        assert file.stat().st_blocks > 0

    def test_options_reach_the_mount(
        self, device: Path, target: Path, sparse_path: Path
    ) -> None:
        with sprout(device, target, parent=sparse_path, options=["noatime"]):
            options = run(
                ["findmnt", "-n", "-o", "OPTIONS", target], timeout_s=10
            ).stdout
            assert "noatime" in options and "rw" in options.split(",")

    def test_two_sprouts_of_two_seeds_live_side_by_side(
        self, device: Path, target: Path, sparse_path: Path
    ) -> None:
        other = sparse_path / "other"
        other.mkdir()
        twin = make_seed(sparse_path / "twin.img", virtual_data_size=GIB)
        with (
            loop_device(twin.path, read_only=True) as second,
            sprout(device, target, parent=sparse_path),
            sprout(second.path, other, parent=sparse_path),
        ):
            (target / "a").touch()
            (other / "b").touch()

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

    def test_what_cannot_be_is_refused(
        self, seed: Seed, device: Path, target: Path, sparse_path: Path
    ) -> None:
        for of, room, message in (
            (seed.path, None, "not a block device"),
            (device, 4096, "at least"),
        ):
            keys = {} if room is None else {"writable_bytes": room}
            with pytest.raises(UsageError, match=message):
                with sprout(of, target, parent=sparse_path, **keys):
                    pass

    def test_a_writable_file_that_does_not_fit_is_an_error(
        self, device: Path, target: Path, sparse_path: Path
    ) -> None:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024 * GIB, limits[1]))
        try:
            with pytest.raises(BtrfsUblkError, match="img of 2T: File too large"):
                with sprout(
                    device, target, parent=sparse_path, writable_bytes=2048 * GIB
                ):
                    pass
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    @pytest.mark.data
    @pytest.mark.parametrize("error", [BtrfsUblkError("injected"), KeyboardInterrupt()])
    @pytest.mark.parametrize(
        ("step", "when"),
        [
            ("add_device", "after"),
            ("validate", "before"),
            ("body", "before"),
            *(
                pytest.param(step, when, marks=pytest.mark.thorough)
                for step in ("tempdir", "loop_device", "mounted", "filesystem_uuid")
                for when in ("before", "after")
            ),
            *(
                pytest.param(*case, marks=pytest.mark.thorough)
                for case in (
                    ("add_device", "before"),
                    ("Mount.remount", "before"),
                    ("Mount.remount", "after"),
                )
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
        error: BaseException,
    ) -> None:
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
