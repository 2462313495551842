"""Lazy images of other projects, for image_start: those of Nydus 3, stargz-snapshotter
and SOCI, with the defaults of each. An optimised one knows what the command reads.
"""

import http.client
import json
import os
import re
import tarfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from btrfs_ublk.base.capabilities import Capability, Program
from btrfs_ublk.base.process import Argument, run, spawn
from btrfs_ublk.bench.containers import CONTAINERD, call
from btrfs_ublk.bench.disk import new_disk
from btrfs_ublk.bench.peers.others import Foreign
from btrfs_ublk.content import Digests
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.image import (
    Layout,
    RegistryAccess,
    open_repository,
    parse_reference,
    push_image,
)
from btrfs_ublk.image.documents import to_bytes
from btrfs_ublk.kernel.mount import mounted, unmount_now
from btrfs_ublk.kernel.temporary import tempdir

NYDUS = Foreign(
    "nydus", "BTRFS_UBLK_NYDUS", "build its branch v3 with the features cli, fanotify"
)
STARGZ = Foreign("containerd-stargz-grpc", "BTRFS_UBLK_STARGZ", "build it")
CTR_REMOTE = Foreign("ctr-remote", "BTRFS_UBLK_CTR_REMOTE", "build stargz-snapshotter")
SOCI = Foreign("soci-snapshotter-grpc", "BTRFS_UBLK_SOCI", "build it")
SOCI_TOOL = Foreign("soci", "BTRFS_UBLK_SOCI_TOOL", "build soci-snapshotter")
STRACE = Program("strace", package="strace")
REPOSITORY = "tree"
ACCESS = RegistryAccess(insecure=True)
TIMEOUT_S = 1200.0
_INDEX, _MANIFEST, _CONFIG = (
    f"application/vnd.oci.image.{x}+json"
    for x in ("index.v1", "manifest.v1", "config.v1")
)
_CONTAINERD = """
version = 2
root = "{work}/root"
state = "{work}/state"
disabled_plugins = ["io.containerd.grpc.v1.cri"]
[grpc]
  address = "{socket}"
"""
_PREFETCH = "[prefetch]\nenable = true\n"
#: What strace says of a file that was opened.
_OPENED = re.compile(r'(?:openat\(AT_FDCWD, |execve\()"(/[^"]+)".* = \d')


@dataclass(frozen=True)
class Place:
    """What all turns share: the registry, what is in it, and the command that runs in
    the image. ``host`` is the link's address during a turn, ``work`` a new directory in
    memory."""

    root: Path
    registry: str
    layers: Sequence[str]
    erofs: tuple[Path, str, Digests] | None
    words: Sequence[str]
    host: str = ""
    work: Path = Path()

    def directory(self, name: str) -> Path:
        path = self.work / name
        path.mkdir()
        return path

    def push(self, layout: Path, tag: str, new_tag: str) -> None:
        """Have the registry serve an image of a layout."""
        target = parse_reference(f"{self.registry}/{REPOSITORY}:{new_tag}")
        opened = Layout.opened(layout)
        with open_repository(target, ACCESS, writing=True) as repository:
            push_image(opened, opened.find(tag), target, repository)


#: Makes a root file system; the stack takes it away again.
Start = Callable[[Place, ExitStack], Path]


@dataclass(frozen=True)
class Peer:
    """A lazy image. ``begin`` makes what is there before the clock starts. ``fill`` has
    the registry serve the image, made of a layout with the tag "plain" and its tree."""

    begin: Callable[[Place, ExitStack], Start]
    fill: Callable[[Place, Path, Path], None]
    needs: Sequence[Capability]


def overlaid(place: Place, lower: Path, stack: ExitStack) -> Path:
    """Make a read-only tree writable, as containers have it."""
    upper, target = place.directory("upper"), place.directory("merged")
    for name in ("files", "work"):
        (upper / name).mkdir()
    options = [f"lowerdir={lower}", f"upperdir={upper}/files"]
    options.append(f"workdir={upper}/work")
    stack.enter_context(mounted("overlay", target, fs_type="overlay", options=options))
    return target


def containerd(place: Place, stack: ExitStack) -> Path:
    """Run containerd, and return its socket when it listens."""
    # NB: a socket's path has 107 bytes at most.
    socket = stack.enter_context(tempdir()) / "socket"
    settings = place.work / "containerd.toml"
    settings.write_text(_CONTAINERD.format(work=place.work, socket=socket))
    stack.enter_context(spawn([CONTAINERD.name, "--config", settings]))
    argv = f"until ctr --address {socket} version; do sleep 0.05; done"
    run(["timeout", "60", "bash", "-c", argv], timeout_s=TIMEOUT_S)
    return socket


def _pulled(place: Place, tag: str) -> tuple[Any, Any, str]:
    """Fetch an image's documents on one connection, as runtimes do: its manifest, its
    configuration, and the manifest's digest."""
    connection = http.client.HTTPConnection(place.host)

    def get(what: str) -> tuple[Any, str]:
        accept = {"Accept": f"{_INDEX}, {_MANIFEST}"}
        connection.request("GET", f"/v2/{REPOSITORY}/{what}", headers=accept)
        with connection.getresponse() as answer:
            return json.load(answer), answer.headers["Docker-Content-Digest"]

    manifest, digest = get(f"manifests/{tag}")
    if "manifests" in manifest:
        manifest, digest = get(f"manifests/{manifest['manifests'][0]['digest']}")
    config, _ = get(f"blobs/{manifest['config']['digest']}")
    connection.close()
    return manifest, config, digest


def _nydus_disk(mode: str, place: Place) -> Path:
    """Return where its cache is. NB: tmpfs has no events before content is read."""
    return place.work / "ext4" if mode == "fanotify" else place.work


def _begin_nydus(mode: str, tag: str, place: Place, stack: ExitStack) -> Start:
    if mode == "fanotify":
        stack.enter_context(new_disk("ext4", place.work))
    return partial(_nydus, mode, tag)


def _nydus(
    mode: str, tag: str, place: Place, stack: ExitStack, *more: Argument
) -> Path:
    """The last layer is the metadata, as a tar."""
    manifest, _, _ = _pulled(place, tag)
    where = f"http://{place.host}/v2/{REPOSITORY}/blobs"
    cache, lower = _nydus_disk(mode, place) / "cache", place.directory("lower")
    cache.mkdir()
    argv = f"curl -sf {where}/{manifest['layers'][-1]['digest']} | tar -xzC {cache}"
    run(["bash", "-c", f"set -o pipefail; {argv}"], timeout_s=TIMEOUT_S)
    registry = {"host": place.host, "repo": REPOSITORY, "insecure": True}
    settings = {
        "backend": {"type": "registry", "config": registry},
        "cache": {"type": "local", "config": {"dir": f"{cache}/image"}},
        "prefetch": {"enable": tag != "nydus"},
    }
    (place.work / "nydus.yaml").write_text(json.dumps(settings))
    command: list[Argument] = [NYDUS.path(), mode, "--mountpoint", lower, *more]
    command += ["--bootstrap", cache / "image/image.boot"]
    command += ["--config", place.work / "nydus.yaml", "--log-dir", place.work / "log"]
    server = stack.enter_context(spawn(command))
    while not os.path.ismount(lower):
        if server.returncode is not None:
            raise BtrfsUblkError(server.failure("ended before it had mounted"))
        time.sleep(0.002)
    return overlaid(place, lower, stack)


def _push_nydus(place: Place, work: Path, blobs: Sequence[Path], tag: str) -> None:
    """Make an image as nydusify does, of blobs and their metadata."""
    layout = Layout.made(work / tag)
    kind = "application/vnd.oci.image.layer.nydus.blob.v1"
    layers, packed = [], work / "bootstrap.tar.gz"
    with tarfile.open(packed, "w:gz") as tar:
        tar.add(work / f"{tag}.boot", "image/image.boot")
        for blob in blobs:
            meta = blob.with_name(f"{blob.name}.blob.meta")
            tar.add(meta, f"image/{meta.name}")
            run(["cp", blob, work / "copy"], timeout_s=TIMEOUT_S)
            layers.append(layout.take(work / "copy", kind).raw)
    layers.append(
        layout.take(packed, "application/vnd.oci.image.layer.v1.tar+gzip").raw
    )
    config = layout.add(_CONFIG, to_bytes({"architecture": "amd64", "os": "linux"}))
    manifest = {"schemaVersion": 2, "mediaType": _MANIFEST}
    manifest |= {"config": config.raw, "layers": layers}
    layout.tag(layout.add(_MANIFEST, to_bytes(manifest)), tag)
    place.push(layout.path, tag, tag)


def _fill_nydus(place: Place, _layout: Path, tree: Path) -> None:
    """Both images, as the optimised one is made by a run of the other."""
    with tempdir(parent=place.root) as work, ExitStack() as stack:
        blobs = work / "blobs"
        blobs.mkdir()
        run([NYDUS.path(), "build", "--blob-dir", blobs, tree], timeout_s=TIMEOUT_S)
        (blob,) = (x for x in blobs.iterdir() if not x.suffix)
        argv: list[Argument] = [
            NYDUS.path(),
            "merge",
            "--bootstrap",
            work / "nydus.boot",
            blob,
        ]
        run(argv, timeout_s=TIMEOUT_S)
        _push_nydus(place, work, [blob], "nydus")
        (work / "turn").mkdir()
        turn = replace(place, host=place.registry, work=work / "turn")
        # NB: a socket's path has 107 bytes at most.
        api = f"unix://{stack.enter_context(tempdir())}/api"
        path = _nydus("fuse", "nydus", turn, stack, "--apiserver", api)
        run(["chroot", path, *place.words], timeout_s=TIMEOUT_S)
        argv = [NYDUS.path(), "optimize", "--apiserver", api, "--blob-dir", blobs]
        argv += ["--parent-bootstrap", work / "nydus.boot"]
        argv += ["--bootstrap", work / "nydus-optimised.boot"]
        run([*argv, "--config", turn.work / "nydus.yaml"], timeout_s=TIMEOUT_S)
        (hot,) = (x for x in blobs.iterdir() if not x.suffix and x != blob)
        _push_nydus(place, work, [blob, hot], "nydus-optimised")


def _read_files(place: Place, tree: Path) -> list[str]:
    """Return the files that the command opens in the tree, in their order."""
    argv: list[Argument] = [
        "strace",
        "-f",
        "-e",
        "trace=openat,execve",
        "chroot",
        tree,
        *place.words,
    ]
    found = _OPENED.findall(run(argv, timeout_s=TIMEOUT_S).stderr)
    real = [os.path.realpath(f"{tree}{path}") for path in found]
    kept = [x for x in real if x.startswith(f"{tree}/") and os.path.isfile(x)]
    return list(dict.fromkeys(path.removeprefix(str(tree)) for path in kept))


def _fill_stargz(optimised: bool, place: Place, layout: Path, tree: Path) -> None:
    tag = "stargz-optimised" if optimised else "stargz"
    with tempdir(parent=place.root) as work, ExitStack() as stack:
        socket = containerd(replace(place, work=work), stack)
        tar, record = work / "image.tar", work / "record"
        run(["tar", "-cf", tar, "-C", layout, "."], timeout_s=TIMEOUT_S)
        options = ["--oci", "--estargz"]
        if optimised:
            options += ["--estargz-record-in", str(record)]
            lines = ({"path": x.lstrip("/")} for x in _read_files(place, tree))
            record.write_text("".join(f"{json.dumps(x)}\n" for x in lines))
        target = f"{place.registry}/{REPOSITORY}:{tag}"
        ctr: list[Argument] = [CTR_REMOTE.path(), "--address", socket]
        for words in (
            ["images", "import", "--index-name", "one", tar],
            ["images", "convert", *options, "one", target],
            ["images", "push", "--plain-http", target],
        ):
            run([*ctr, *words], timeout_s=TIMEOUT_S)


def _fill_soci(optimised: bool, place: Place, layout: Path, tree: Path) -> None:
    tag = "soci-optimised" if optimised else "soci"
    with tempdir(parent=place.root) as work:
        argv: list[Argument] = [SOCI_TOOL.path(), "convert", "--standalone"]
        argv += ["--min-layer-size", "0"]
        for path in _read_files(place, tree) if optimised else ():
            argv += ["--prefetch-file", path]
        argv += ["--format", "oci-dir", layout, work / "made"]
        run(argv, timeout_s=TIMEOUT_S)
        made = Layout.opened(work / "made")
        made.tag(made.images()[0], tag)
        place.push(made.path, tag, tag)


def _snapshotter(
    program: Foreign, tag: str, settings: str, place: Place, stack: ExitStack
) -> Start:
    """Run a snapshotter, which is asked as containerd asks it."""
    import grpc

    root, socket = place.directory("snapshotter"), stack.enter_context(tempdir()) / "x"
    (place.work / "settings.toml").write_text(settings)

    def leave() -> None:
        for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
            if (path := Path(line.split()[1])).is_relative_to(root):
                unmount_now(path)

    stack.callback(leave)
    argv: list[Argument] = [program.path(), "--address", socket, "--root", root]
    argv += ["--config", place.work / "settings.toml", "--log-level", "error"]
    stack.enter_context(spawn(argv))
    channel = stack.enter_context(grpc.insecure_channel(f"unix:{socket}"))
    grpc.channel_ready_future(channel).result(timeout=TIMEOUT_S)
    return partial(_snapshot, channel, tag)


def _snapshot(channel: Any, tag: str, place: Place, stack: ExitStack) -> Path:
    import grpc

    manifest, config, digest = _pulled(place, tag)
    (layer,), (chain,) = manifest["layers"], config["rootfs"]["diff_ids"]
    reference, prefix = f"{place.host}/{REPOSITORY}:{tag}", "containerd.io/snapshot"
    labels = {f"{prefix}.ref": chain, f"{prefix}/cri.image-ref": reference}
    labels[f"{prefix}/cri.manifest-digest"] = digest
    for name in ("cri.layer-digest", "cri.image-layers", "remote/stargz.digest"):
        labels[f"{prefix}/{name}"] = layer["digest"]
    labels[f"{prefix}/remote/stargz.reference"] = reference
    labels |= layer.get("annotations", {})
    try:
        call(channel, "Prepare", "it", key="fetched", labels=labels)
        raise BtrfsUblkError(f"{tag}: the layer is not mounted lazily")
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.ALREADY_EXISTS:
            raise
    (mount,) = call(channel, "Prepare", "it", key="one", parent=chain).mounts
    target, options = place.directory("merged"), list(mount.options)
    stack.enter_context(
        mounted(mount.source, target, fs_type=mount.type, options=options)
    )
    return target


def _peer_nydus(mode: str, tag: str) -> Peer:
    return Peer(partial(_begin_nydus, mode, tag), _fill_nydus, (NYDUS,))


_STARGZ, _SOCI = (STARGZ, CTR_REMOTE, CONTAINERD, STRACE), (SOCI, SOCI_TOOL, STRACE)
PEERS = {
    "Nydus, FUSE": _peer_nydus("fuse", "nydus"),
    "Nydus, FUSE, optimised": _peer_nydus("fuse", "nydus-optimised"),
    "Nydus, fanotify": _peer_nydus("fanotify", "nydus"),
    "stargz": Peer(
        partial(_snapshotter, STARGZ, "stargz", ""),
        partial(_fill_stargz, False),
        _STARGZ,
    ),
    "stargz, optimised": Peer(
        partial(_snapshotter, STARGZ, "stargz-optimised", ""),
        partial(_fill_stargz, True),
        _STARGZ,
    ),
    "SOCI": Peer(
        partial(_snapshotter, SOCI, "soci", ""), partial(_fill_soci, False), _SOCI
    ),
    "SOCI, optimised": Peer(
        partial(_snapshotter, SOCI, "soci-optimised", _PREFETCH),
        partial(_fill_soci, True),
        _SOCI,
    ),
}
