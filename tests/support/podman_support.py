"""podman in a mount namespace of its own: its files are in the test's directory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from btrfs_ublk.base.capabilities import Program

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
