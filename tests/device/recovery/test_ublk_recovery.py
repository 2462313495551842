"""ublk devices that outlive their server: killed, taken over, handed over, refused.

Every byte that is read in the meantime is checked.
"""

import errno
import functools
import json
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.devices import Readers, reading, small_seed
from support.needs import Need, inapplicable, may_be_killed
from support.processes import ServerProcess

from btrfs_ublk.base.capabilities import UBLK
from btrfs_ublk.base.helpers import SERVER, helper_path
from btrfs_ublk.base.readers import read_direct
from btrfs_ublk.kernel import mounted
from btrfs_ublk.kernel.waiting import wait_until
from btrfs_ublk.server import Description, PatternSegment, ZeroSegment
from btrfs_ublk.units import MIB, TIB
from btrfs_ublk.volume.temporary import virtual_file_of

pytestmark = [pytest.mark.data, pytest.mark.ublk]

SEGMENT = PatternSegment(offset=0, length=TIB)
PATTERN = Description(TIB, [SEGMENT])
TAG = "0123456789abcdef"
#: How long a server that has been killed may leave I/O without an answer, at most.
FAIL_TIMEOUT_S = 25.0
#: linux/ublk_cmd.h: what the kernel's features tell about its version.
F_FAIL_IO = 1 << 9  # 6.13
F_QUIESCE = 1 << 12  # 6.16
READERS = 4
#: Commands to the driver in one takeover, and more.
MAX_STEPS = 40


@pytest.fixture(autouse=True)
def ublk(need: Need) -> Iterator[None]:
    need(UBLK)
    may_be_killed("ublk")
    kernel_has(F_QUIESCE)  # while there is no other device
    wait_until(lambda: records() == [], timeout_s=10, what="no device")
    yield
    for record in records():  # of a test that failed
        run_server("--delete-device", str(record["id"]), "--tag", record["tag"])


def run_server(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [helper_path(SERVER), *arguments], capture_output=True, text=True, timeout=60
    )


def records() -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in run_server("--list-devices").stdout.splitlines()
    ]


def record() -> dict[str, Any]:
    (only,) = records()
    return only


def delete_device() -> None:
    device = record()
    done = run_server("--delete-device", str(device["id"]), "--tag", device["tag"])
    assert done.returncode == 0, done.stderr


@functools.cache
def kernel_has(bit: int) -> bool:
    """Whether the driver says so (the option that needs it is then taken)."""
    mode = {F_FAIL_IO: "fail-io", F_QUIESCE: "reissue"}[bit]
    with ServerProcess(PATTERN, "--tag", TAG, "--recovery", mode) as server:
        assert server.process.stdout is not None
        if not server.process.stdout.readline():
            return False
        flags: int = record()["flags"]
        server.stop()
        return bool(flags & bit)


def new_server(recovery: str = "reissue", *options: str) -> ServerProcess:
    return ServerProcess(PATTERN, "--tag", TAG, "--recovery", recovery, *options)


def recoverer(
    device_id: int = 0, *options: str, description: Description = PATTERN, **more: Any
) -> ServerProcess:
    return ServerProcess(
        description, "--recover", str(device_id), "--tag", TAG, *options, **more
    )


def pattern(offset: int, length: int) -> bytes:
    return SEGMENT.content(offset, length)


def verified(device: Path) -> AbstractContextManager[Readers]:
    """Reads at random places. To be stopped while there is a server: without one, they
    may wait."""
    return reading(device, SEGMENT, threads=READERS)


def must_be_clean(reads: Readers) -> None:
    assert (reads.wrong, reads.errors) == (0, [])


@contextmanager
def served(recovery: str = "reissue", *options: str) -> Iterator[ServerProcess]:
    with new_server(recovery, *options) as server:
        server.wait_ready()
        yield server


@pytest.mark.gate_ublk
def test_killed_under_reads_and_taken_over_again_and_again() -> None:
    with served() as first:
        with verified(first.device) as reads:
            first.kill()
            for _ in range(4):
                with recoverer() as server:
                    assert server.wait_ready()["recovery"] == "reissue"
                    reads.wait_for_reads(3 * READERS)
                    server.kill()
            with recoverer() as last:
                assert last.wait_ready()["device"] == str(first.device)
                assert record()["state"] == "live"
                reads.wait_for_reads(3 * READERS)
                assert last.request("info")["info"]["pid"] == last.process.pid
                reads.stop()
        must_be_clean(reads)
        with recoverer() as nobody:  # the last server was killed idle
            nobody.wait_ready()
            nobody.stop()
    assert records() == []


@pytest.mark.parametrize("when", ["KILL_BEFORE", "KILL_AFTER"])
def test_killed_at_every_step_of_a_takeover(when: str, sanitized_build: Path) -> None:
    """Each command to the driver in turn; after each kill, the next server succeeds."""
    preload = {"LD_PRELOAD": str(sanitized_build / "csrc/tests/kill-at.so")}
    with served("reissue", "--queues", "2", "--depth", "8") as first:
        with verified(first.device) as reads:
            first.kill()
            for call in range(1, MAX_STEPS):
                with recoverer(environment={when: str(call), **preload}) as victim:
                    assert victim.process.stdout is not None
                    got_ready = victim.process.stdout.readline() != ""
                    if got_ready:
                        # It has got through: that call is one of those that serve.
                        victim.kill()
                    assert victim.process.wait(60) == -signal.SIGKILL
                with recoverer() as server:
                    server.wait_ready()
                    reads.wait_for_reads(READERS)
                    if got_ready:
                        reads.stop()
                        server.stop()
                        break
                    server.kill()
            else:
                pytest.fail("a takeover has no end")
            assert call > 6
        must_be_clean(reads)
    assert records() == []


def test_what_is_not_meant_is_left_alone() -> None:
    with served() as first:
        path = first.device
        live = recoverer()
        with live:
            assert f"process {first.process.pid} serves it" in live.failure()
        assert read_direct(path, 0, 4096) == pattern(0, 4096)
        first.kill()
        with ServerProcess(PATTERN, "--recover", "0", "--tag", "1") as server:
            assert "carries tag" in server.failure()
        with recoverer(7) as server:
            assert "no ublk device 7" in server.failure()
        for description, words in (
            (Description(MIB, [ZeroSegment(offset=0, length=MIB)]), "has 1099511627"),
            (
                Description(TIB, [ZeroSegment(offset=0, length=TIB)], read_only=False),
                "is read-only",
            ),
        ):
            with recoverer(description=description) as server:
                assert words in server.failure()
        with recoverer(0, "--queues", "1") as server:
            assert "as it is" in server.failure(2)
        with ServerProcess(PATTERN, "--recover", "0") as server:
            assert "needs --tag" in server.failure(2)
        with ServerProcess(PATTERN, "--id", "0") as server:
            assert "is taken" in server.failure()
        assert record()["state"] == "quiesced"
        with recoverer() as last:
            last.wait_ready()
            assert read_direct(path, 0, 4096) == pattern(0, 4096)
            last.stop()


@pytest.mark.gate_ublk
def test_of_two_servers_one_gets_the_device() -> None:
    with served() as first:
        first.kill()
        with recoverer() as one, recoverer() as other:
            ready = []
            for server in (one, other):
                assert server.process.stdout is not None
                if server.process.stdout.readline():
                    ready.append(server)
            assert len(ready) == 1
            assert read_direct(first.device, 0, 4096) == pattern(0, 4096)
            ready[0].stop()
    assert records() == []


def test_a_device_without_a_server_can_be_deleted(sparse_path: Path) -> None:
    """Also with reads that wait, but not while it is mounted."""
    with served() as first:
        device = first.device
        first.kill()
        wait_until(
            lambda: record()["state"] == "quiesced", timeout_s=30, what="quiesced"
        )
        answers: list[object] = []

        def read() -> None:
            try:
                answers.append(read_direct(device, MIB, 4096))
            except OSError as error:
                answers.append(error.errno)

        reader = threading.Thread(target=read)
        reader.start()
        reader.join(0.5)
        assert reader.is_alive()
        begin_s = time.monotonic()
        delete_device()
        reader.join(FAIL_TIMEOUT_S)
        assert answers == [errno.EIO]
        assert time.monotonic() - begin_s < FAIL_TIMEOUT_S
    wait_until(lambda: records() == [], timeout_s=10, what="no device")


@pytest.mark.gate_ublk
def test_a_mounted_device_without_a_server_is_not_deleted(sparse_path: Path) -> None:
    seed, target = small_seed(sparse_path)
    description = seed.description([PatternSegment(offset=0, length=64 * MIB)])
    with ServerProcess(description, "--tag", TAG, "--recovery", "auto") as first:
        first.wait_ready()
        with mounted(first.device, target, read_only=True):
            first.kill()
            wait_until(
                lambda: record()["state"] == "quiesced", timeout_s=30, what="quiesced"
            )
            done = run_server("--delete-device", "0", "--tag", TAG)
            assert done.returncode == 1 and "mounted or in use" in done.stderr
            with (
                recoverer(description=description) as second,
                virtual_file_of(seed, target) as file,
            ):
                second.wait_ready()
                assert read_direct(file, MIB, 4096) == pattern(MIB, 4096)
                second.process.terminate()
                with pytest.raises(subprocess.TimeoutExpired):
                    second.process.wait(1)
                assert read_direct(file, 2 * MIB, 4096) == pattern(2 * MIB, 4096)
                second.kill()
            with (
                recoverer(description=description) as third,
                virtual_file_of(seed, target) as file,
            ):
                third.wait_ready()
                assert read_direct(file, 3 * MIB, 4096) == pattern(3 * MIB, 4096)
                third.request("handover")
                third.last_line(4)
            last = recoverer(description=description)
            last.wait_ready()
        with last:
            last.stop()


@pytest.mark.parametrize("recovery", ["reissue", "queue", "fail-io"])
def test_handed_over_under_reads(recovery: str) -> None:
    """Where the driver can quiesce a device, no mode loses what is in flight; elsewhere
    only reissue keeps it.
    """
    if recovery == "fail-io" and not kernel_has(F_FAIL_IO):
        inapplicable("fail-io is Linux 6.13")
    loses = recovery != "reissue" and not kernel_has(F_QUIESCE)
    with served(recovery) as first:
        with verified(first.device) as reads:
            server = first
            for _ in range(3):
                assert server.request("handover") == {"reply": "handover"}
                last = server.last_line(4)
                assert last["handed_over"] is True and last["stats"]["errors"] == 0
                if server is not first:
                    server.close()
                server = recoverer()
                server.wait_ready()
                reads.wait_for_reads(3 * READERS)
                assert server.process.poll() is None
            reads.stop()
        with server:
            assert read_direct(first.device, 0, 4096) == pattern(0, 4096)
            server.stop()
        assert reads.wrong == 0
        if recovery != "fail-io" and not loses:
            must_be_clean(reads)  # with fail-io, reads fail until the next server is up
