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

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import campaign
import click
import psutil
from support.processes import stop

from btrfs_ublk.base.entry import run_command
from btrfs_ublk.device.state import RUN_VARIABLE
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.kernel.mountinfo import read_mountinfo
from btrfs_ublk.kernel.temporary import loops_below

PROJECT = Path(__file__).parents[2]
CASES = Path(__file__).with_suffix(".txt")
_LONGEST_S = 10.0
_ME = psutil.Process()

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


class Cases:
    """Runs cases in the directory ``work`` of ``top``."""

    def __init__(self, top: Path) -> None:
        self._top, self._work = top, top / "work"
        self._work.mkdir()
        build = max(PROJECT.glob("build/cp*/build.ninja")).parent
        self._environment = os.environ | {
            "PYTHONPATH": str(PROJECT),
            "PYTHONDONTWRITEBYTECODE": "1",
            "BTRFS_UBLK_HELPERS": str(build / "csrc/tools"),
            "LC_ALL": "C.UTF-8",
            "PYTHON": sys.executable,
        }
        # Nobody may come here, too.
        top.chmod(0o755)

    def bash(self, text: str, **more: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            ["bash", "-c", PRELUDE + text],
            cwd=self._work,
            env=self._environment,
            start_new_session=True,
            **more,
        )

    def state(self) -> set[str]:
        """Return the state that a case must not change."""
        top = self._top
        found = {f"mount {x}" for x in read_mountinfo() if top in x.target.parents}
        found |= {f"{name} of {file}" for name, file in loops_below(top)}
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                run = process.environ().get(RUN_VARIABLE)
                if process.status() != psutil.STATUS_ZOMBIE and process != _ME:
                    if run == os.environ[RUN_VARIABLE]:
                        found.add(f"process {process.pid} {process.cmdline()}")
        for path in top.rglob("*"):
            within = str(path.relative_to(top))
            # Leave out files of a server whose volume is up, and commands' ledgers.
            if not re.match(
                r"volumes/v/|work/(mnt|cache)/|run/devices/[pv]/|state", within
            ):
                found.add(f"file {within}")
        return found

    def judge(self, case: str, before: set[str]) -> list[str]:
        """Run a case, print what it did, and return what of that is wrong."""
        expected, _, text = case.partition(": ")
        statuses, _, made = expected.partition(" -> ")
        status, output, took_s = self._run(text)
        if made:
            (self._work / made).unlink(missing_ok=True)
        left = sorted(self.state() ^ before)
        complaints = {
            f"the exit status is none of {statuses}": str(status)
            in statuses.split("|"),
            "a traceback": "Traceback" not in output,
            "too slow": took_s < _LONGEST_S,
            f"left, or gone: {left}": not left,
        }
        found = [text for text, is_well in complaints.items() if not is_well]
        lines = [f"$ {text}   [{status}, {took_s:.1f} s]"]
        lines += [f"  {line}" for line in output.splitlines()[:6]]
        print("\n".join([*lines, *(f"  !!! {x}" for x in found)]), flush=True)
        return [f"{text}: {x}" for x in found]

    def _run(self, text: str) -> tuple[int, str, float]:
        """Return the exit status, stdout and stderr, and the duration in seconds."""
        began_s = time.monotonic()
        with tempfile.TemporaryFile() as said:
            child = self.bash(text, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
            try:
                status = child.wait(timeout=3 * _LONGEST_S)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                status = child.wait()
            said.seek(0)
            output = said.read().decode(errors="backslashreplace")
        return status, output, time.monotonic() - began_s


@campaign.command(
    "bad-inputs",
    click.argument("words", nargs=-1, type=click.UNPROCESSED),
    on_disks=False,
    seeded=False,
)
def command(run: campaign.Run, words: Sequence[str]) -> None:
    """Run the cases that contain one of WORDS (after --), or all."""
    cases = Cases(run.directory)
    lines = [x for x in CASES.read_text().splitlines() if not x.startswith("#")]
    web_server = cases.bash(WEB_SERVER, stderr=subprocess.DEVNULL)
    run.stack.callback(stop, web_server)
    run.stack.callback(lambda: cases.bash(TEARDOWN).wait(timeout=120))
    if cases.bash(SETUP).wait(timeout=120):
        raise BtrfsUblkError("cannot make what the cases need")
    before = cases.state()
    for case in lines:
        if words and not any(word in case for word in words):
            continue
        problems = cases.judge(case, before)
        run.add({"case": case, "problems": problems})
        if problems:
            cases.bash(UNDO).wait(timeout=120)
            before = cases.state()


if __name__ == "__main__":
    run_command(command, name="bad_inputs.py")
