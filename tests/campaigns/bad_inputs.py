"""Uses all commands in many wrong ways, and shows what they print.

``scripts/torture bad-inputs [WORD]…``, with mounts and processes of its own, runs the
cases of bad_inputs.txt that contain a WORD, or all, and prints the exit status and the
messages of each, for a reader to judge. It checks what needs no judgement: the status
is one that the case names, there is no traceback, the command ends within ten seconds,
and nothing is left but the files that the case names.

A case is a line, ``STATUS[|STATUS…] [-> FILE that it makes]: COMMAND OF BASH``. In it,
``b`` is the command, ``nobody b`` the same without privileges, ``int SECONDS b`` one
that is interrupted; ``$U`` is the URL of a server that serves the current directory.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import campaign
import click
import psutil

from btrfs_ublk.base.entry import run_command
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.kernel.mountinfo import read_mountinfo

PROJECT = Path(__file__).parents[2]
CASES = Path(__file__).with_suffix(".txt")
ROOT = Path(os.environ.get("TMPDIR", "/dev/shm"), "bad-inputs")
WORK = ROOT / "work"
_LONGEST_S = 10.0

PRELUDE = """
B=$(dirname "$PYTHON")/btrfs-ublk
b() { "$B" "$@"; }
nobody() { shift; setpriv --reuid 65534 --regid 65534 --clear-groups "$B" "$@"; }
int() { local s=$1; shift 2; timeout --preserve-status -s INT "$s" "$B" "$@"; }
LONG=$(printf 'n%.0s' {1..300})
U=$(cat url 2> /dev/null)
"""

SETUP = """
set -e
mkdir dir small ro mnt other
mkfifo fifo
ln -s missing link; ln -s loop loop
: > empty; echo 'some text' > text; echo '{"a":' > bad.json; echo 'size = [' > bad.toml
echo 'secret' > secret; chmod 0 secret
echo 'nonsense = 1' > odd.toml; echo 'size = "1T"' > good.toml
printf 'mount = "/\\xe4"\\n' > latin1.toml
(umask 077; echo user:pw > login); echo user:pw > wide; chmod 644 wide
head -c 1M /dev/urandom > big; head -c 8M /dev/urandom > junk.img
touch other/file
until [ -s url ]; do sleep 0.05; done
for size in 4096 8192; do
  echo '{"version": 1, "size": '$size', "segments":
    [{"kind": "pattern", "offset": 0, "length": '$size'}]}' > p.$size
done
mount -t tmpfs -o size=64K,mode=700 none small
head -c 60K /dev/zero > small/most
mount -t tmpfs -o ro,mode=700 none ro
b seed create seed.img --virtual-data-size 1G --metadata-only
head -c 1M seed.img > cut.img
b volume up v --front-end fuse --mount mnt --cache cache --add-file "big=$PWD/big"
b volume up d --front-end fuse && b volume down d
b device up p p.8192 --front-end fuse
cd "$BTRFS_UBLK_VOLUMES_DIR"; cp -a d damaged; echo nonsense > damaged/volume.json
"""
WEB_SERVER = 'exec "$PYTHON" -m btrfs_ublk.testing.range_server . --port 0 > url'
#: Removes what a case may have made that should have been refused.
UNDO = "{ b volume down x && b volume remove x --yes; b device down x; } 2> /dev/null"
TEARDOWN = "b device down p; umount small ro; b volume down v"


def _environment() -> dict[str, str]:
    build = max(PROJECT.glob("build/cp*/build.ninja")).parent
    return {
        **{name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
        **{
            f"BTRFS_UBLK_{x}_DIR": str(ROOT / x.lower())
            for x in ("RUN", "STATE", "VOLUMES", "CONFIG")
        },
        "PYTHONPATH": str(PROJECT),
        "PYTHONDONTWRITEBYTECODE": "1",
        "BTRFS_UBLK_HELPERS": str(build / "csrc/tools"),
        "LC_ALL": "C.UTF-8",
        "PYTHON": sys.executable,
    }


def _bash(
    text: str, environment: dict[str, str], **more: object
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # type: ignore[call-overload,no-any-return]
        ["bash", "-c", PRELUDE + text],
        cwd=WORK,
        env=environment,
        start_new_session=True,
        **more,
    )


def _state() -> set[str]:
    """Return the state that a case must not change."""
    found = {f"mount {x.target}" for x in read_mountinfo() if ROOT in x.target.parents}
    for link in Path("/sys/block").glob("loop*/loop/backing_file"):
        with suppress(OSError):
            backing = link.read_text().strip()
            if backing.startswith(str(ROOT)):
                found.add(f"{link.parent.parent.name} of {backing}")
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(
                "BTRFS_UBLK_RUN_DIR"
            ) == str(ROOT / "run"):
                found.add(f"process {process.pid} {' '.join(process.cmdline())}")
        except psutil.Error:
            pass
    for path in ROOT.rglob("*"):
        within = str(path.relative_to(ROOT))
        # Leave out files of a server whose volume is up, and commands' ledgers.
        if not re.match(
            r"volumes/v/|work/(mnt|cache)/|run/devices/[pv]/|state", within
        ):
            found.add(f"file {within}")
    return found


def _run(text: str, environment: dict[str, str]) -> tuple[int, str, float]:
    """Return the exit status, stdout and stderr, and the duration in seconds."""
    began_s = time.monotonic()
    with tempfile.TemporaryFile() as said:
        child = _bash(
            text, environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said
        )
        try:
            status = child.wait(timeout=3 * _LONGEST_S)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            status = child.wait()
        said.seek(0)
        output = said.read().decode(errors="backslashreplace")
    return status, output, time.monotonic() - began_s


def _judge(case: str, environment: dict[str, str], before: set[str]) -> bool:
    """Run a case, print what it did, and return whether that is right."""
    expected, _, text = case.partition(": ")
    statuses, _, made = expected.partition(" -> ")
    status, output, took_s = _run(text, environment)
    if made:
        (WORK / made).unlink(missing_ok=True)
    left = sorted(_state() ^ before)
    complaints = {
        f"the exit status is none of {statuses}": str(status) in statuses.split("|"),
        "a traceback": "Traceback" not in output,
        "too slow": took_s < _LONGEST_S,
        f"left, or gone: {left}": not left,
    }
    print(f"$ {text}   [{status}, {took_s:.1f} s]")
    print("".join(f"  {line}\n" for line in output.splitlines()[:6]), end="")
    for complaint in (text for text, is_well in complaints.items() if not is_well):
        print(f"  !!! {complaint}", flush=True)
    return all(complaints.values())


@click.command(context_settings=campaign.SETTINGS | {"ignore_unknown_options": True})
@click.argument("words", nargs=-1)
def command(words: Sequence[str]) -> None:
    """Run the cases that contain one of WORDS, or all."""
    environment = _environment()
    lines = [x for x in CASES.read_text().splitlines() if not x.startswith("#")]
    cases = [x for x in lines if not words or any(word in x for word in words)]
    WORK.mkdir(parents=True)
    web_server = _bash(WEB_SERVER, environment, stderr=subprocess.DEVNULL)
    try:
        if _bash(SETUP, environment).wait(timeout=120):
            raise BtrfsUblkError("cannot make what the cases need")
        wrong: list[str] = []
        before = _state()
        for case in cases:
            if not _judge(case, environment, before):
                wrong.append(case)
                _bash(UNDO, environment).wait(timeout=120)
                before = _state()
        campaign.conclude(wrong, rounds=len(cases))
    finally:
        _bash(TEARDOWN, environment).wait(timeout=120)
        web_server.terminate()
        web_server.wait(timeout=10)
        shutil.rmtree(ROOT)


if __name__ == "__main__":
    run_command(command, name="bad_inputs.py")
