"""The second act of the demo: an image is pushed to a registry on loopback, mounted
when only its metadata have come, and forked.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.table import Table

from btrfs_ublk.base.process import run
from btrfs_ublk.device import show_device
from btrfs_ublk.device.state import RUN_VARIABLE
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.image import (
    BuildOptions,
    Layout,
    RegistryAccess,
    build_image,
    open_repository,
    parse_reference,
    push_image,
)
from btrfs_ublk.image.store import IMAGES_VARIABLE
from btrfs_ublk.server import FrontEndName, ServerStats
from btrfs_ublk.testing.registry import loopback_registry
from btrfs_ublk.units import GIB, MIB, format_size
from btrfs_ublk.volume import (
    VolumeDefinition,
    down_volume,
    fork_image,
    remove_volume,
    up_volume,
)

_ACCESS = RegistryAccess(insecure=True)
_LARGE_BYTES = 64 * MIB
_TIMEOUT_S = 60.0
_SCRIPT = "echo hello > /greeting; read line < /greeting; echo $line"


def show_image(
    done: Callable[[str, str], None], directory: Path, front_end: FrontEndName
) -> Table:
    """Show it all, in an empty directory; ``done`` gets each step. Returns a table of
    what it cost. Raises BtrfsUblkError for a check that fails."""
    with ExitStack() as stack:
        host = stack.enter_context(loopback_registry(directory))
        tree = directory / "tree"
        digest = _make_tree(tree)
        built = build_image(tree, directory / "layout", BuildOptions())
        shutil.rmtree(tree)
        done(
            "build an image",
            f"{format_size(built.data_bytes)}; metadata packed in "
            f"{format_size(built.pack_bytes)}",
        )
        layout = Layout.opened(directory / "layout")
        target = parse_reference(f"{host}/demo:1")
        with open_repository(target, _ACCESS, writing=True) as repository:
            push_image(layout, layout.find(built.name.tag), target, repository)
        shutil.rmtree(directory / "layout")
        done("push it to a registry", f"{target}")

        began_s = time.monotonic()
        # NB: what is named by its digest needs no policy.
        image = f"{host}/demo@{built.digest}"
        name, base = stack.enter_context(_up(image, directory, front_end))
        up_bytes = _fetched_bytes(name)
        done(
            "pull and mount it",
            f"{format_size(built.pack_bytes)} came; of the data, "
            f"{format_size(up_bytes)}",
        )
        one, two = (fork_image(name, each, base=base) for each in ("one", "two"))
        done("fork it twice", f"'one' and 'two'; {_more(name, up_bytes)}")
        said = run(["chroot", one, "/bin/sh", "-c", _SCRIPT], timeout_s=_TIMEOUT_S)
        started_s, start_bytes = time.monotonic() - began_s, _fetched_bytes(name)
        if said.stdout.strip() != "hello" or (two / "greeting").exists():
            raise BtrfsUblkError("a shell in fork 'one' did not write to it alone")
        done(
            "run a shell in 'one'", f"its file is not in 'two'; {_more(name, up_bytes)}"
        )
        if _sha256(two / "large") != digest:
            raise BtrfsUblkError("fork 'two' does not read as the image was built")
        done("read the data in 'two'", f"{format_size(_LARGE_BYTES)}, the hash agrees")
        table = Table(
            title="\nWhat the image cost",
            title_justify="left",
            box=None,
            pad_edge=False,
            show_header=False,
        )
        table.add_column()
        table.add_column(justify="right")
        table.add_column()
        moved_bytes = built.pack_bytes + start_bytes
        share = f"{100 * moved_bytes / (built.pack_bytes + built.data_bytes):.1f} %"
        table.add_row("the image", format_size(built.data_bytes), "in the registry")
        table.add_row(
            "moved until the shell ran", format_size(moved_bytes), f"{share} of it"
        )
        table.add_row("from pull to then", f"{started_s:.2f} s", "")
    done("take it down", "volume, forks and registry are gone")
    return table


@contextmanager
def _up(
    image: str, directory: Path, front_end: FrontEndName
) -> Iterator[tuple[str, Path]]:
    """Bring a volume of the image up; its store of images and daemon are its own."""
    name, base = f"demo-{os.getpid()}", directory / "volumes"
    definition = VolumeDefinition(
        image=image,
        image_insecure=True,
        mount=directory / "image",
        writable_bytes=GIB,
        front_end=front_end,
    )
    # The host's daemon may run in another mount namespace.
    variables = {IMAGES_VARIABLE: "images", RUN_VARIABLE: "run"}
    before = dict(os.environ)
    os.environ.update({key: str(directory / x) for key, x in variables.items()})
    try:
        up_volume(name, definition, base=base)
        try:
            yield name, base
        finally:
            down_volume(name, base=base)
            remove_volume(name, base=base)
    finally:
        for key in variables:
            del os.environ[key]
        os.environ.update(before)


def _make_tree(tree: Path) -> str:
    """Make a root file system of a shell, its libraries, and a large file, whose digest
    is returned."""
    shell = Path("/bin/sh").resolve()
    listed = run(["ldd", shell], timeout_s=_TIMEOUT_S).stdout
    for path in ["/bin/sh", *re.findall(r"(/\S+) \(", listed)]:
        copy = tree / path[1:]
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    chances = random.Random(1)
    with (tree / "large").open("wb") as file:
        for _ in range(_LARGE_BYTES // MIB):
            file.write(chances.randbytes(MIB))
    return _sha256(tree / "large")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fetched_bytes(name: str) -> int:
    device = show_device(name)
    assert device.stats is not None
    stats = ServerStats.parse(device.stats)
    return sum(lazy.fetcher.bytes_fetched for lazy in stats.lazy)


def _more(name: str, before: int) -> str:
    fetched = _fetched_bytes(name) - before
    return f"{format_size(fetched)} came" if fetched else "no data came"
