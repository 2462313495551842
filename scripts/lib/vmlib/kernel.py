"""Which kernel boots, and where its modules are."""

import os
import shutil
import struct
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from . import cache, debian_kernel
from .errors import VmError

NAMES = {"amd64": ("6.1", "6.12", "latest"), "arm64": ("latest", "latest-16k")}
_STALE_DAYS = 14


@dataclass(frozen=True, kw_only=True)
class Kernel:
    image: Path
    release: str
    modules_base: Path | None  # holds lib/modules/RELEASE; None: all built in
    arch: str = "amd64"  # in Debian's words
    root: Path = Path("/")  # what the guest sees of the host as its own /


def find(name: str, *, refresh: bool = False, arch: str = "amd64") -> Kernel:
    """The kernel called 6.1, 6.12, latest, host, or that at a path.

    A kernel that was fetched once stays until `refresh` asks for a newer one.
    """
    names = NAMES[arch]
    if name in names:
        return _fetched(name, refresh, arch)
    if arch != "amd64":
        raise VmError(f"--kernel {name}: for {arch}, it is one of {', '.join(names)}")
    if name == "host":
        release = os.uname().release
        for path in (f"/lib/modules/{release}/vmlinuz", f"/boot/vmlinuz-{release}"):
            if Path(path).is_file():
                return _at_path(Path(path))
        raise VmError(f"the running kernel {release} has no image in /boot")
    if "/" not in name and not Path(name).exists():
        raise VmError(
            f"--kernel {name}: neither one of {', '.join(names)}, host, nor a file"
        )
    return _at_path(Path(name).absolute())


def _root(arch: str) -> Path:
    """This machine's, or a Debian of another architecture."""
    return Path("/") if arch == "amd64" else cache.cache_dir() / "roots" / arch


def _directory(name: str, arch: str) -> Path:
    # NB: where the guest has its modules, which is below its root.
    base = cache.cache_dir() if arch == "amd64" else _root(arch)
    return base / "kernels" / name


def _fetched(name: str, refresh: bool, arch: str) -> Kernel:
    root = _root(arch)
    if not root.exists():
        raise VmError(f"no Debian of {arch} in {root}: scripts/setup --{arch} makes it")
    directory = _directory(name, arch)
    directory.parent.mkdir(parents=True, exist_ok=True)
    if refresh or not directory.exists():
        with cache.locked("kernels"):
            # Another process may have fetched it while this one waited.
            if refresh or not directory.exists():
                if not shutil.which("depmod"):
                    raise VmError("no depmod: apt-get install kmod")
                print(f"vm: looking for Debian's kernel {name} ...", file=sys.stderr)
                changed = debian_kernel.fetch(name, directory, arch)
                release = _only_release(directory)
                still = "" if changed else "still "
                print(f"vm: kernel {name} is {still}{release}", file=sys.stderr)
    return Kernel(
        image=directory / "vmlinuz",
        release=_only_release(directory),
        modules_base=directory,
        arch=arch,
        root=root,
    )


def _only_release(directory: Path) -> str:
    (modules,) = (directory / "lib/modules").iterdir()
    return modules.name


def stale_note(name: str, arch: str = "amd64") -> str | None:
    """What to say of a kernel for which nobody looked for long; no network is used."""
    directory = _directory(name, arch)
    if name not in NAMES[arch] or not directory.exists():
        return None
    days = int((time.time() - directory.stat().st_mtime) / 86400)
    if days < _STALE_DAYS:
        return None
    return (
        f"kernel {name} was the newest {days} days ago; "
        f"scripts/vm --kernel {name} --refresh --fetch-only looks for a newer one"
    )


def _at_path(image: Path) -> Kernel:
    if not image.is_file():
        raise VmError(f"--kernel {image}: no such file")
    release = _release(image)
    # A fetched kernel's own tree, one unpacked by dpkg -x, or the system's.
    for base in (image.parent, image.parent.parent, Path("/")):
        if (base / "lib/modules" / release / "modules.dep").exists():
            return Kernel(image=image, release=release, modules_base=base)
    return Kernel(image=image, release=release, modules_base=None)


def _release(image: Path) -> str:
    """The release in an x86 bzImage (Documentation/arch/x86/boot.rst)."""
    with open(image, "rb") as file:
        header = file.read(0x8000)
    if header[0x202:0x206] != b"HdrS":
        raise VmError(f"{image}: not an x86 kernel image (bzImage)")
    (offset,) = struct.unpack_from("<H", header, 0x20E)
    text = header[offset + 0x200 :].split(b"\0", 1)[0].decode("ascii", "replace")
    return text.split(" ", 1)[0]
