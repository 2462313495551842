"""New files in directories of other users: whole, and nobody else's."""

import errno
import os
import stat
from itertools import count
from pathlib import Path

import pytest
from support.processes import interrupted_at_line, killed_at_event

from btrfs_ublk.base.gc import collect
from btrfs_ublk.kernel.new_file import new_file, write_new

pytestmark = pytest.mark.data

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")


@pytest.fixture(params=["nameless", "named"])
def any_file_system(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With O_TMPFILE, and where a file system has none."""
    if request.param == "named":
        opened = os.open

        def without(
            path: str, flags: int, *rest: int, dir_fd: int | None = None
        ) -> int:
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, "no nameless files")
            return opened(path, flags, *rest, dir_fd=dir_fd)

        monkeypatch.setattr(os, "open", without)


@pytest.mark.usefixtures("any_file_system")
class TestNewFile:
    def test_it_appears_whole(self, tmp_path: Path) -> None:
        path = tmp_path / "new"
        for replace in (False, True):
            write_new(path, b"text", mode=0o640, replace=replace, synced=True)
            assert path.read_bytes() == b"text"
            assert stat.S_IMODE(path.stat().st_mode) == 0o640
        assert os.listdir(tmp_path) == ["new"]

    def test_what_is_there_stays(self, tmp_path: Path) -> None:
        path = tmp_path / "there"
        path.write_bytes(b"before")
        with pytest.raises(FileExistsError):
            write_new(path, b"after")
        for target, kind in (("there", "symbolic link"), ("none", "symbolic link")):
            (tmp_path / "link").unlink(missing_ok=True)
            (tmp_path / "link").symlink_to(target)
            with pytest.raises(FileExistsError, match=kind):
                write_new(tmp_path / "link", b"after", replace=True)
        os.mkfifo(tmp_path / "fifo")
        with pytest.raises(FileExistsError, match="no regular file"):
            write_new(tmp_path / "fifo", b"after", replace=True)
        assert path.read_bytes() == b"before"
        assert sorted(os.listdir(tmp_path)) == ["fifo", "link", "there"]

    @pytest.mark.parametrize("replace", [False, True])
    def test_after_an_error_all_is_as_before(
        self, tmp_path: Path, replace: bool
    ) -> None:
        path = tmp_path / "file"
        if replace:
            path.write_bytes(b"before")
        with pytest.raises(KeyboardInterrupt), new_file(path, replace=replace) as file:
            file.write(b"half")
            raise KeyboardInterrupt
        assert os.listdir(tmp_path) == (["file"] if replace else [])
        assert not replace or path.read_bytes() == b"before"

    def test_interrupted_at_any_line(self, tmp_path: Path) -> None:
        """What it replaces is there, or what replaces it, and nothing else."""
        path = tmp_path / "file"
        for number in count(1):
            path.write_bytes(b"before")
            if not interrupted_at_line(
                *(number, "kernel/new_file.py"),
                lambda: write_new(path, b"after", replace=True),
            ):
                break
            assert path.read_bytes() in (b"before", b"after")
            assert os.listdir(tmp_path) == ["file"], f"line {number} that ran"
        assert number > 20

    def test_gc_removes_what_a_killed_writer_left(self, tmp_path: Path) -> None:
        """Wherever it was killed, but nothing that another program has named so."""
        path, other = tmp_path / "file", tmp_path / ".btrfs-ublk-0123456789abcdef.tmp"
        other.touch()
        found = set()
        for number in count(1):
            path.write_bytes(b"before")
            was_killed = killed_at_event(
                number, lambda: write_new(path, b"after", replace=True)
            )
            found |= {*os.listdir(tmp_path)} - {path.name, other.name}
            assert collect().is_clean
            assert sorted(os.listdir(tmp_path)) == [other.name, path.name], number
            assert path.read_bytes() in (b"before", b"after")
            if not was_killed:
                break
        assert found

    def test_the_umask_is_kept(self, tmp_path: Path) -> None:
        before = os.umask(0o027)
        try:
            write_new(tmp_path / "new", b"")
        finally:
            os.umask(before)
        assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640
