"""scripts/fstests, with a stand-in for fstests: what tests get, and what it says."""

import fcntl
import subprocess
from pathlib import Path

import pytest
from support.needs import Need
from support.paths import PROJECT

from btrfs_ublk.base.capabilities import BTRFS, BTRFS_PROGS, FUSE, LOOP, ROOT

SCRIPT = PROJECT / "scripts" / "fstests"
TIMEOUT_S = 240

#: A stand-in: what each test is named after is what it fails on.
CHECK = r"""#!/usr/bin/env bash
export seqnum
failures=
on() { # TEST mkfs's ARGUMENT…: what is there then
    seqnum=$1
    mkfs.btrfs "${@:2}" "$SCRATCH_DEV" >&2 || exit
    mount -t btrfs $MOUNT_OPTIONS "$SCRATCH_DEV" "$SCRATCH_MNT" || exit
    shown=$(btrfs subvolume get-default "$SCRATCH_MNT")
    devices=$(btrfs filesystem show --raw "$SCRATCH_MNT")
    files=$(ls "$SCRATCH_MNT")
    umount "$SCRATCH_MNT"
}
mount -t btrfs $TEST_FS_MOUNT_OPTS "$TEST_DEV" "$TEST_DIR" || exit
umount "$TEST_DIR"
on fake/new -f
[[ -z $files ]] || failures+=" fake/$files"
[[ $shown == "ID 5 "* ]] || failures+=" fake/subvolume"
[[ $devices == *"Total devices 1 "* ]] || failures+=" fake/sprout"
on fake/sized -f -b 1073741824 -m single -d single
[[ $devices == *" size 1073741824 "*" path $SCRATCH_DEV"* ]] || failures+=" fake/size"
on fake/dup -f -m dup
[[ $devices == *"Total devices 1 "* ]] || failures+=" fake/dup"
mkfs.btrfs "$SCRATCH_DEV" >&2 && failures+=" fake/overwritten"
mkdir "$RESULT_BASE"
echo "$*" >"$RESULT_BASE/arguments"
printf '%s\n' "Not run: fake/always" "Failures:$failures" >"$RESULT_BASE/check.log"
exit 1
"""


def run(*argv: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, *map(str, argv)], capture_output=True, text=True, timeout=TIMEOUT_S
    )


@pytest.mark.device
@pytest.mark.timeout(TIMEOUT_S + 30)
@pytest.mark.parametrize("on", ["sprout", "fork"])
def test_what_fails_on_the_sprout_only(need: Need, sparse_path: Path, on: str) -> None:
    need(ROOT, BTRFS, BTRFS_PROGS, LOOP)
    check = sparse_path / "check"
    check.write_text(CHECK)
    check.chmod(0o755)
    results = sparse_path / "results"
    options, only = [], "fake/sprout"
    if on == "fork":
        need(FUSE)
        options, only = ["--on", "fork"], "fake/lost+found fake/sprout"
    done = run(*options, sparse_path, results, "-g", "some")
    assert done.returncode == 1, done.stderr
    assert done.stdout == only.replace(" ", "\n") + "\n", done.stderr
    assert f"made plain on the {on}'s device: fake/dup\n" in done.stderr
    assert "does not pass on plain either: fake/always\n" in done.stderr
    assert "on subvolume either: fake/always fake/subvolume\n" in done.stderr
    assert (results / on / "arguments").read_text() == "-g some\n"
    again = (results / "plain/arguments").read_text()
    assert again == f"fake/always {only} fake/subvolume\n"
    again = (results / "subvolume/arguments").read_text()
    assert again == f"{only} fake/subvolume\n"
    assert not (results / "work").exists()


@pytest.mark.device
def test_one_at_a_time(need: Need, tmp_path: Path) -> None:
    need(ROOT)
    check = tmp_path / "check"
    check.touch(mode=0o755)
    with check.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        done = run(tmp_path, tmp_path / "new")
    assert done.returncode == 1 and "runs already" in done.stderr


def test_wrong_usage(tmp_path: Path) -> None:
    for arguments in ([], [tmp_path, tmp_path / "new"], ["/bin", tmp_path]):
        done = run(*arguments)
        assert done.returncode == 2, done.stderr
        assert "scripts/fstests [--on fork] FSTESTS RESULTS" in done.stderr
