"""What doctor says of containerd's configuration."""

import sys
from pathlib import Path

import pytest

from btrfs_ublk.base.process import run
from btrfs_ublk.device.state import RUN_VARIABLE
from btrfs_ublk.ops.doctor.access import Unseen
from btrfs_ublk.ops.doctor.containerd import needs

BTRFS_UBLK = [sys.executable, "-m", "btrfs_ublk.cli.main"]
#: As containerd 2 has it.
SECOND = """
[plugins."io.containerd.cri.v1.images"]
  snapshotter = "btrfs-ublk"
  disable_snapshot_annotations = true
  use_local_image_pull = false
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What `snapshotter config` prints."""
    monkeypatch.setenv(RUN_VARIABLE, str(tmp_path))
    (tmp_path / "root").mkdir()
    return printed(tmp_path)


def printed(directory: Path, *options: str) -> str:
    argv = [*BTRFS_UBLK, "snapshotter", "config", "--root", str(directory / "root")]
    argv += ["--socket", str(directory / "snapshotter.sock"), *options]
    return run(argv, timeout_s=60).stdout


def problems(dump: str) -> dict[str, str]:
    found = {}
    for one in needs(dump):
        try:
            reason = one.probe()
        except Unseen:
            continue
        if reason is not None and one.name not in ("root", "snapshotter"):
            found[one.name] = reason
    return found


def test_containerd_2(plugin: str) -> None:
    plugin = f"version = 3\n{plugin}"
    assert problems(plugin + SECOND) == {}
    unknown = plugin.replace('snapshotter = "btrfs-ublk"', 'snapshotter = "native"')
    asked = "pulls by the transfer service"
    assert "unpack_config" in problems(unknown + SECOND)[asked]
    local = SECOND.replace("pull = false", "pull = true")
    asked = "references for the snapshotter"
    assert "tells none" in problems(plugin + local)[asked]
    asked = "room for images, as the kubelet sees it"
    missing = plugin.replace("/root", "/elsewhere")
    assert "no directory" in problems(missing + SECOND)[asked]
    assert "lack root" in problems(plugin.replace("root =", "r =") + SECOND)[asked]
    wanted = "it is 'overlayfs', and not 'btrfs-ublk'"
    other = SECOND.replace('"btrfs-ublk"', '"overlayfs"')
    assert problems(plugin + other) == {"CRI's snapshotter": wanted}
    asked = "references for the snapshotter"
    silent = plugin.replace("enable_remote_snapshot_annotations", "other")
    assert "exports lack" in problems(silent + SECOND)[asked]
