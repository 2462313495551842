"""Directories of the host, shared with the guest over virtiofs.

Virtiofs and not 9p: it is faster and is in the small cloud kernels.
"""

import os
import shutil
import socket
import subprocess
from pathlib import Path

from . import children
from .errors import VmError

# The Rust one of virtiofsd's own package (Debian 13, Fedora), or the C one that
# qemu-system-common of Debian 12 carries.
_RUST = ("/usr/libexec/virtiofsd", "/usr/lib/virtiofsd")
_C = ("/usr/lib/qemu/virtiofsd",)


class Share:
    """One shared directory; QEMU connects to `socket_path`, the guest mounts `tag`."""

    def __init__(
        self, tag: str, directory: Path, *, read_only: bool, run_dir: Path, log: int
    ) -> None:
        self.tag = tag
        self.socket_path = run_dir / f"{tag}.sock"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self.socket_path))
            listener.listen(1)  # from here on QEMU can connect, started or not
            fd = listener.fileno()
            os.set_inheritable(fd, True)
            # A read-only share never changes under the guest, by definition.
            cache = "always" if read_only else "auto"
            self._process: subprocess.Popen[bytes] = children.spawn(
                _argv(directory, fd, cache),
                log=log,
                pass_fds=(fd,),
                prepare=children.see_everything_read_only if read_only else None,
            )

    def stop(self) -> None:
        children.stop(self._process)


def _argv(directory: Path, fd: int, cache: str) -> list[str]:
    for path in (shutil.which("virtiofsd"), *_RUST):
        if path and os.access(path, os.X_OK) and os.path.isfile(path):
            # Submounts must not be announced: overlayfs refuses to enter them.
            return [
                path,
                f"--fd={fd}",
                f"--shared-dir={directory}",
                "--sandbox=chroot",
            ] + [
                *(f"--cache={cache}", "--no-announce-submounts", "--xattr"),
                "--allow-direct-io",
            ]
    for path in _C:
        if os.access(path, os.X_OK):
            # NB: sandbox=namespace, its default, cannot pivot_root into "/".
            return [path, f"--fd={fd}", "-o", f"source={directory}"] + [
                *("-o", "sandbox=chroot", "-o", f"cache={cache}", "-o", "xattr"),
                *("-o", "log_level=warn", "-o", "allow_direct_io"),
            ]
    raise VmError(
        "no virtiofsd: apt-get install virtiofsd (Debian 13) or qemu-system-common "
        "(Debian 12), dnf install virtiofsd"
    )
