"""stargz-snapshotter, to be compared with: its library at the version that
``tests/campaigns/stargz/go.mod`` names, and images of it whose starts were recorded."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from container_images import APPLICATIONS
from support.containers import TIMEOUT_S, Host
from support.waiting import wait_until

from btrfs_ublk.base.process import run, spawn
from btrfs_ublk.errors import CommandError
from btrfs_ublk.kernel.temporary import tempdir

STARGZ = "stargz"
_MODULE = Path(__file__).with_name("stargz")
_LIBRARY = "github.com/containerd/stargz-snapshotter "
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
_CONVERT_S = 1800.0
#: For containerd's configuration.
PLUGIN = """
[proxy_plugins.stargz]
  type = "snapshot"
  address = "{work}/stargz.sock"
"""
#: A root in a mount of its own, as only what is opened there is to be seen, and the
#: environment of a container.
_ROOT = """
mount --bind "$1" "$1"
mount -t proc proc "$1/proc"
mount --rbind /dev "$1/dev"
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
exec env -i PATH="$PATH" "$0" record "$1" /bin/sh -c "$2"
"""


def _version() -> str:
    lines = (_MODULE / "go.mod").read_text().splitlines()
    (found,) = (x.split()[-1] for x in lines if x.strip().startswith(_LIBRARY))
    return found


@dataclass(frozen=True)
class Built:
    """The program of ``tests/campaigns/stargz``, which go makes outside of the tree."""

    path: Path

    @property
    def name(self) -> str:
        return f"stargz-snapshotter {_version()}"

    @property
    def hint(self) -> str:
        words = ["nice", "go", "build", "-C", _MODULE, "-p", "1", "-o", self.path, "."]
        return f"build it: CGO_ENABLED=0 {shlex.join(map(str, words))}"

    def probe(self) -> str | None:
        return None if self.path.exists() else f"there is no {self.path}"


PROGRAM = Built(_CACHE / f"btrfs-ublk/stargz-{_version()}/stargz")


def is_built() -> bool:
    return PROGRAM.probe() is None


@contextmanager
def serving(host: Host, *options: str) -> Iterator[None]:
    """Run it beside a containerd that ``PLUGIN`` tells of it. Its mounts are in the
    namespace of that containerd, and end with it; a FUSE connection ends with us."""
    socket, log = host.work / "stargz.sock", host.work / "stargz.log"
    argv = [*host.entering(), str(PROGRAM.path), "serve", str(host.work / "stargz")]
    with spawn([*argv, str(socket), *options], talk=log):

        def answers() -> bool:
            with suppress(CommandError):
                host.ctr("snapshots", "--snapshotter", STARGZ, "list")
                return True
            return False

        wait_until(answers, timeout_s=TIMEOUT_S)
        yield


def make_optimized(name: str, work: Path, registry: str) -> dict[str, int]:
    """Push an application's image as ``estargz``: what its start opens comes first.
    Returns bytes of the layer, and how many files come first."""
    done = work / f"{name}.estargz.json"
    if done.exists():
        made: dict[str, int] = json.loads(done.read_text())
        return made
    with tempdir(parent=work) as scratch:
        image, root = scratch / "image", scratch / "root"
        plain = f"docker://{registry}/{name}:plain"
        words = ["skopeo", "copy", "--quiet", "--src-tls-verify=false"]
        run([*words, plain, f"dir:{image}"], timeout_s=_CONVERT_S)
        manifest = json.loads((image / "manifest.json").read_text())
        (layer,) = manifest["layers"]
        old = image / _hex(layer)
        root.mkdir()
        run(["tar", "-xf", old, "-C", root], timeout_s=_CONVERT_S)
        words = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-ec"]
        argv: list[str | Path] = [*words, _ROOT, PROGRAM.path, root]
        argv.append(APPLICATIONS[name].start)
        # containerd looks the user up in files that it opens itself.
        first = f"etc/passwd\netc/group\n{run(argv, timeout_s=_CONVERT_S).stdout}"
        new = scratch / "layer"
        argv = [PROGRAM.path, "convert", old, new]
        said = json.loads(run(argv, timeout_s=_CONVERT_S, input=first).stdout)
        config = json.loads((image / _hex(manifest["config"])).read_text())
        config["rootfs"]["diff_ids"] = [said["diff_id"]]
        (scratch / "config").write_text(json.dumps(config))
        layer["annotations"] = said["annotations"]
        for described, path in ((layer, new), (manifest["config"], scratch / "config")):
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            described |= {"digest": f"sha256:{digest}", "size": path.stat().st_size}
            path.rename(image / digest)
        (image / "manifest.json").write_text(json.dumps(manifest))
        words = ["skopeo", "copy", "--quiet", "--dest-tls-verify=false", f"dir:{image}"]
        run([*words, f"docker://{registry}/{name}:estargz"], timeout_s=_CONVERT_S)
    made = {"layer": layer["size"], "files": len(set(first.split("\n"))) - 1}
    done.write_text(json.dumps(made))
    return made


def _hex(described: dict[str, Any]) -> str:
    return str(described["digest"]).partition(":")[2]
