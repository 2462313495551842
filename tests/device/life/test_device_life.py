"""Every front end's device, how it comes and goes: deaths, leftovers, refusals.

One contract: each test runs with each front end that the kernel has.
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from support.devices import small_seed
from support.needs import Serve, may_be_killed
from support.processes import freeze

from btrfs_ublk.base.gc import collect
from btrfs_ublk.base.process import ProcessIdentity
from btrfs_ublk.base.readers import read_direct
from btrfs_ublk.errors import LeftoverError
from btrfs_ublk.kernel import mounted
from btrfs_ublk.kernel.waiting import wait_until
from btrfs_ublk.server import (
    BlockServer,
    Description,
    FrontEndName,
    PatternSegment,
    ZeroSegment,
)
from btrfs_ublk.server.control import ControlError
from btrfs_ublk.units import KIB, MIB, TIB
from btrfs_ublk.volume.temporary import virtual_file_of

ZEROES = Description(MIB, [ZeroSegment(offset=0, length=MIB)])


#: Serves until it is killed; prints the server's process number.
OWNER = """
import signal
from btrfs_ublk.server import BlockServer, Description
description = Description.from_json({json!r})
with BlockServer(description, front_end={front_end!r}) as server:
    print(server.pid, server.device, flush=True)
    signal.pause()
"""


@contextmanager
def owner_in_its_own_process(
    front_end: FrontEndName, description: Description = ZEROES
) -> Iterator[tuple[subprocess.Popen[str], ProcessIdentity, Path]]:
    script = OWNER.format(json=description.to_json(), front_end=front_end)
    argv = [sys.executable, "-c", script]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid, device = owner.stdout.readline().split()
        try:
            yield owner, ProcessIdentity.of(int(pid)), Path(device)
        finally:
            owner.kill()


def is_gone(device: Path) -> bool:
    """A loop device's node stays when it is detached."""
    return not device.exists() or (
        device.name.startswith("loop")
        and not (Path("/sys/block") / device.name / "loop").exists()
    )


def collected() -> list[tuple[str, str]]:
    report = collect()
    assert report.is_clean, json.dumps(report.to_dict())
    return [
        (outcome.entry.kind, outcome.result)
        for ledger in report.ledgers
        for outcome in ledger.outcomes
    ]


def test_the_server_goes_when_its_owner_is_killed(front_end: FrontEndName) -> None:
    with owner_in_its_own_process(front_end) as (owner, server, device):
        owner.kill()
        assert server.wait(timeout_s=30)
        wait_until(lambda: is_gone(device), timeout_s=10, what="no device")
    collected()


def test_a_mounted_device_outlives_its_owner(
    front_end: FrontEndName, sparse_path: Path
) -> None:
    """It is served until it is unmounted; pulled away, btrfs would turn read-only."""
    seed, target = small_seed(sparse_path)
    pattern = PatternSegment(offset=0, length=64 * MIB)
    with owner_in_its_own_process(front_end, seed.description([pattern])) as (
        owner,
        server,
        device,
    ):
        with mounted(device, target, read_only=True):
            owner.kill()
            owner.wait(30)
            with virtual_file_of(seed, target) as file:
                for offset in range(0, 64 * MIB, 16 * MIB):
                    time.sleep(0.1)
                    expected = pattern.content(offset, 4096)
                    assert read_direct(file, offset, 4096) == expected
            assert server.is_alive()
    assert server.wait(timeout_s=30)
    wait_until(lambda: is_gone(device), timeout_s=10, what="no device")
    collected()


def test_a_server_that_takes_no_more_requests(front_end: FrontEndName) -> None:
    """It is told as what it is, and leaving takes it down all the same."""
    with BlockServer(ZEROES, front_end=front_end) as server:
        child, connection = server._child, server._control
        assert child is not None and connection is not None
        server.stats()

        def ask(padding: int) -> str:
            with pytest.raises(ControlError) as failed:
                connection.request(
                    "info", {"pad": "x" * padding}, child=child, timeout_s=0.001
                )
            return failed.value.message

        freeze(server.pid)
        while "does not take" not in ask(1000):
            pass
        assert "does not take" in ask(1)
        ended = ProcessIdentity.of(server.pid)
    assert not ended.is_alive()
    assert collected() == []


def test_gc_removes_the_device_of_a_killed_pair(front_end: FrontEndName) -> None:
    with owner_in_its_own_process(front_end) as (owner, server, _):
        # Stopped, so that it does not notice the other's death.
        freeze(server.pid)
        owner.kill()
        os.kill(server.pid, signal.SIGKILL)
    kinds = {"ublk": ["ublk-device"], "fuse": ["loop", "fuse-server"]}
    assert [kind for kind, _ in collected()] == kinds[front_end]


def test_gc_ends_a_server_that_is_stopped(front_end: FrontEndName) -> None:
    with owner_in_its_own_process(front_end) as (owner, server, _):
        freeze(server.pid)
        owner.kill()
    collected()
    assert not server.is_alive()


def test_a_killed_server_fails_reads_and_leaves_nothing(
    serve: Serve, front_end: FrontEndName
) -> None:
    """Those in flight, and all that follow: at once, and none hangs."""
    may_be_killed(front_end)
    ended: list[int] = []
    pattern = PatternSegment(offset=0, length=TIB)

    def read_until_it_fails(device: Path, seed: int) -> None:
        chances = random.Random(seed)
        try:
            while True:
                offset = chances.randrange(TIB // MIB) * MIB
                content = read_direct(device, offset, 64 * KIB)
                assert content == pattern.content(offset, 64 * KIB)
        except (OSError, EOFError):  # which one: ublk's device goes, and shrinks to 0
            ended.append(seed)

    with serve(Description(TIB, [pattern])) as server:
        threads = [
            threading.Thread(target=read_until_it_fails, args=(server.device, seed))
            for seed in range(4)
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: server.stats().reads > 50, timeout_s=30, what="reads")
        os.kill(server.pid, signal.SIGKILL)
        for thread in threads:
            thread.join(timeout=60)
        assert not any(thread.is_alive() for thread in threads)
    assert sorted(ended) == list(range(4))


def test_a_mounted_device_is_not_taken_down(serve: Serve, sparse_path: Path) -> None:
    seed, target = small_seed(sparse_path)
    contents = [PatternSegment(offset=0, length=64 * MIB)]
    server = serve(seed.description(contents))
    with ExitStack() as mounts:
        with pytest.raises(LeftoverError, match=str(target)):
            with server:
                mounts.enter_context(mounted(server.device, target, read_only=True))
        with pytest.raises(LeftoverError, match=str(target)):
            server.stop()
        # It still serves.
        with virtual_file_of(seed, target) as file:
            assert read_direct(file, 4096, 16) == contents[0].content(4096, 16)
        assert server.stats().reads > 0
    server.stop()
