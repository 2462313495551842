"""A containerd of a test's own, with the snapshotter."""

from __future__ import annotations

import hashlib
import io
import json
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from support.stopping import ending_with_us, stop
from support.waiting import wait_until

from btrfs_ublk.base.capabilities import Program
from btrfs_ublk.base.process import run
from btrfs_ublk.errors import CommandError
from btrfs_ublk.kernel.loop import loop_device
from btrfs_ublk.kernel.mount import mounted
from btrfs_ublk.kernel.temporary import tempdir
from btrfs_ublk.testing.requirements import need

CONTAINERD = Program("containerd", "containerd")

RUNC = Program("runc", "runc")

BUSYBOX = Program("busybox", "busybox-static")

IMAGE = "example.org/test:1"

NAME = "btrfs-ublk"

TIMEOUT_S = 120

_CONFIGURATION = """
version = 2
root = "{work}/root"
state = "{work}/state"
disabled_plugins = ["io.containerd.grpc.v1.cri"]
[grpc]
  address = "{work}/containerd.sock"
"""

_Entry = tuple[str, bytes | None, int]


def is_containerd_2() -> bool:
    said = run([CONTAINERD.name, "--version"], timeout_s=TIMEOUT_S).stdout
    return bool(re.search(r" v?2\.", said))


def layer(entries: Sequence[_Entry]) -> bytes:
    """A tar of directories (without content) and files."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, data, mode in entries:
            info = tarfile.TarInfo(name)
            info.mode = mode
            info.type = tarfile.DIRTYPE if data is None else tarfile.REGTYPE
            info.size = len(data or b"")
            tar.addfile(info, io.BytesIO(data or b""))
    return file.getvalue()


def write_image(path: Path, layers: Sequence[bytes]) -> None:
    """Write an archive of an OCI image layout."""
    blobs: dict[str, bytes] = {}

    def blob(kind: str, data: bytes) -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        blobs[f"blobs/sha256/{digest}"] = data
        media = f"application/vnd.oci.image.{kind}"
        return {"mediaType": media, "digest": f"sha256:{digest}", "size": len(data)}

    described = [blob("layer.v1.tar", data) for data in layers]
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Cmd": ["/bin/sh"]},
        "rootfs": {"type": "layers", "diff_ids": [one["digest"] for one in described]},
    }
    manifest = {
        "schemaVersion": 2,
        "config": blob("config.v1+json", json.dumps(config).encode()),
        "layers": described,
    }
    entry = blob("manifest.v1+json", json.dumps(manifest).encode())
    entry["annotations"] = {"io.containerd.image.name": IMAGE}
    entry["platform"] = {"architecture": "amd64", "os": "linux"}
    index = {"schemaVersion": 2, "manifests": [entry]}
    blobs["index.json"] = json.dumps(index).encode()
    blobs["oci-layout"] = json.dumps({"imageLayoutVersion": "1.0.0"}).encode()
    with tarfile.open(path, "w") as tar:
        for name, data in blobs.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


class Host:
    """A containerd whose snapshotter is ours. ``options`` are further ones of it,
    ``config_options`` of what prints its part of containerd's ``configuration``, which
    calls it ``name``. What ends a process is its caller's affair: they may be killed,
    and started again."""

    def __init__(self, work: Path, root: Path) -> None:
        self.work = work
        self.root = root
        self.options: list[str | Path] = []
        self.config_options: list[str] = []
        self.configuration = _CONFIGURATION
        self.name = NAME
        #: Whose program the snapshotter is.
        self.python = sys.executable
        self.pid = 0  # of the process that holds containerd's mount namespace
        self._socket = work / "snapshotter.sock"

    def trust(self, registry: str, ca_file: str) -> Path:
        """Have containerd know a registry's certificate; return its directory of hosts,
        as CRI is configured to have it."""
        hosts = self.work / "certs.d"
        (hosts / registry).mkdir(parents=True)
        (hosts / registry / "hosts.toml").write_text(
            f'[host."https://{registry}"]\nca = "{ca_file}"\n'
        )
        return hosts

    def start_snapshotter(self) -> subprocess.Popen[bytes]:
        command = [self.python, "-P", "-m", "btrfs_ublk.cli.main", "snapshotter"]
        serve = ["serve", "--root", self.root, "--socket", self._socket]
        serve += ["--containerd", self.work / "containerd.sock"]
        return subprocess.Popen(ending_with_us([*command, *serve, *self.options]))

    @contextmanager
    def snapshotter(self) -> Iterator[subprocess.Popen[bytes]]:
        process = self.start_snapshotter()
        try:
            wait_until(self._socket.exists, timeout_s=TIMEOUT_S)
            yield process
        finally:
            stop(process)

    @contextmanager
    def namespace(self) -> Iterator[None]:
        """A mount namespace with a /run of its own: what containerd, its shims and ctr
        leave there goes with it. Volumes that are mounted later are seen there. One
        containerd after the other may run there."""
        script = "mount -t tmpfs tmpfs /run && echo && exec sleep infinity"
        command = ["unshare", "--mount", "--propagation", "slave", "sh", "-c", script]
        holder = subprocess.Popen(ending_with_us(command), stdout=subprocess.PIPE)
        try:
            assert holder.stdout is not None and holder.stdout.readline()
            self.pid = holder.pid
            yield
        finally:
            stop(holder)

    def entering(self) -> list[str]:
        return ["nsenter", f"--mount=/proc/{self.pid}/ns/mnt", "--"]

    def start_containerd(self) -> subprocess.Popen[bytes]:
        """Start one within namespace(); what it says is appended to a log."""
        done = run(
            [
                *(sys.executable, "-m", "btrfs_ublk.cli.main", "snapshotter"),
                *("config", "--root", self.root, "--socket", self._socket),
                *("--name", self.name, *self.config_options),
            ],
            timeout_s=TIMEOUT_S,
        )
        configuration = self.work / "config.toml"
        text = self.configuration.format(work=self.work)
        configuration.write_text(text + done.stdout)
        argv = [*self.entering(), CONTAINERD.name, "--config", str(configuration)]
        with (self.work / "log").open("ab") as log:
            return subprocess.Popen(ending_with_us(argv), stdout=log, stderr=log)

    @contextmanager
    def containerd(self) -> Iterator[subprocess.Popen[bytes]]:
        with self.namespace():
            process = self.start_containerd()
            try:
                wait_until((self.work / "containerd.sock").exists, timeout_s=TIMEOUT_S)
                yield process
            finally:
                stop(process)
                # It is shown when the test fails.
                print((self.work / "log").read_text())

    def ctr_command(self, *words: str | Path) -> list[str | Path]:
        """The command line of ctr, which shares files in /run with containerd."""
        socket = self.work / "containerd.sock"
        return [*self.entering(), "ctr", "--address", socket, *words]

    def ctr(self, *words: str | Path) -> str:
        return run(self.ctr_command(*words), timeout_s=TIMEOUT_S).stdout

    def answers(self) -> bool:
        """Whether containerd is connected with the snapshotter."""
        with suppress(CommandError):
            self.snapshots()
            return True
        return False

    def snapshots(self) -> dict[str, str]:
        """Return the kinds of all snapshots, by name."""
        listed = self.ctr("snapshots", "--snapshotter", NAME, "list").splitlines()
        return {line.split()[0]: line.split()[-1] for line in listed[1:]}


@pytest.fixture
def host(test_root: Path) -> Iterator[Host]:
    need(CONTAINERD, RUNC, BUSYBOX)
    with tempdir(parent=test_root) as work, ExitStack() as stack:
        target = work / "mnt"
        target.mkdir()
        image = work / "image"
        with image.open("wb") as file:
            file.truncate(1 << 30)
        run(["mkfs.btrfs", "-q", image], timeout_s=60)
        device = stack.enter_context(loop_device(image))
        stack.enter_context(mounted(device.path, target))
        run(["mount", "--make-shared", target], timeout_s=60)
        yield Host(work, target / "root")


@pytest.fixture
def image(tmp_path: Path) -> Path:
    shell = Path("/bin/busybox").read_bytes()
    directories = ("bin", "dev", "etc", "proc", "sys", "tmp")
    base: list[_Entry] = [(name, None, 0o755) for name in directories]
    base += [
        ("bin/sh", shell, 0o755),
        ("etc/name", b"lower\n", 0o644),
        ("etc/gone", b"lower\n", 0o644),
    ]
    upper: list[_Entry] = [("etc/name", b"upper\n", 0o644), ("etc/.wh.gone", b"", 0)]
    path = tmp_path / "image.tar"
    write_image(path, [layer(base), layer(upper)])
    return path
