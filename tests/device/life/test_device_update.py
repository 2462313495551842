"""Devices that grow while they are read, by way of another server."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.devices import (
    DESCRIPTION,
    SIZE,
    TIMEOUT_S,
    check_content,
    description_file,
    device_command,
    kill_server,
    kill_supervisor,
    reading,
    wait_for,
)
from support.needs import inapplicable, may_be_killed

from btrfs_ublk.base.helpers import SERVER, helper_path
from btrfs_ublk.base.process import ProcessIdentity
from btrfs_ublk.base.readers import read_direct
from btrfs_ublk.device import (
    DeviceOptions,
    add_device,
    show_device,
    update_device,
    upgrade,
    upgrade_device,
)
from btrfs_ublk.device.state import RUN_VARIABLE, DeviceDirectory, devices_directory
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.kernel import blockdev
from btrfs_ublk.server import (
    Description,
    FileSegment,
    FrontEndName,
    MemsetSegment,
    PatternSegment,
    Segment,
)
from btrfs_ublk.server.features import kernel_features
from btrfs_ublk.units import MIB

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("no_devices")]

LONGER = PatternSegment(offset=0, length=SIZE + 8 * MIB)


@pytest.fixture
def options(front_end: FrontEndName) -> DeviceOptions:
    ublk = kernel_features()[0][0]
    can = any(x.name == "update-size" and x.offered for x in ublk.features)
    if front_end == "ublk" and not can:
        inapplicable("this driver cannot change a device's size")
    return DeviceOptions(front_end=front_end)


def of(*segments: Segment, **keys: Any) -> Description:
    return Description(segments[-1].end, segments, **keys)


@pytest.mark.data
def test_it_grows_under_reads(options: DeviceOptions, sparse_path: Path) -> None:
    path = add_device("one", DESCRIPTION, options).path
    assert path is not None
    source = sparse_path / "source"
    source.write_bytes(bytes(range(256)) * (MIB // 256))
    file = FileSegment(offset=LONGER.end, length=MIB, path=str(source))
    before = show_device("one").state
    with reading(path) as readers:
        readers.wait_for_reads(20)
        done = device_command(
            "update", "one", description_file(sparse_path, of(LONGER))
        )
        assert (done.returncode, done.stdout) == (0, f"{path}\n"), done.stderr
        assert blockdev.size_bytes(path) == LONGER.length
        check_content(path, LONGER)
        readers.wait_for_reads(20)
        # And once more, by another segment.
        update_device("one", of(LONGER, file))
        assert blockdev.size_bytes(path) == file.end
        assert read_direct(path, file.offset, MIB) == source.read_bytes()
        readers.wait_for_reads(20)
    assert (readers.wrong, readers.errors) == (0, [])
    after = show_device("one").state
    assert after.device == before.device and after.supervisor == before.supervisor
    assert (after.upgrades, after.recoveries) == (2, 0)
    may_be_killed(options.front_end)
    kill_server("one")
    assert blockdev.size_bytes(path) == file.end
    assert read_direct(path, file.offset, MIB) == source.read_bytes()
    upgrade_device("one")
    check_content(path, LONGER)


@pytest.mark.data
@pytest.mark.parametrize("step", ["_next_generation", "_replace_server"])
def test_one_that_was_interrupted_is_repeated(
    options: DeviceOptions, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = add_device("one", of(PatternSegment(offset=0, length=SIZE)), options).path
    assert path is not None

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(upgrade, step, interrupt)
        update_device("one", of(LONGER))
    assert blockdev.size_bytes(path) == SIZE
    update_device("one", of(LONGER))
    assert blockdev.size_bytes(path) == LONGER.length
    generation = show_device("one").state.generation
    update_device("one", of(LONGER))
    assert show_device("one").state.generation == generation


@pytest.mark.usefixtures("in_process")
def test_only_growth(options: DeviceOptions, sparse_path: Path) -> None:
    path = add_device("one", DESCRIPTION, options).path
    assert path is not None
    before = show_device("one").state
    missing = FileSegment(offset=SIZE, length=MIB, path=str(sparse_path / "missing"))
    short = sparse_path / "short"
    short.write_bytes(bytes(4096))
    for description, message, status in (
        (of(PatternSegment(offset=0, length=MIB)), "never shrinks", 2),
        (of(MemsetSegment(offset=0, length=2 * SIZE, byte=1)), "says otherwise", 2),
        (of(LONGER, read_only=False), "is read-only, the", 2),
        (of(*DESCRIPTION.segments, missing), "cannot open file", 1),
        (
            of(
                *DESCRIPTION.segments,
                FileSegment(offset=SIZE, length=MIB, path=str(short)),
            ),
            "has 4096 bytes",
            2,
        ),
    ):
        done = device_command(
            "update", "one", description_file(sparse_path, description)
        )
        assert done.returncode == status and message in done.stderr, done.stderr
        assert blockdev.size_bytes(path) == SIZE
    assert show_device("one").state.server == before.server
    assert (
        device_command("update", "two", description_file(sparse_path)).returncode == 2
    )


def test_a_server_that_fails(options: DeviceOptions, sparse_path: Path) -> None:
    """The device is as it was."""
    server = sparse_path / "server"
    server.write_text(
        '#!/bin/sh\ncase "$*" in *--grow*) echo no luck >&2; exit 1;; esac\n'
        f'exec {helper_path(SERVER)} "$@"\n'
    )
    server.chmod(0o755)
    wrapped = DeviceOptions(front_end=options.front_end, server=server)
    path = add_device("one", DESCRIPTION, wrapped).path
    assert path is not None
    with reading(path) as readers:
        with pytest.raises(BtrfsUblkError, match="no luck"):
            update_device("one", of(LONGER), timeout_s=TIMEOUT_S)
        readers.wait_for_reads(20)
    assert (readers.wrong, readers.errors) == (0, [])
    assert show_device("one").is_well and blockdev.size_bytes(path) == SIZE
    may_be_killed(options.front_end)
    kill_server("one")
    check_content(path)
    # Another program can.
    upgrade_device("one")
    update_device("one", of(LONGER))
    check_content(path, LONGER)


def test_in_the_foreground(options: DeviceOptions, sparse_path: Path) -> None:
    """As systemd has it, whose description is that of before."""
    before = add_device("one", DESCRIPTION, options)
    update_device("one", of(LONGER))
    kill_supervisor("one")
    server = show_device("one").state.server
    argv = [
        *(sys.executable, "-m", "btrfs_ublk.cli.main", "device", "serve", "one"),
        str(description_file(sparse_path)),
    ]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_for(
                "one",
                lambda state: state.status == "serving"
                and state.supervisor == ProcessIdentity.of(process.pid),
            )
        finally:
            process.terminate()
            _, talk = process.communicate(timeout=60)
    assert process.returncode == 0
    assert f"grown from the {SIZE} bytes of its description to {LONGER.end}" in talk
    assert show_device("one").state.server == server
    assert before.path is not None
    check_content(before.path, LONGER)
    longer = of(PatternSegment(offset=0, length=LONGER.end + MIB))
    for other, hint in (
        (longer, "to have it grow: btrfs-ublk device update one …"),
        (of(MemsetSegment(offset=0, length=SIZE, byte=1)), "device down one"),
    ):
        done = device_command("serve", "one", description_file(sparse_path, other))
        assert done.returncode == 2 and hint in done.stderr, done.stderr


def test_one_update_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Or the shorter one might be written last, which the device has outgrown."""
    monkeypatch.setenv(RUN_VARIABLE, str(tmp_path / "run"))
    directory = DeviceDirectory(devices_directory(make=True) / "one")
    directory.path.mkdir(mode=0o700)
    directory.write_description(DESCRIPTION.to_json())
    shorter = of(PatternSegment(offset=0, length=SIZE + MIB))

    def check(description: Description) -> None:
        if description == shorter:  # the other one comes just then
            with pytest.raises(BtrfsUblkError, match="another command updates"):
                update_device("one", of(LONGER), timeout_s=0.1)

    def grow(_: object, __: object, after: Description, **___: float) -> None:
        directory.write_description(after.to_json())

    for name in ("recover_device", "_require_growth", "show_device"):
        monkeypatch.setattr(upgrade, name, lambda *_, **__: None)
    monkeypatch.setattr(upgrade, "_check", check)
    monkeypatch.setattr(upgrade, "_grow", grow)
    update_device("one", shorter)
    update_device("one", of(LONGER))
    with pytest.raises(UsageError, match="never shrinks"):
        update_device("one", shorter)
