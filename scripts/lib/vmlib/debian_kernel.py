"""Fetch a kernel of the Debian archive through apt, without installing it.

apt gets its own sources list, state and cache here, so nothing of the host's
configuration changes.  Signatures are verified by the machine's own
debian-archive-keyring; the mirror is the one the machine already uses.
"""

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import VmError

# For each command; the longest is the download of about 100 MB.
_COMMAND_LIMIT_S = 300.0

_LARGE_PAGES = "-16k"  # in a name: pages of 16 KiB, which are in no cloud flavour
_RECORD = "packages"  # beside a fetched kernel: what it was made of
_OWN_PACKAGE = re.compile(r"linux-(image|binary|modules|base)-\d\S*")

# Modules that tests load at every boot.  They are stored unpacked: unpacking
# btrfs.ko.xz takes longer than all the rest of a boot under emulation.
UNPACKED_MODULES = (
    *("ublk_drv", "btrfs", "loop", "brd", "null_blk", "overlay", "erofs"),
    *("virtiofs", "virtio_console"),
)


@dataclass(frozen=True, kw_only=True)
class _Archive:
    mirror: str
    codename: str  # of the release this machine runs
    keyring: Path


def suite_of(name: str, codename: str) -> str:
    """The suite that carries kernel `name`, from the view of a `codename` host."""
    name = name.removesuffix(_LARGE_PAGES)
    if name == "6.1":  # no ublk in it: for the tests of the refusal
        return "bookworm"
    if name == "6.12":
        return "bookworm-backports" if codename == "bookworm" else "trixie"
    if name == "latest":
        return "trixie-backports"
    raise VmError(f"no kernel is known as {name!r}: 6.1, 6.12, latest or a PATH")


def _meta_package(name: str, arch: str) -> str:
    if name.endswith(_LARGE_PAGES):
        return f"linux-image-{arch}{_LARGE_PAGES}"
    return f"linux-image-cloud-{arch}"


def fetch(name: str, destination: Path, arch: str) -> bool:
    """Make `destination` hold vmlinuz and lib/modules/RELEASE of kernel `name`.

    Its time of modification is then that of the last look into the archive.  Returns
    whether it changed: what is the newest already is not downloaded again.
    """
    if arch == "amd64" and os.uname().machine != "x86_64":
        raise VmError(
            f"fetching kernels for {os.uname().machine} is not supported yet, only "
            "amd64; --kernel PATH boots one you have"
        )
    archive = _this_machines_archive()
    suite = suite_of(name, archive.codename)
    # Beside the destination, so that the final rename stays in one file system.
    with tempfile.TemporaryDirectory(
        prefix=f".{name}-", dir=destination.parent
    ) as scratch_name:
        scratch = Path(scratch_name)
        apt = _Apt(scratch / "apt", archive=archive, suite=suite, arch=arch)
        apt.run("apt-get", "update")
        packages = _package_closure(apt, _meta_package(name, arch))
        versions = apt.run("apt-cache", "show", "--no-all-versions", *packages)
        record = "".join(
            f"{line}\n"
            for line in versions.splitlines()
            if line.startswith(("Package:", "Version:"))
        )
        with contextlib.suppress(FileNotFoundError):
            if (destination / _RECORD).read_text(encoding="utf-8") == record:
                os.utime(destination)
                return False
        debs = scratch / "debs"
        debs.mkdir()
        apt.run("apt-get", "download", *packages, cwd=debs)
        tree = scratch / "tree"
        for deb in sorted(debs.iterdir()):
            _run(["dpkg", "-x", str(deb), str(tree)])
        kernel = scratch / "kernel"
        _arrange(tree, kernel)
        (kernel / _RECORD).write_text(record, encoding="utf-8")
        if destination.exists():
            destination.rename(scratch / "old")
        kernel.rename(destination)
        return True


class _Apt:
    """apt with a world of its own."""

    def __init__(self, root: Path, *, archive: _Archive, suite: str, arch: str) -> None:
        for directory in ("lists/partial", "state", "cache/archives/partial"):
            (root / directory).mkdir(parents=True)
        (root / "state/status").touch()
        (root / "sources.list").write_text(
            f"deb [signed-by={archive.keyring}] {archive.mirror} {suite} main\n",
            encoding="utf-8",
        )
        # The settings that are kept are the host's proxies and the like.
        settings = {
            "APT::Architecture": arch,
            "APT::Architectures": arch,
            "Dir::Etc::sourcelist": root / "sources.list",
            "Dir::Etc::sourceparts": "/dev/null",
            "Dir::Etc::preferences": "/dev/null",
            "Dir::Etc::preferencesparts": "/dev/null",
            "Dir::State": root / "state",
            "Dir::State::lists": root / "lists",
            "Dir::State::status": root / "state/status",
            "Dir::Cache": root / "cache",
            "Acquire::Languages": "none",
            "Acquire::Retries": "3",
            "Acquire::AllowInsecureRepositories": "false",
            "APT::Get::AllowUnauthenticated": "false",
            "APT::Update::Error-Mode": "any",  # or a dead mirror is a mere warning
            # The cache is under the caller's home, where user _apt cannot go.
            "APT::Sandbox::User": "root",
        }
        self._options = [
            word for key, value in settings.items() for word in ("-o", f"{key}={value}")
        ]

    def run(self, tool: str, *words: str, cwd: Path | None = None) -> str:
        return _run([tool, *self._options, *words], cwd=cwd)


def _package_closure(apt: _Apt, meta_package: str) -> list[str]:
    """The packages that make up the kernel `meta_package` stands for.

    One package until 6.x, linux-image; image, binary, modules and base later.
    """
    found: list[str] = []
    todo = [meta_package]
    while todo:
        shown = apt.run("apt-cache", "show", "--no-all-versions", todo.pop())
        for line in shown.splitlines():
            if line.startswith(("Depends:", "Pre-Depends:")):
                for match in _OWN_PACKAGE.finditer(line):
                    if match[0] not in found:
                        found.append(match[0])
                        todo.append(match[0])
    if not found:
        raise VmError(f"{meta_package} names no kernel; apt-cache said: {shown}")
    return found


def _arrange(tree: Path, kernel: Path) -> None:
    """Turn unpacked packages into vmlinuz, lib/modules/RELEASE."""
    modules = _only(tree, ("lib/modules/*", "usr/lib/modules/*"), "module directory")
    images = ("boot/vmlinuz-*", "usr/lib/modules/*/vmlinuz")
    image = _only(tree, images, "kernel image")
    target = kernel / "lib/modules" / modules.name
    target.parent.mkdir(parents=True)
    image.rename(kernel / "vmlinuz")
    for config in tree.glob("**/config-*"):
        config.rename(kernel / "config")
    modules.rename(target)
    _run(["depmod", "-b", str(kernel), modules.name])
    for path in module_files(kernel, modules.name, UNPACKED_MODULES):
        if path.suffix == ".xz":
            _run(["xz", "--decompress", str(path)])
    _run(["depmod", "-b", str(kernel), modules.name])


def module_files(base: Path, release: str, names: Sequence[str]) -> list[Path]:
    """The files of modules and all they depend on, in loading order.

    `base` holds lib/modules/RELEASE.  Built-in and unknown modules are left out.
    """
    files: list[Path] = []
    for name in names:
        shown = subprocess.run(
            ["modprobe", "-d", base, "-S", release, "--show-depends", name],
            check=False,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # an unknown one may be in no flavour
        )
        for line in shown.stdout.splitlines():
            word, _, path = line.strip().partition(" ")
            if word == "insmod" and Path(path.split()[0]) not in files:
                files.append(Path(path.split()[0]))
    return files


def _only(tree: Path, patterns: Sequence[str], what: str) -> Path:
    found = [path for pattern in patterns for path in tree.glob(pattern)]
    if len(found) != 1:
        raise VmError(f"expected one {what} in the packages, found {found}")
    return found[0]


def _this_machines_archive() -> _Archive:
    for tool in ("apt-get", "dpkg"):
        if shutil.which(tool) is None:
            raise VmError(
                f"kernels by name are Debian packages, and there is no {tool} here; "
                "use --kernel host or --kernel PATH"
            )
    codename = _os_release().get("VERSION_CODENAME", "")
    lines = _run(
        ["apt-get", "indextargets", "--format", "$(RELEASE) $(REPO_URI)"]
        + ["Created-By: Packages", "Component: main"]
    ).splitlines()
    mirrors = [uri for release, uri in map(str.split, lines) if release == codename]
    if not mirrors:
        raise VmError(
            "apt's sources name no Debian archive; use --kernel host or --kernel PATH"
        )
    for keyring in ("gpg", "pgp"):
        path = Path(f"/usr/share/keyrings/debian-archive-keyring.{keyring}")
        if path.exists():
            return _Archive(mirror=mirrors[0], codename=codename, keyring=path)
    raise VmError("no debian-archive-keyring: apt-get install debian-archive-keyring")


def _os_release() -> dict[str, str]:
    lines = Path("/etc/os-release").read_text(encoding="utf-8").splitlines()
    pairs = (line.partition("=") for line in lines)
    return {key: value.strip('"') for key, _, value in pairs}


def _run(argv: Sequence[str], *, cwd: Path | None = None) -> str:
    try:
        done = subprocess.run(
            argv,
            check=False,
            cwd=cwd,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_COMMAND_LIMIT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise VmError(
            f"{' '.join(argv)}\nnot finished after {_COMMAND_LIMIT_S:.0f} s"
        ) from error
    if done.returncode:
        raise VmError(
            f"{' '.join(argv)}\nfailed with status {done.returncode}:\n{done.stdout}"
        )
    return done.stdout
