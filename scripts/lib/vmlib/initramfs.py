"""The guest's first file system: busybox, a few modules, and what to run.

It is made anew for every run (2 MB, some milliseconds), so the command travels in
it and no length limit of the kernel command line applies.
"""

import lzma
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from .debian_kernel import module_files
from .errors import VmError
from .kernel import Kernel

_GUEST = Path(__file__).parent / "guest"
_DIRECTORY, _FILE, _SYMLINK = 0o040755, 0o100755, 0o120777
# What it takes to reach the shared root; all built into some kernels.
_MODULES = ("virtio_pci", "virtio_console", "virtiofs", "overlay")


def build(path: Path, *, kernel: Kernel, files: dict[str, bytes]) -> None:
    """Write the initramfs for `kernel`, with `files` (name -> content) in /run/vm."""
    with open(path, "wb") as out:
        for number, entry in enumerate(_entries(kernel, files)):
            name, mode, content = entry
            out.write(_cpio_entry(name, mode, content, number))
        out.write(_cpio_entry("TRAILER!!!", 0, b"", 0))


def _entries(
    kernel: Kernel, files: dict[str, bytes]
) -> Iterator[tuple[str, int, bytes]]:
    for name in ("bin", "dev", "modules", "proc", "sys", "run", "run/vm"):
        yield name, _DIRECTORY, b""
    # In /run/vm, because that goes along to the guest's final root.
    yield "run/vm/busybox", _FILE, _busybox(kernel).read_bytes()
    yield "bin/sh", _SYMLINK, b"/run/vm/busybox"
    yield "init", _FILE, (_GUEST / "init").read_bytes()
    yield "run/vm/supervise", _FILE, (_GUEST / "supervise").read_bytes()
    for name, content in files.items():
        yield f"run/vm/{name}", _FILE, content
    if kernel.modules_base is not None:
        order = module_files(kernel.modules_base, kernel.release, _MODULES)
        for number, module in enumerate(order):
            # Numbered, as the shell's glob is then the loading order.
            name = f"modules/{number:02}-{module.name.split('.')[0]}.ko"
            yield name, _FILE, _unpacked(module)


def _busybox(kernel: Kernel) -> Path:
    found = shutil.which("busybox")
    if kernel.root != Path("/"):
        found = str(kernel.root / "usr/bin/busybox")
    if found is None:
        raise VmError("no busybox: apt-get install busybox-static")
    path = Path(found)
    # NB: a dynamic one would need its libraries before there is a root with them.
    if b"/ld-linux" in path.read_bytes()[:4096]:
        raise VmError(f"{path} is not static: apt-get install busybox-static")
    return path


def _unpacked(module: Path) -> bytes:
    if module.suffix == ".xz":
        return lzma.decompress(module.read_bytes())
    if module.suffix == ".zst":
        zstd = ["zstd", "--decompress", "--stdout", str(module)]
        return subprocess.run(zstd, check=True, stdout=subprocess.PIPE).stdout
    return module.read_bytes()


def _cpio_entry(name: str, mode: int, content: bytes, number: int) -> bytes:
    """One member in the "newc" form (Documentation/driver-api/early-userspace)."""
    encoded = name.encode() + b"\0"
    # ino mode uid gid nlink mtime filesize devmajor devminor rdevmajor rdevminor
    # namesize check
    fields = (number, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(encoded), 0)
    header = b"070701" + b"".join(b"%08x" % field for field in fields)
    return _padded(header + encoded) + _padded(content)


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 4)
