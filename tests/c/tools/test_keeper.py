"""The keeper by itself: what it does when who started it ends, and what it refuses."""

import errno
import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from support.devices import TIMEOUT_S
from support.faults import refusing

from btrfs_ublk.base.helpers import KEEPER, helper_path
from btrfs_ublk.kernel.waiting import wait_until


class TestHelper:
    """The program alone."""

    @contextmanager
    def keeper(
        self, directory: Path, *command: str
    ) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
        read_fd, write_fd = os.pipe()
        argv = [helper_path(KEEPER), "--watch", str(read_fd)]
        child = subprocess.Popen(
            [*argv, "--directory", directory, *command], pass_fds=[read_fd]
        )
        os.close(read_fd)
        with ExitStack() as stack:
            stack.callback(lambda: (child.kill(), child.wait()))
            stack.callback(lambda: os.close(write_fd) if write_fd in open_fds() else 0)
            yield child, write_fd

    def test_it_ends_with_who_started_it_before_it_goes(self, tmp_path: Path) -> None:
        mark = tmp_path / "mark"
        with self.keeper(tmp_path, "/usr/bin/touch", str(mark)) as (child, fd):
            os.close(fd)
            assert child.wait(TIMEOUT_S) == 0
        assert not mark.exists()

    def test_it_starts_the_command_until_it_succeeds(self, tmp_path: Path) -> None:
        script = f'echo >> {tmp_path}/runs; [ "$(wc -l < {tmp_path}/runs)" -ge 3 ]'
        with self.keeper(tmp_path, "/bin/sh", "-c", script) as (child, fd):
            os.write(fd, b"g")
            os.close(fd)
            runs = tmp_path / "runs"
            wait_until(
                lambda: runs.exists() and runs.read_text() == "\n" * 3,
                timeout_s=TIMEOUT_S,
                what="three runs",
            )
            with pytest.raises(subprocess.TimeoutExpired):
                child.wait(1)
            assert runs.read_text() == "\n" * 3

    @pytest.mark.skipif(platform.machine() != "x86_64", reason="names calls by number")
    def test_a_lock_that_cannot_be_had_is_tried_again_after_a_pause(
        self, tmp_path: Path
    ) -> None:
        """As on a kernel that lacks memory for locks. It must not go round at once."""
        read_fd, write_fd = os.pipe()
        flock = 73
        argv = [*refusing({flock: errno.ENOLCK}), helper_path(KEEPER), "--watch"]
        argv += [str(read_fd), "--directory", tmp_path, "--lock", tmp_path / "lock"]
        with subprocess.Popen(
            [*argv, "/bin/true"], pass_fds=[read_fd], stderr=subprocess.PIPE, text=True
        ) as child:
            os.close(read_fd)
            os.write(write_fd, b"g")
            os.close(write_fd)
            assert child.stderr is not None
            try:
                said = [child.stderr.readline() for _ in range(2)]
            finally:
                child.kill()
        assert all("cannot lock" in line for line in said), said
        assert all(os.strerror(errno.ENOLCK) in line for line in said)

    def test_after_a_farewell_it_only_stays(self, tmp_path: Path) -> None:
        mark = tmp_path / "mark"
        with self.keeper(tmp_path, "/usr/bin/touch", str(mark)) as (child, fd):
            os.write(fd, b"gs")
            os.close(fd)
            with pytest.raises(subprocess.TimeoutExpired):
                child.wait(1)
        assert not mark.exists()

    def test_it_ends_when_the_device_is_gone(self, tmp_path: Path) -> None:
        directory, mark = tmp_path / "device", tmp_path / "mark"
        directory.mkdir()
        command = f"touch {mark}; exit 1"
        with self.keeper(directory, "/bin/sh", "-c", command) as (child, fd):
            os.write(fd, b"g")
            os.close(fd)
            wait_until(mark.exists, timeout_s=TIMEOUT_S, what="no command")
            directory.rmdir()
            assert child.wait(TIMEOUT_S) == 0


def open_fds() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/fd")}
