"""btrfs-ublk-mkseed's manners: bad input, outputs that exist, failures, kills."""

import os
import random
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from support.sanitized_build import SANITIZER_ENVIRONMENT, sanitized_build
from support.seeds import GIB, KIB, assert_refused, mkseed, mkseed_raw

from btrfs_ublk.base.helpers import MKSEED, helper_path

#: The fixture, under a name of this module's.
sanitizers = sanitized_build


#: What is wrong, the arguments, and what the message says.
BAD_USAGE: dict[str, tuple[list[str | bytes], str]] = {
    "not a size": (["--virtual-data-size=lots", "o"], '"lots" is not a size'),
    "over 64 bits": (["--virtual-data-size=16E", "o"], "more than 64 bits"),
    "unaligned": (["--virtual-data-size=4194305", "o"], "not a multiple of 4096"),
    "too small": (["--virtual-data-size=4092K", "o"], "too small"),
    "too large": (["--virtual-data-size=8E", "o"], "the limit is 9223371482803994624"),
    "slash": (["--virtual-data-filename=a/b", "o"], "slash"),
    "dot dot": (["--virtual-data-filename=..", "o"], "names a directory"),
    "long name": (["--virtual-data-filename", "n" * 256, "o"], "256 bytes"),
    "name not UTF-8": ([b"--virtual-data-filename=\xff", "o"], "UTF-8"),
    "label of lines": (["--label", "a\nb", "o"], "line break"),
    "not a UUID": (["--fsid=1234", "o"], "not a UUID"),
    "time": (["--time=yesterday", "o"], "not a time"),
    "long chunk": (["--chunk-size=256T", "o"], "multiple of 4 GiB"),
    "many chunks": (["--chunk-size=4G", "o"], "the limit is 262144"),
    "empty output": ([""], "OUTPUT is missing"),
}


@pytest.mark.parametrize("case", BAD_USAGE)
def test_bad_usage_is_refused(sanitizers: Path, tmp_path: Path, case: str) -> None:
    args, message = BAD_USAGE[case]
    program = sanitizers / "csrc/tools" / MKSEED
    done = mkseed_raw(*args, program=program, env=SANITIZER_ENVIRONMENT, cwd=tmp_path)
    assert_refused(done, 2, message)
    assert os.listdir(tmp_path) == []


# The output


def test_what_exists_stays_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "seed.img"
    path.write_text("precious")
    assert_refused(mkseed_raw("--metadata-only", path), 1, "exists", "--force")
    assert path.read_text() == "precious"
    # Who has it open keeps the old file: it is replaced, not written over.
    with path.open() as old:
        mkseed("--metadata-only", "--force", path)
        assert old.read() == "precious"
    assert path.stat().st_size == 256 * GIB + 64 * KIB
    assert os.listdir(tmp_path) == ["seed.img"]


@pytest.mark.parametrize("kind", ["directory", "symlink", "dangling", "fifo", "socket"])
@pytest.mark.parametrize("force", [(), ("--force",)])
def test_what_is_no_regular_file_is_never_replaced(
    tmp_path: Path, kind: str, force: tuple[str, ...]
) -> None:
    path = tmp_path / "o"
    (tmp_path / "target").write_text("precious")
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as sock:
            # The path may be longer than such addresses can be.
            directory = os.open(tmp_path, os.O_PATH)
            sock.bind(f"/proc/self/fd/{directory}/o")
            os.close(directory)
    else:
        path.symlink_to("target" if kind == "symlink" else "nowhere")
    before = path.lstat()
    done = mkseed_raw("--metadata-only", *force, path)
    assert_refused(done, 1, "not a regular file")
    assert path.lstat() == before
    assert sorted(os.listdir(tmp_path)) == ["o", "target"]
    assert (tmp_path / "target").read_text() == "precious"


@pytest.mark.parametrize(
    "name, message",
    [
        ("nowhere/seed.img", "directory does not exist"),
        ("file/seed.img", "Not a directory"),
        ("file/", "Not a directory"),
        ("new/", "Is a directory"),
        (".", "not a regular file"),
        ("n" * 256, "File name too long"),
    ],
)
def test_a_bad_place_is_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "file").touch()
    done = mkseed_raw("--metadata-only", f"{tmp_path}/{name}")
    assert_refused(done, 1, message)
    assert os.listdir(tmp_path) == ["file"]


def test_a_killed_run_leaves_nothing(tmp_path: Path) -> None:
    rng = random.Random(7)
    interrupted = 0
    for number in range(20):
        signum = rng.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
        name = f"seed-{number}"
        process = subprocess.Popen(
            [helper_path(MKSEED), "--metadata-only", tmp_path / name],
            stdout=subprocess.DEVNULL,
        )
        time.sleep(rng.uniform(0, 0.03))
        process.send_signal(signum)
        status = process.wait(timeout=30)
        assert status in (0, -signum)
        interrupted += status != 0
        # All of it or nothing; one killed after its end may well be complete.
        present = os.listdir(tmp_path)
        assert present in ([], [name]), present
        if present:
            assert (tmp_path / name).stat().st_size == 256 * GIB + 64 * KIB
            (tmp_path / name).unlink()
        else:
            assert status != 0
    assert interrupted > 0


# Under sanitizers
