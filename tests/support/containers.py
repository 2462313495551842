"""containerd, CRI and podman, as tests ask them, and images that arrive lazily."""

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.images import tar_of, tar_of_entries
from support.lazy_images import Place, place_fixture
from support.processes import ending_with_us, stop
from support.waiting import wait_until

from btrfs_ublk.base.capabilities import BTRFS, FUSE, LOOP, ROOT, Program
from btrfs_ublk.base.process import run
from btrfs_ublk.containers.status import Status, ask
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
    path.write_bytes(tar_of(blobs))


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
    write_image(path, [tar_of_entries(base), tar_of_entries(upper)])
    return path


CRI_TIMEOUT_S = 300  # of 200 containers, some wait that long for others
Message = Mapping[int, Any]

#: A containerd 1.6 with CRI, in {work}; it wants the name of a pause image.
CONFIGURATION = """
version = 2
root = "{work}/root"
state = "{work}/state"
[grpc]
  address = "{work}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "%(pause)s"
  restrict_oom_score_adj = true
  stream_server_port = "0"
[plugins."io.containerd.grpc.v1.cri".cni]
  bin_dir = "{work}/cni"
  conf_dir = "{work}/cni"
[plugins."io.containerd.grpc.v1.cri".registry]
  config_path = "{work}/certs.d"
[plugins."io.containerd.grpc.v1.cri".containerd]
  snapshotter = "btrfs-ublk"
  disable_snapshot_annotations = false
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
"""


def _varint(number: int) -> bytes:
    some, rest = number & 0x7F, number >> 7
    return bytes([some | 0x80]) + _varint(rest) if rest else bytes([some])


def encode(message: Message) -> bytes:
    """Write a message: texts, numbers, messages, and lists of them."""
    made = b""
    for number, value in message.items():
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, int):
                made += _varint(number << 3) + _varint(one)
                continue
            data = one.encode() if isinstance(one, str) else encode(one)
            made += _varint(number << 3 | 2) + _varint(len(data)) + data
    return made


def decode(data: bytes) -> dict[int, list[Any]]:
    """Read a message of numbers and bytes, which may be messages themselves."""
    found: dict[int, list[Any]] = {}
    rest = iter(data)

    def varint() -> int:
        number = shift = 0
        for byte in rest:
            number |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        return number

    for byte in rest:
        key = byte  # no message here has more than 15 fields
        value: Any = varint()
        if key & 7 == 2:
            value = bytes(next(rest) for _ in range(value))
        found.setdefault(key >> 3, []).append(value)
    return found


class Cri:
    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel

    def call(self, service: str, name: str, message: Message) -> dict[int, list[Any]]:
        path = f"/runtime.v1.{service}Service/{name}"
        call: Any = self._channel.unary_unary(path)
        return decode(call(encode(message), timeout=CRI_TIMEOUT_S))

    def is_ready(self) -> bool:
        """Whether it answers: the socket is there before CRI is."""
        try:
            self.call("Runtime", "Version", {})
        except grpc.RpcError:
            return False
        return True

    def info(self, container: str) -> dict[str, Any]:
        """Return what containerd says of a container: "pid", for example; {} when it
        does not run."""
        found = self.call("Runtime", "ContainerStatus", {1: container, 2: 1})
        running = 1
        if decode(found[1][0]).get(3) != [running]:
            return {}
        (entry,) = map(decode, found[2])
        made: dict[str, Any] = json.loads(entry[2][0])
        return made

    def pods(self) -> list[str]:
        """Return the IDs of all sandboxes, also of those that do not run."""
        found = self.call("Runtime", "ListPodSandbox", {})
        return [decode(each)[1][0].decode() for each in found.get(1, ())]

    def has_image(self, image: str) -> bool:
        return 1 in self.call("Image", "ImageStatus", {1: {1: image}})

    def pull(self, image: str) -> None:
        self.call("Image", "PullImage", {1: {1: image}})

    def remove_image(self, image: str) -> None:
        self.call("Image", "RemoveImage", {1: {1: image}})

    @contextmanager
    def pod(self, name: str) -> Iterator[str]:
        """Run a sandbox in the host's network, and yield its ID. It is removed at the
        end, with its containers."""
        identifier = self.start_pod(name)
        try:
            yield identifier
        finally:
            self.remove_pod(identifier)

    def start_pod(self, name: str) -> str:
        found = self.call("Runtime", "RunPodSandbox", {1: _pod(name)})
        return str(found[1][0].decode())

    def remove_pod(self, identifier: str) -> None:
        self.call("Runtime", "StopPodSandbox", {1: identifier})
        self.call("Runtime", "RemovePodSandbox", {1: identifier})

    def run(self, pod: str, image: str, name: str, *command: str) -> str:
        """Start a container in the pod of that name; return its ID."""
        container = {1: {1: name}, 2: {1: image}, 3: list(command)}
        asked = {1: pod, 2: container, 3: _pod("pod")}
        identifier = self.call("Runtime", "CreateContainer", asked)[1][0].decode()
        self.call("Runtime", "StartContainer", {1: identifier})
        return str(identifier)

    def remove(self, container: str) -> None:
        """Kill a container, if it runs, and remove it."""
        self.call("Runtime", "RemoveContainer", {1: container})

    def shell(self, container: str, script: str) -> str:
        """Run a script in a container that runs; return what it prints."""
        asked = {1: container, 2: ["/bin/sh", "-c", script], 3: CRI_TIMEOUT_S}
        done = self.call("Runtime", "ExecSync", asked)
        assert 3 not in done, (done[3], done.get(2))  # the exit status
        output: bytes = done.get(1, [b""])[0]
        return output.decode()


def _pod(name: str) -> Message:
    node, own = 2, 1  # whose namespaces: the host's network, and processes of its own
    return {
        1: {1: name, 2: f"uid of {name}", 3: "tests"},
        4: {1: "127.0.0.1"},  # a name server, so that no file of the host is read
        8: {2: {1: {1: node, 2: own}}},
    }


@contextmanager
def connected(socket: Path) -> Iterator[Cri]:
    # It may have been killed, and is asked again soon.
    again = [(f"grpc.{x}_reconnect_backoff_ms", 100) for x in ("initial", "min", "max")]
    with grpc.insecure_channel(f"unix:{socket}", options=again) as channel:
        grpc.channel_ready_future(channel).result(timeout=CRI_TIMEOUT_S)
        yield Cri(channel)


PODMAN = Program("podman", package="podman")
_STATE = Path("/var/lib/containers")

#: Lines of bash for a mount namespace of its own, in an empty directory. /run is empty
#: then. Limits are what processes here may have: to raise them takes a capability that
#: containers and some virtual machines have not.
PRIVATE = """
mkdir podman-etc podman-state && cp -r /etc/containers/. podman-etc/
mount -t tmpfs tmpfs /run
mount --bind podman-state /var/lib/containers
rm -f podman-etc/storage.conf
cat > podman-etc/containers.conf << END
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
log_driver = "k8s-file"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
lock_type = "file"
runtime = "runc"
END
mount --bind podman-etc /etc/containers
"""


@contextmanager
def place_for_state() -> Iterator[None]:
    """Have the directory that PRIVATE mounts something on."""
    is_new = not _STATE.exists()
    _STATE.mkdir(exist_ok=True)
    try:
        yield
    finally:
        if is_new:
            with suppress(OSError):
                _STATE.rmdir()


#: The configuration of containerd 2, in place of that of the client.
_CONFIGURATION_2 = """
version = 3
root = "{work}/root"
state = "{work}/state"
[grpc]
  address = "{work}/containerd.sock"
[plugins."io.containerd.cri.v1.images"]
  snapshotter = "btrfs-ublk"
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "%(pause)s"
[plugins."io.containerd.cri.v1.images".registry]
  config_path = "{work}/certs.d"
[plugins."io.containerd.grpc.v1.cri"]
  stream_server_port = "0"
[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = true
[plugins."io.containerd.cri.v1.runtime".cni]
  bin_dirs = ["{work}/cni"]
  conf_dir = "{work}/cni"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
"""


place = place_fixture(ROOT, BTRFS, LOOP, FUSE, BUSYBOX)


@pytest.fixture
def lazy_host(place: Place, host: Host) -> Iterator[Host]:  # noqa: F811
    yield host
    place.take_down()


def configuration(pause: str) -> str:
    text = _CONFIGURATION_2 if is_containerd_2() else CONFIGURATION
    return text % {"pause": pause}


def state(of: Host) -> Status:
    return ask(of.work / "snapshotter.sock")


def asks_again(of: Host) -> bool:
    """Whether containerd is connected again: it has to ask for what a namespace has."""
    with suppress(CommandError):
        of.ctr("--namespace", "k8s.io", "snapshots", "--snapshotter", NAME, "list")
        return True
    return False
