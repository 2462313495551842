"""Images to start containers from, made here: Debian, and what applications need."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from btrfs_ublk.base.capabilities import Program, require
from btrfs_ublk.base.process import run
from btrfs_ublk.content import Trace
from btrfs_ublk.image import (
    BuildOptions,
    Layout,
    LayoutName,
    RegistryAccess,
    build_image,
    open_repository,
    parse_reference,
    push_image,
    traced_ranges,
)
from btrfs_ublk.kernel.temporary import tempdir
from btrfs_ublk.units import MIB

ACCESS = RegistryAccess(insecure=True)
SKOPEO = Program("skopeo", package="skopeo")
_MMDEBSTRAP = Program("mmdebstrap", package="mmdebstrap")
_RELEASE = "bookworm"
_TIMEOUT_S = 1800.0
_BALLAST_BYTES = 8 * MIB
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
#: Where images stay for the next run: to make all of them takes 20 minutes.
KEPT = _CACHE / "btrfs-ublk/container-images"


@dataclass(frozen=True)
class Application:
    """``packages`` of Debian; none: busybox and 8 MiB that nobody reads. ``start`` is a
    shell script that ends when the application has done its first work."""

    packages: Sequence[str]
    start: str


APPLICATIONS = {
    "python": Application(
        ("python3-numpy", "python3-scipy", "python3-pandas"),
        'python3 -c "import numpy, pandas, scipy.stats, scipy.optimize;'
        ' print(pandas.DataFrame(numpy.eye(9)).describe())"',
    ),
    "java": Application(
        ("openjdk-17-jre-headless",),
        "java -version && keytool -genkeypair -keystore /tmp/keys -storepass secret"
        " -keyalg RSA -dname cn=one",
    ),
    "postgres": Application(
        ("postgresql-15",),
        "runuser -u postgres -- sh -ec 'PATH=$PATH:/usr/lib/postgresql/15/bin;"
        ' initdb -D /tmp/db; pg_ctl -D /tmp/db -w -o "-k /tmp -h \\"\\"" start;'
        ' psql -h /tmp -c "SELECT 1"\'',
    ),
    "node": Application(
        ("nodejs",),
        'node -e "const h = require(\\"http\\");'
        ' const s = h.createServer((q, r) => r.end(\\"1\\")).listen(\\"/tmp/s\\", () =>'
        ' h.get({socketPath: \\"/tmp/s\\"}, (r) => { r.resume();'
        ' r.on(\\"end\\", () => process.exit(0)) }))"',
    ),
    "nginx": Application(
        ("nginx-light",),
        "echo 'events {} http { server { listen unix:/tmp/s; root /var/www/html; } }' >"
        " /tmp/conf && nginx -c /tmp/conf && perl -MIO::Socket::UNIX -e"
        ' \'$s = IO::Socket::UNIX->new("/tmp/s");'
        ' print $s "GET /index.nginx-debian.html HTTP/1.0\\r\\n\\r\\n";'
        ' exit(join("", <$s>) !~ /Welcome/)\'',
    ),
    "busybox": Application((), "true"),
}


@dataclass(frozen=True)
class Made:
    """What an image weighs, in bytes."""

    unpacked: int
    layer: int
    metadata: int
    sealed: int


def make_images(
    name: str, work: Path, registry: str, record: Callable[[str], Trace]
) -> Made:
    """Push an application's image with its sealed one, as ``plain``, and once more with
    the trace of its start, as ``traced``, unless the registry has them from a run
    before. ``record`` starts a container of an image, and returns its trace."""
    done = work / f"{name}.json"
    if done.exists():
        return Made(**json.loads(done.read_text()))
    tree = work / f"{name}.tar"
    if not tree.exists():
        _make_tree(APPLICATIONS[name], tree)
    with tempdir(parent=work) as scratch:
        ordinary, layout = scratch / "ordinary", scratch / "layout"
        argv = ["skopeo", "copy", "--quiet", f"tarball:{tree}", f"oci:{ordinary}:plain"]
        run(argv, timeout_s=_TIMEOUT_S)
        source = LayoutName(ordinary, "plain")
        build_image(source, layout, BuildOptions(), tag="plain")
        _push(layout, f"{registry}/{name}:plain")
        first = traced_ranges(record(f"{registry}/{name}:plain"), layout, None, ACCESS)
        built = build_image(source, layout, BuildOptions(first=first), tag="traced")
        _push(layout, f"{registry}/{name}:traced")
        opened = Layout.opened(ordinary)
        manifest = json.loads(opened.read(opened.find("plain")))
    (layer,) = manifest["layers"]
    size = tree.stat().st_size
    made = Made(size, layer["size"], built.pack_bytes, built.data_bytes)
    done.write_text(json.dumps(asdict(made)))
    tree.unlink()
    return made


def _push(path: Path, name: str) -> None:
    layout, target = Layout.opened(path), parse_reference(name)
    with open_repository(target, ACCESS, writing=True) as repository:
        push_image(layout, layout.find(target.tag or ""), target, repository)


def _make_tree(application: Application, path: Path) -> None:
    part = path.with_suffix(".part.tar")
    if application.packages:
        require(_MMDEBSTRAP)
        argv: list[str | Path] = ["mmdebstrap", "--variant=minbase", "--quiet"]
        argv += ["--aptopt=APT::Install-Recommends 0"]
        argv += [f"--include={','.join(application.packages)}", _RELEASE, part]
        run(argv, timeout_s=_TIMEOUT_S)
    else:
        with tempdir(parent=path.parent) as root:
            for name in ("bin", "dev", "etc", "proc", "sys", "tmp"):
                (root / name).mkdir()
            for name in ("sh", "true", "find", "cat", "sleep"):
                shutil.copy("/bin/busybox", root / "bin" / name)
            with (root / "ballast").open("wb") as file, open("/dev/urandom", "rb") as x:
                file.write(x.read(_BALLAST_BYTES))
            run(["tar", "-cf", part, "-C", root, "."], timeout_s=_TIMEOUT_S)
    part.rename(path)
