"""Kills `btrfs-ublk image` commands, and what they need, and sees what is left.

``python tests/campaigns/images.py --help``. An image is up, from a registry on
loopback. In each round, a process writes to a fork of it (shadowed_writer.py), another
command is killed at a random moment of the time that it takes, and then run again: it
must do what it was asked to, whatever its dead predecessor had done of it. In others,
two commands are killed at once; or the registry is, which comes back, and the command,
which may fail, is run again; or servers, daemon and keepers get signals (kills.py has
these kinds). Then the fork is compared with what was written, before and after the
volume was down, the data of the image with the source, and all that is below the
campaign's directories, mounted or running, with what was there before. All random
choices follow from --seed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import campaign
from campaign import Run, by_kind, summed
from killable import (
    differences_to,
    have_all_supervised,
    retry,
    serving,
    settled,
    signal_at_once,
    soon,
)
from kills import SINGLE
from shadow import shadowed_writer
from support.images import tagged_image
from support.registry import REGISTRY, Registry, registry_server
from support.verified_reads import drop_pages

from btrfs_ublk.base.capabilities import BTRFS, LOOP, ROOT
from btrfs_ublk.base.entry import run_command
from btrfs_ublk.bench.report import Document, Result, Table
from btrfs_ublk.device import show_device
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.image import parse_name
from btrfs_ublk.image.access import RegistryAccess
from btrfs_ublk.image.check import check_image
from btrfs_ublk.image.store import ImageStore
from btrfs_ublk.units import GIB, MIB
from btrfs_ublk.volume import (
    VolumeDefinition,
    down_volume,
    fork_image,
    forks_of_image,
    remove_volume,
    unfork_image,
    up_volume,
)
from btrfs_ublk.volume.down import is_anything_up
from btrfs_ublk.volume.store import volume_directories

NAME, OTHER = "campaign", "other"
WRITTEN, QUIET, NEW, NEWER = "written", "quiet", "new", "newer"
_QUOTA_BYTES = 64 * MIB
_LAZY_BYTES = 4 * MIB
#: The cache holds a part of the image, so that it is fetched again and again.
_CACHE_BYTES = 2 * MIB
_SMALL_FILES = 50
_TEXT = b"a line of text\n" * 100_000
_LONGEST_WORK_S = 0.5
_TIMEOUT_S = 240.0
#: How long a command is thought to take, before one has ended.
_FIRST_S = 1.5
#: How long the registry is away, at most.
_LONGEST_OUTAGE_S = 1.0
_MESSAGE_LINES = 3
_NO_FORK = "there is no fork"


class Campaign:
    """An image that is up, a fork that is written to, and commands to be killed."""

    def __init__(self, run: Run, registry: Registry, *, deadline_s: int) -> None:
        self._top, self._registry = run.directory, registry
        self._front_end, self._chances = run.front_end, run.chances
        self._deadline_s = deadline_s
        self._mount = self._top / "mnt"
        self._access = RegistryAccess(ca_file=registry.ca_file)
        self._ca = ("--ca-file", registry.ca_file)
        self._number = 0
        #: How long each kind of command takes, in seconds, when it is not killed.
        self._takes_s: dict[str, float] = {}
        #: What ends while commands work: they themselves, or the registry.
        self._hit = self._kill_commands

    def make_image(self) -> None:
        files = {"lazy": self._chances.randbytes(_LAZY_BYTES), "text": _TEXT}
        files |= {f"etc/{number}": b"%d\n" % number for number in range(_SMALL_FILES)}
        for name, data in files.items():
            path = self._top / "tree" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        ordinary = tagged_image(self._top / "ordinary", files, {"etc/last": b"last\n"})
        (self._top / "tree/etc/last").write_bytes(b"last\n")
        self._expect("build", ordinary, "-o", self._top / "image", "--tag", "1")
        self._expect("push", f"oci:{self._top}/image:1", self._name("app:1"), *self._ca)
        (self._top / "etc/images.toml").write_text(
            f'[[allow]]\nfrom = "{self._registry.host}/*"\n'
        )

    def _name(self, name: str) -> str:
        return f"{self._registry.host}/{name}"

    def _definition(self, mount: Path) -> VolumeDefinition:
        return VolumeDefinition(
            image=self._name("app:1"),
            image_ca_file=self._registry.ca_file,
            writable_bytes=GIB,
            cache_max_bytes=_CACHE_BYTES,
            mount=mount,
            front_end=self._front_end,
        )

    @contextmanager
    def bed(self, _result: Result) -> Iterator[Callable[[Result], None]]:
        """Have an image up, and a writer in a fork of it; yield what does a round."""
        try:
            up_volume(NAME, self._definition(self._mount))
            written = fork_image(
                NAME, WRITTEN, mode=self._chances.choice(["overlay", "snapshot"])
            )
            quiet = fork_image(NAME, QUIET, mode="snapshot")
            (quiet / "etc/1").write_text("changed")
            with shadowed_writer(
                written / "new",
                written / "lazy",
                self._top / "tree/lazy",
                seed=self._chances.randrange(1 << 32),
                timeout_s=self._deadline_s,
            ) as self._writer:
                before = settled(self._top)

                def do(result: Result) -> None:
                    self._round(result)
                    result["problems"] += differences_to(before, self._top)

                yield do
        finally:
            for volume in volume_directories():
                if is_anything_up(volume):
                    self._take_down(volume.name)
                remove_volume(volume.name)

    def _take_down(self, name: str) -> None:
        retry(lambda: down_volume(name), timeout_s=self._deadline_s)

    def _unfork_new(self) -> None:
        retry(lambda: unfork_image(NAME, NEW), timeout_s=self._deadline_s)

    def _round(self, result: Result) -> None:
        kind, writer = result["kind"], self._writer
        self._number += 1
        writer.ask("go 0")
        time.sleep(self._chances.uniform(0, _LONGEST_WORK_S))
        _KINDS[kind](self, result)
        if kind != "down":
            self._pause(result)
        self._compare(result, "then")
        writer.ask("release")
        names = {each.name for each in forks_of_image(NAME)}
        if names != {WRITTEN, QUIET}:
            result["problems"].append(f"there are forks {sorted(names)}")
        self._take_down(NAME)
        up_volume(NAME, self._definition(self._mount))
        self._compare(result, "up again")

    def _pause(self, result: Result) -> None:
        paused = self._writer.ask("pause")
        result["operations"] = paused["operations"]
        result["problems"] += paused["errors"]

    def _compare(self, result: Result, when: str) -> None:
        for each in self._writer.ask("compare")["differences"]:
            result["problems"].append(f"{when}: {each}")
        self._compare_trees(self._top / "tree", self._mount / "rootfs", result)

    def _compare_trees(self, first: Path, second: Path, result: Result) -> None:
        done = subprocess.run(
            ["diff", "-r", "--no-dereference", f"{first}/", f"{second}/"],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
        if done.returncode:
            said = (done.stdout + done.stderr)[:500]
            result["problems"].append(f"{second} is another tree: {said}")

    # Commands, killed and run again.

    def _command(self, *words: object) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "btrfs_ublk.cli.main", "image", *map(str, words)]
        return subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def _run(self, *words: object) -> tuple[int, str, str]:
        with self._command(*words) as child:
            try:
                out, said = child.communicate(timeout=_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                child.kill()
                raise BtrfsUblkError(f"image {words[0]} hangs") from None
        return child.returncode, out, said

    def _expect(self, *words: object, unless: Sequence[str] = ()) -> str:
        """Run a command that must work, or say what another one has done already."""
        end_s = time.monotonic() + self._deadline_s
        status, out, said = self._run(*words)
        while status and "end what uses it" in said and time.monotonic() < end_s:
            status, out, said = self._run(*words)  # as in retry()
        if status and not any(each in said for each in unless):
            tail = " ".join(said.strip().splitlines()[-_MESSAGE_LINES:])
            raise BtrfsUblkError(f"image {words[0]}: exit status {status}: {tail}")
        return out.strip()

    def _kill(
        self, result: Result, *commands: Sequence[object], unless: Sequence[str] = ()
    ) -> None:
        """Start commands, kill them at a moment of their lives, and run one after the
        other again."""
        kind = str(result["kind"])
        after_s = self._chances.uniform(0.2, 1) * self._takes_s.get(kind, _FIRST_S)
        with ExitStack() as stack:
            children = [stack.enter_context(self._command(*each)) for each in commands]
            with suppress(subprocess.TimeoutExpired):
                children[0].communicate(timeout=after_s)
            result["killed"] = any(child.poll() is None for child in children)
            self._hit(result, children)
        begun_s = time.monotonic()
        for words in commands:
            self._expect(*words, unless=unless)
        # The second one may find all done, and be faster.
        took_s = time.monotonic() - begun_s
        self._takes_s[kind] = max(self._takes_s.get(kind, 0), took_s)

    def _kill_commands(
        self, result: Result, children: Sequence[subprocess.Popen[str]]
    ) -> None:
        for child in children:
            child.kill()
        for child in children:
            child.communicate()

    def _during_outage(self, result: Result, kind: _Kind) -> None:
        self._hit = self._kill_registry
        try:
            kind(self, result)
        finally:
            self._hit = self._kill_commands

    def _kill_registry(
        self, result: Result, children: Sequence[subprocess.Popen[str]]
    ) -> None:
        """Have it away for a while. Commands may fail then, but reads must not."""
        away_s = self._chances.uniform(0, _LONGEST_OUTAGE_S)
        rootfs = self._mount / "rootfs"
        drop_pages(rootfs)
        with ThreadPoolExecutor(1) as pool:
            tree = self._top / "tree"
            reading = pool.submit(self._compare_trees, tree, rootfs, result)
            self._registry.restart(away_s=away_s)
            reading.result()
        for child in children:
            child.communicate(timeout=_TIMEOUT_S)

    def _build(self, result: Result, *tags: str) -> None:
        layout = self._top / "work/layout"
        words = ("build", self._top / "tree", "-o", layout, "--tag")
        self._kill(result, *((*words, tag) for tag in tags or ("1",)))
        self._check_layout(layout, "1", result)

    def _check_layout(self, layout: Path, tag: str, result: Result) -> None:
        known = {"oci-layout", "index.json", "blobs", "sha256"}
        for path in layout.rglob("*"):
            if path.name not in known and not (
                path.parent.name == "sha256" and len(path.name) == 64
            ):
                result["problems"].append(f"{path} is half-made")
        report = check_image(parse_name(f"oci:{layout}:{tag}"), self._access)
        result["problems"] += map(str, report.problems)
        shutil.rmtree(layout)

    def _push(self, result: Result) -> None:
        name = self._name(f"pushed-{self._number}:1")
        self._kill(result, ("push", f"oci:{self._top}/image:1", name, *self._ca))
        report = check_image(parse_name(name), self._access, with_btrfs_check=False)
        result["problems"] += map(str, report.problems)

    def _pulling(self) -> Sequence[object]:
        return ("pull", self._name("app:1"), *self._ca)

    def _pull(self, result: Result, *beside: Sequence[object]) -> None:
        ImageStore().collect(())
        name = self._name("app:1")
        self._kill(result, *beside, self._pulling())
        (found,) = ImageStore().images()
        if found.names != (name,):
            result["problems"].append(f"the image was pulled as {found.names}")
        if left := list((self._top / "images").glob(".new-*")):
            result["problems"].append(f"is half-made: {left}")

    def _up(self, result: Result, *, times: int = 1) -> None:
        target = self._top / "mnt-other"
        words = ("up", self._name("app:1"), OTHER, *self._ca, "--mount", target)
        self._kill(result, *[words] * times)
        self._compare_trees(self._top / "tree", target / "rootfs", result)
        self._take_down(OTHER)
        remove_volume(OTHER)

    def _down(self, result: Result) -> None:
        self._pause(result)
        self._writer.ask("release")
        self._kill(result, ("down", NAME))
        up_volume(NAME, self._definition(self._mount))

    def _fork(self, mode: Any, result: Result) -> None:
        words = ("fork", NAME, NEW, "--mode", mode, "--quota", str(_QUOTA_BYTES))
        self._kill(result, words, unless=["already"])
        found = {each.name: each for each in forks_of_image(NAME)}.get(NEW)
        if found is None:
            raise BtrfsUblkError(f"fork {NEW} is not there")
        if (found.mode, found.quota_bytes) != (mode, _QUOTA_BYTES):
            result["problems"].append(f"the fork is {found}")
        self._compare_trees(self._top / "tree", found.path, result)
        (found.path / "file").write_bytes(b"written")
        self._unfork_new()

    def _unfork(self, mode: Any, result: Result) -> None:
        path = fork_image(NAME, NEW, mode=mode)
        (path / "file").write_bytes(b"written")
        self._kill(result, ("unfork", NAME, NEW, "--yes"), unless=[_NO_FORK])
        # What is half removed is not in the way of a new one.
        fork_image(NAME, NEW, mode=mode)
        if (path / "file").exists():
            result["problems"].append(f"{path}: it has what was removed")
        self._unfork_new()

    def _unfork_and_fork(self, result: Result) -> None:
        fork_image(NAME, NEW, mode="snapshot")
        commands = ("unfork", NAME, NEW, "--yes"), ("fork", NAME, NEWER)
        self._kill(result, *commands, unless=[_NO_FORK, "already"])
        newer = self._mount / "forks" / NEWER
        self._compare_trees(self._top / "tree", newer, result)
        retry(lambda: unfork_image(NAME, NEWER), timeout_s=self._deadline_s)

    def _fork_and_commit(self, result: Result) -> None:
        layout = self._top / "work/layout"
        name = f"oci:{layout}:1"
        commands = ("fork", NAME, NEW), ("commit", NAME, QUIET, "-t", name)
        self._kill(result, *commands, unless=["already"])
        new = self._mount / "forks" / NEW
        self._compare_trees(self._top / "tree", new, result)
        self._unfork_new()
        self._see_committed(name, result)
        shutil.rmtree(layout)

    def _commit_to_registry(self, result: Result) -> None:
        name = self._name(f"committed-{self._number}:1")
        self._kill(result, ("commit", NAME, QUIET, "-t", name, *self._ca))
        self._see_committed(name, result)

    def _commit_delta(self, result: Result) -> None:
        delta = self._top / "work/delta"
        words = ("commit", NAME, QUIET, "--delta", delta)
        self._kill(result, words, unless=["exists"])
        self._expect("apply", NAME, delta, NEW)
        self._see_applied(delta, result)

    def _apply(self, result: Result) -> None:
        delta = self._top / "work/delta"
        self._expect("commit", NAME, QUIET, "--delta", delta)
        self._kill(result, ("apply", NAME, delta, NEW), unless=["already"])
        self._see_applied(delta, result)

    def _see_applied(self, delta: Path, result: Result) -> None:
        forks = self._mount / "forks"
        self._compare_trees(forks / QUIET, forks / NEW, result)
        self._unfork_new()
        delta.unlink()
        if left := os.listdir(self._mount / "commits"):
            result["problems"].append(f"is left of a delta: {left}")

    def _convert(self, result: Result) -> None:
        source = self._name(f"convert-{self._number}:1")
        target = self._name(f"converted-{self._number}:1")
        work = self._top / "work"
        self._expect("commit", NAME, QUIET, "-t", source, *self._ca)
        self._kill(result, ("convert", source, target, "--work", work, *self._ca))
        report = check_image(parse_name(target), self._access, with_btrfs_check=False)
        result["problems"] += map(str, report.problems)
        if left := list(work.glob("btrfs-ublk-convert-*/*")):
            result["problems"].append(f"is left of a conversion: {left}")

    def _see_committed(self, name: str, result: Result) -> None:
        if left := os.listdir(self._mount / "commits"):
            result["problems"].append(f"is left of a commit: {left}")
        tar = self._top / "work/committed.tar"
        built = self._top / "work/built"
        self._expect("build", name, "-o", built, "--tag", "1", *self._ca)
        self._expect("export", f"oci:{built}:1", "-o", tar)
        tree = self._top / "work/tree"
        tree.mkdir()
        subprocess.run(["tar", "-xf", tar, "-C", tree], check=True, timeout=_TIMEOUT_S)
        self._compare_trees(self._mount / "forks" / QUIET, tree, result)
        tar.unlink()
        for path in (built, tree):
            shutil.rmtree(path)

    def _detach(self, result: Result) -> None:
        self._kill(result, ("detach", NAME))
        if self._run("detach", NAME)[2].strip() != f"volume {NAME} was detached":
            result["problems"].append("a volume is detached twice")

    def _signal(self, result: Result, words: Sequence[str]) -> None:
        """Send signals to what serves while a command works."""
        result["killed"] = True
        with self._command("fork", NAME, NEW) as child:
            time.sleep(self._chances.uniform(0, 1))
            signal_at_once(words, partial(serving, [NAME]), self._chances)
            have_all_supervised([NAME], words)
            child.communicate(timeout=_TIMEOUT_S)
        soon(lambda: show_device(NAME).is_well or None, "the device is not well")
        self._expect("fork", NAME, NEW, unless=["already"])
        self._unfork_new()


_Kind = Callable[[Campaign, Result], None]

_KINDS: dict[str, _Kind] = {
    "build": Campaign._build,
    "push": Campaign._push,
    "pull": Campaign._pull,
    "up": Campaign._up,
    "down": Campaign._down,
    "fork, overlay": lambda its, result: its._fork("overlay", result),
    "fork, snapshot": lambda its, result: its._fork("snapshot", result),
    "unfork, overlay": lambda its, result: its._unfork("overlay", result),
    "unfork, snapshot": lambda its, result: its._unfork("snapshot", result),
    "commit to a registry": Campaign._commit_to_registry,
    "commit a delta": Campaign._commit_delta,
    "apply": Campaign._apply,
    "convert": Campaign._convert,
    "detach": Campaign._detach,
    "build + build": lambda its, result: its._build(result, "2", "1"),
    "pull + pull": lambda its, result: its._pull(result, its._pulling()),
    "gc + pull": lambda its, result: its._pull(result, ("gc",)),
    "up + up": lambda its, result: its._up(result, times=2),
    "unfork + fork": Campaign._unfork_and_fork,
    "fork + commit": Campaign._fork_and_commit,
}
_KINDS |= {
    f"registry during {kind}": partial(Campaign._during_outage, kind=_KINDS[kind])
    for kind in ("push", "pull", "up", "commit to a registry", "convert")
}
_KINDS |= {
    kind: partial(Campaign._signal, words=words) for kind, words in SINGLE.items()
}


def tables(document: Document) -> list[Table]:
    """Make a table with a row for each kind of command."""
    note = (
        "Each command is killed at a random moment, unless it ended before, and "
        "run again. Operations are those that a process did meanwhile in a fork, "
        "which was compared with what it had written, before and after the volume "
        "was down; the image with its source, and what is left with what there was "
        "before."
    )
    title = f"Commands of images killed: {document['parameters']['front_end']}"
    columns = [summed("killed", "kills"), summed("operations")]
    return [by_kind(title, document["results"], columns, note=note)]


@campaign.command(
    "images",
    campaign.deadline_option,
    tables=tables,
    needs=(ROOT, BTRFS, LOOP, REGISTRY),
    rounds=100,
    kinds=_KINDS,
    front_ends=True,
)
def command(run: Run, deadline_s: int) -> None:
    """Kill commands of images, and what serves them, and look at what is left.

    Fails when a command does not work after that, a byte is wrong or lost, or anything
    is left half-made.
    """
    for name in ("registry", "work"):
        (run.directory / name).mkdir()
    registry = registry_server(run.directory / "registry", tls=True)
    made = Campaign(run, run.stack.enter_context(registry), deadline_s=deadline_s)
    made.make_image()
    # A volume that was detached is another one.
    run.do_rounds(
        made.bed,
        lambda x: "fine" if x.get("killed") else "fine, and not killed",
        last=("detach",),
    )


if __name__ == "__main__":
    run_command(command, name="images.py")
