"""Checks promises to a host with many images: a boot, logins that rotate, commits.

``python tests/campaigns/promises.py --help``. Volumes of as many small images are up,
from a registry on loopback that wants tokens. Rounds of "credentials" read all of their
data for the first time, while tokens expire, and the password in the login file changes
every two seconds. Those of "boot" write to each volume, take the disk as it is in that
moment, while all is up, kill all that serves, and put that disk in its place, with
another boot ID, an empty run directory and no registry; then a command for each volume,
all at once, as systemd starts units, must bring all up, with all that was read or
written. In those of "commits", many fork one image, write, commit their forks to the
registry and drop them, at once; nothing but their images may be left.
"""

from __future__ import annotations

import base64
import gzip
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

import campaign
import click
from campaign import Run, by_kind, summed, timed
from killable import differences_to, retry, serving, settled, signal_at_once
from support.devices import new_btrfs
from support.lazy_images import Place
from support.registry import REGISTRY, USER, Registry, registry_server
from support.verified_reads import drop_pages

from btrfs_ublk.base.capabilities import BTRFS, FUSE, LOOP, ROOT
from btrfs_ublk.base.entry import run_command
from btrfs_ublk.base.process import run as run_program
from btrfs_ublk.bench.report import Document, Result, Table
from btrfs_ublk.image.access import RegistryAccess
from btrfs_ublk.image.documents import Descriptor
from btrfs_ublk.image.reference import Reference
from btrfs_ublk.image.transfer import open_repository
from btrfs_ublk.units import GIB, KIB, MIB
from btrfs_ublk.volume import (
    VolumeDefinition,
    down_volume,
    fork_image,
    unfork_image,
    up_volume,
)
from btrfs_ublk.volume.down import is_anything_up
from btrfs_ublk.volume.store import volume_directories

_BYTES = 2 * MIB
_PART_BYTES = 64 * KIB
_TOKEN_S = 10
_ROTATION_S = 2.0
_TIMEOUT_S = 600.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Campaign:
    """A host with volumes of images, whose disk is a subvolume."""

    def __init__(
        self, run: Run, top: Path, *, images: int, commits: int, reading_s: int
    ) -> None:
        self._run, self._chances, self._commits = run, run.chances, commits
        self._reading_s = reading_s
        self._top, self._disk = top, top / "disk"
        run_program(["btrfs", "subvolume", "create", self._disk], timeout_s=60)
        run.stack.enter_context(campaign.apart(self._disk))
        for name in ("mnt", "registry"):
            (self._disk / name).mkdir()
        self._registry: Registry = run.stack.enter_context(
            registry_server(run.directory / "registry")
        )
        self._login = self._disk / "etc/login.json"
        access = RegistryAccess(docker_config=self._login, insecure=True)
        self._place = Place(self._disk, self._registry, access, lambda: None)
        self._place.allow()
        self._passwords = 0
        self._rotate()
        self._images = {
            f"image-{number}": self._chances.randbytes(_BYTES)
            for number in range(images)
        }
        for name, data in self._images.items():
            self._place.push(name, {"etc/name": name.encode()}, {"data": data})

    def _rotate(self) -> None:
        """Change the password: for a moment, the old one is right as well."""
        self._passwords += 1
        right = self._registry.tokens.passwords
        right.append(f"password {self._passwords}")
        auth = base64.b64encode(f"{USER}:{right[-1]}".encode()).decode()
        new = self._login.with_name("new")
        new.touch(mode=0o600)
        new.write_text(json.dumps({"auths": {self._registry.host: {"auth": auth}}}))
        new.rename(self._login)
        del right[:-1]

    def _have_tokens_live(self, life_s: int) -> None:
        tokens = self._registry.tokens
        tokens.expires_in_s, tokens.life_s = life_s, float(life_s)

    def _mount(self, name: str) -> Path:
        return self._disk / "mnt" / name

    def _name(self, name: str, tag: str = "1") -> str:
        return f"{self._registry.host}/{name}:{tag}"

    @contextmanager
    def bed(self, _result: Result) -> Iterator[Callable[[Result], None]]:
        """Have all volumes up, with nothing of their data here."""
        self._have_tokens_live(_TOKEN_S)
        try:
            for name in self._images:
                definition = VolumeDefinition(
                    image=self._name(name),
                    image_docker_config=self._login,
                    image_insecure=True,
                    writable_bytes=GIB,
                    read_ahead_bytes=_PART_BYTES,
                    mount=self._mount(name),
                    front_end=self._run.front_end,
                )
                up_volume(name, definition)
            yield lambda result: _KINDS[result["kind"]](self, result)
        finally:
            self._take_down()
            for place in ("volumes", "images"):
                shutil.rmtree(self._disk / place)
                (self._disk / place).mkdir(mode=0o700)

    def _take_down(self) -> None:
        for volume in volume_directories():
            if is_anything_up(volume):
                retry(lambda: down_volume(volume.name), timeout_s=60)

    def _read(self, result: Result, *, part_s: float = 0.0) -> None:
        """Read all data, with so much time for each part, and compare them."""

        def read(name: str) -> None:
            path = self._mount(name) / "rootfs/data"
            for at in range(0, _BYTES, _PART_BYTES):
                time.sleep(part_s)
                must_be = self._images[name][at : at + _PART_BYTES]
                try:
                    with path.open("rb", buffering=0) as file:
                        if os.pread(file.fileno(), _PART_BYTES, at) != must_be:
                            result["problems"].append(f"{name}: wrong bytes at {at}")
                except OSError as error:
                    result["problems"].append(f"{name}: a read failed: {error}")

        with ThreadPoolExecutor(len(self._images)) as pool:
            list(pool.map(read, self._images))
        result["reads"] = result.get("reads", 0) + len(self._images) * (
            _BYTES // _PART_BYTES
        )

    # What rounds do.

    def credentials(self, result: Result) -> None:
        """Read while logins change, and tokens expire."""
        tokens, log = self._registry.tokens, self._registry.log
        asked, said, first = len(tokens.requests), len(log), self._passwords
        begun_s = time.monotonic()
        with campaign.repeated(self._rotate, pause_s=_ROTATION_S):
            self._read(result, part_s=self._reading_s * _PART_BYTES / _BYTES)
        result["took_s"] = time.monotonic() - begun_s
        self._have_tokens_live(300)
        result["fetches"] = sum(b'"GET"' in x and b"/blobs/" in x for x in log[said:])
        result["passwords"] = self._passwords - first
        result["token_requests"] = len(tokens.requests) - asked

    def boot(self, result: Result) -> None:
        """Lose all but the disk, and come up without the registry."""
        self._read(result)
        number, names = str(result["number"]), list(self._images)
        for name in names:
            fork = fork_image(name, f"fork-{number}")
            (fork / "written").write_text(f"{name} {number}")
            run_program(["sync", "-f", fork / "written"], timeout_s=60)
        after = self._top / "after"
        words = ["btrfs", "subvolume"]
        run_program([*words, "snapshot", self._disk, after], timeout_s=60)
        roles = ["daemon", "servers", "keepers"]
        _, result["kills"] = signal_at_once(
            roles, lambda role: serving(names, role), self._chances
        )
        self._take_down()
        shutil.rmtree(after / "run")
        (after / "run").mkdir(mode=0o700)
        run_program([*words, "delete", self._disk], timeout_s=60)
        after.rename(self._disk)
        self._registry.process.stop()
        boot_id = self._top / "boot_id"
        boot_id.write_text(f"{result['number']:08}-0000-4000-8000-{0:012}\n")
        run_program(["mount", "--bind", boot_id, _BOOT_ID], timeout_s=60)
        try:
            self._come_up(result)
            for name in names:
                written = self._mount(name) / f"forks/fork-{number}/written"
                if written.read_text() != f"{name} {number}":
                    result["problems"].append(f"{name}: what was written is lost")
            for name in names:
                unfork_image(name, f"fork-{number}")
                drop_pages(self._mount(name) / "rootfs")
            self._read(result)
            self._take_down()  # the next boot ID is another one
        finally:
            self._registry.process.start()
            run_program(["umount", _BOOT_ID], timeout_s=60)
        for name in names:
            up_volume(name)

    def _come_up(self, result: Result) -> None:
        argv = [sys.executable, "-m", "btrfs_ublk.command", "volume", "up"]
        before, begun_s = getrusage(RUSAGE_CHILDREN), time.monotonic()
        children = [
            subprocess.Popen(
                [*argv, name],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for name in self._images
        ]
        for name, child in zip(self._images, children, strict=True):
            said = child.communicate(timeout=_TIMEOUT_S)[0]
            if child.returncode:
                result["problems"].append(f"{name}: {said.strip()}")
        result["took_s"] = time.monotonic() - begun_s
        after = getrusage(RUSAGE_CHILDREN)
        result["cpu_s"] = after.ru_utime + after.ru_stime
        result["cpu_s"] -= before.ru_utime + before.ru_stime

    def commits(self, result: Result) -> None:
        """Fork, write, commit and drop, all at once."""
        name = next(iter(self._images))
        self._have_tokens_live(300)
        before, starting = settled(self._disk), threading.Barrier(self._commits)

        def work(number: int) -> str:
            fork, tag = f"by-{number}", f"{result['number']}-{number}"
            path = fork_image(name, fork)
            (path / "mine").write_text(tag)
            starting.wait(_TIMEOUT_S)
            words = ["image", "commit", name, fork, "-t", self._name(name, tag)]
            words += ["--insecure", "--docker-config", str(self._login)]
            done = subprocess.run(
                [sys.executable, "-m", "btrfs_ublk.command", *words],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=_TIMEOUT_S,
            )
            unfork_image(name, fork)
            if done.returncode:
                return f"{fork}: {done.stdout.strip()[-300:]}"
            return ""

        begun_s = time.monotonic()
        with ThreadPoolExecutor(self._commits) as pool:
            problems = list(filter(None, pool.map(work, range(self._commits))))
        result["took_s"] = time.monotonic() - begun_s
        result["commits"] = self._commits - len(problems)
        result["problems"] += problems
        for number in range(self._commits if not problems else 0):
            tag = f"{result['number']}-{number}"
            if self._last_layer(name, tag) != {"mine": tag.encode()}:
                result["problems"].append(f"{tag} has another content")
        result["problems"] += differences_to(before, self._disk)

    def _last_layer(self, name: str, tag: str) -> dict[str, bytes]:
        """Return the files of an image's last layer."""
        target = Reference(self._registry.host, name, tag)
        with open_repository(target, self._place.access) as repository:
            raw = json.loads(repository.document(tag).data)["layers"][-1]
            layer = Descriptor(raw["mediaType"], raw["digest"], raw["size"], raw)
            data = gzip.decompress(repository.get_blob(layer))
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            opened = {x.name.strip("./"): tar.extractfile(x) for x in tar}
        return {name: file.read() for name, file in opened.items() if file}


_KINDS = {
    "credentials": Campaign.credentials,
    "boot": Campaign.boot,
    "commits": Campaign.commits,
}


def tables(document: Document) -> list[Table]:
    """Make a table with a row for each kind of round."""
    given = document["parameters"]
    columns = [
        *(timed("took_s", 0.5, "p50 s", 2), timed("took_s", 1, "max s", 2)),
        timed("cpu_s", 1, "of CPU", 2),
        *map(
            summed,
            ("reads", "fetches", "token_requests", "passwords", "kills", "commits"),
        ),
    ]
    note = (
        f"{given['images']} images; the times are those of all reads while logins "
        "change, of commands that bring all up after a boot, and of all that fork, "
        "write and commit at once."
    )
    title = f"Promises to a host with many images: {given['front_end']}"
    return [by_kind(title, document["results"], columns, note=note)]


@campaign.command(
    "promises",
    click.option("--images", type=campaign.COUNT, default=20, help="How many are up."),
    click.option("--commits", type=campaign.COUNT, default=50, help="At once."),
    click.option(
        "--reading",
        "reading_s",
        type=campaign.COUNT,
        default=30,
        metavar="SECONDS",
        help="Of each file, while logins change.",
    ),
    tables=tables,
    needs=(ROOT, BTRFS, LOOP, FUSE, REGISTRY),
    rounds=3,
    kinds=_KINDS,
    front_ends=True,
    recorded=("images", "commits"),
)
def command(run: Run, images: int, commits: int, reading_s: int) -> None:
    """Boot without a registry, rotate logins under readers, and commit many at once.

    Fails when a read or command fails, a byte is wrong or lost, or anything is left.
    """
    (run.directory / "registry").mkdir()
    top = run.stack.enter_context(new_btrfs(run.directory, size_bytes=16 * GIB))
    made = Campaign(run, top, images=images, commits=commits, reading_s=reading_s)
    # Data that were read once are here.
    session = len(run.kinds)
    run.do_rounds(made.bed, lambda x: f"{x['took_s']:.2f} s", session=session)


if __name__ == "__main__":
    run_command(command, name="promises.py")
