"""The command line of the server: what it refuses before it touches anything."""

import subprocess

import pytest

from btrfs_ublk.base.helpers import SERVER, helper_path


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [helper_path(SERVER), *arguments], capture_output=True, text=True, timeout=30
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no description given"),
        (["a", "b"], "more than one description"),
        (["--bla", "a"], "unrecognized option"),
        (["--depth"], "requires an argument"),
        (["--queues", "0", "a"], "'0' is not a number from 1 to 256"),
        (["--depth", "-1", "a"], "'-1' is not a number from 1 to 1024"),
        (["--max-io", "5K", "a"], "is not a multiple of 4K"),
        (["--tag", "xyz", "a"], "is not a number of up to 16 hexadecimal digits"),
        (["--front-end", "nbd", "a"], "neither auto, ublk nor fuse"),
        (["--recovery", "always", "a"], "--recovery 'always' is neither none"),
        (["--recover", "0", "a"], "--recover needs --tag"),
        (["--recover", "0", "--tag", "1", "--id", "1", "a"], "as it is"),
        (["--recover", "0", "--tag", "1", "--recovery", "queue", "a"], "as it is"),
        (["--recover", "x", "--tag", "1", "a"], "--recover 'x' is not a number"),
        (["--list-devices", "a"], "--list-devices takes no description"),
        (["--delete-device", "0"], "needs --tag"),
    ],
)
def test_wrong_usage(arguments: list[str], words: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert words in done.stderr and "--help" in done.stderr
    assert done.stdout == ""
