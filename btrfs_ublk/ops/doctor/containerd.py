"""Whether containerd on this machine has what the snapshotter needs of it.

`containerd config dump` prints its whole configuration, as it understands its files,
also while it does not run.
"""

from __future__ import annotations

import os
import re
import shutil
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from btrfs_ublk.base.capabilities import CONTAINER_PACKAGES, ROOT, Capability
from btrfs_ublk.base.process import run
from btrfs_ublk.device.state import RUN_DIRECTORY, RUN_VARIABLE
from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.ops.doctor.access import Condition, Unseen
from btrfs_ublk.ops.versions import first_line

_TIMEOUT_S = 20.0
#: What containerd calls the snapshotter where nobody has given it another name.
_NAME = "btrfs-ublk"
#: Where CRI's settings of images are: in containerd 1, and since containerd 2.
_CRI_1, _CRI_2 = "io.containerd.grpc.v1.cri", "io.containerd.cri.v1.images"
_TRANSFER = "io.containerd.transfer.v1.local"
#: Where containerd 1 believes that a snapshotter keeps its files, in its own root.
_SNAPSHOTS_1 = "io.containerd.snapshotter.v1"


def is_installed() -> bool:
    return shutil.which("containerd") is not None


@dataclass
class _Configuration:
    """What `containerd config dump` prints. ``why`` says why it is not known."""

    text: str | None = None
    found: Mapping[str, Any] = field(default_factory=dict)
    why: str | None = None

    def get(self) -> Mapping[str, Any]:
        """Raises Unseen."""
        if self.text is None and self.why is None:
            try:
                self.text = run(
                    ["containerd", "config", "dump"], timeout_s=_TIMEOUT_S
                ).stdout
                self.found = tomllib.loads(self.text)
            except (BtrfsUblkError, ValueError, RecursionError) as error:
                self.why = f"`containerd config dump` fails: {error}".splitlines()[0]
        if self.why is not None:
            raise Unseen(self.why)
        return self.found

    def table(self, *keys: str) -> Mapping[str, Any]:
        found: Any = self.get()
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
        return found if isinstance(found, dict) else {}

    @property
    def is_2(self) -> bool:
        """Whether it is containerd 2."""
        version = self.get().get("version")
        return isinstance(version, int) and version >= 3


def needs(dump: str | None = None) -> list[Capability]:
    """Return what containers on our snapshots need; ``dump`` takes the place of what
    `containerd config dump` prints."""
    found = _Configuration(dump)
    if dump is not None:
        found.found = tomllib.loads(dump)
    socket = Path(os.environ.get(RUN_VARIABLE) or RUN_DIRECTORY, "snapshotter.sock")

    def names() -> list[str]:
        """What containerd calls the snapshotter: BuildKit wants names of its own."""
        return [
            name
            for name, table in found.table("proxy_plugins").items()
            if isinstance(table, dict)
            and (table.get("address"), table.get("type")) == (str(socket), "snapshot")
        ] or [_NAME]

    def plugin() -> str | None:
        name, *others = names()
        if others:
            return (
                f"{name!r} and {others[0]!r} have one address, and remove each other's "
                "snapshots"
            )
        table = found.table("proxy_plugins", name)
        if not table:
            return f"containerd's configuration has no proxy plugin {name!r}"
        if table.get("type") != "snapshot":
            return f"the proxy plugin is of the type {table.get('type')!r}"
        if table.get("address") != str(socket):
            return (
                f"its address is {table.get('address')!r}, and the snapshotter is "
                f"expected at {socket}"
            )
        return None

    def answers() -> str | None:
        if os.geteuid() != 0:
            raise Unseen("only root may ask")
        if any(package.probe() for package in CONTAINER_PACKAGES):
            return None  # reported by itself
        if not socket.exists():
            return f"it does not serve: there is no {socket}"
        from btrfs_ublk.containers.status import ask

        try:
            ask(socket)
        except BtrfsUblkError as error:
            return error.message
        return None

    def references() -> str | None:
        if found.is_2:
            exports = found.table("proxy_plugins", names()[0], "exports")
            if exports.get("enable_remote_snapshot_annotations") != "true":
                return "the plugin's exports lack enable_remote_snapshot_annotations"
            cri = found.table("plugins", _CRI_2)
            if cri.get("use_local_image_pull") is False:
                return None  # 2.1: its transfer service pulls, and tells them
        else:
            cri = found.table("plugins", _CRI_1, "containerd")
        if cri.get("disable_snapshot_annotations", True):
            return "CRI has disable_snapshot_annotations = true, and tells none"
        return None

    def cri() -> str | None:
        if found.is_2:
            name = found.table("plugins", _CRI_2).get("snapshotter")
        else:
            name = found.table("plugins", _CRI_1, "containerd").get("snapshotter")
        if name not in names():
            return f"it is {name!r}, and not {names()[0]!r}"
        return None

    def transfer() -> str | None:
        if not found.is_2:
            return None  # clients fetch and unpack by themselves
        unpack = found.table("plugins", _TRANSFER).get("unpack_config")
        if any(
            isinstance(one, dict) and one.get("snapshotter") == names()[0]
            for one in (unpack if isinstance(unpack, list) else ())
        ):
            return None
        return "the transfer service has no unpack_config for it"

    def images() -> str | None:
        if found.is_2:
            path = found.table("proxy_plugins", names()[0], "exports").get("root")
            if path is None:
                return "the plugin's exports lack root, where they are"
        else:
            path = f"{found.get().get('root')}/{_SNAPSHOTS_1}.{names()[0]}"
        return None if os.path.isdir(path) else f"there is no directory {path}"

    return [
        ROOT,
        *CONTAINER_PACKAGES,
        Condition("proxy plugin", "see: btrfs-ublk snapshotter config", plugin),
        Condition(
            "snapshotter",
            "start it: systemctl enable --now btrfs-ublk-snapshotter",
            answers,
        ),
        Condition(
            "CRI's snapshotter",
            "in the table of CRI: snapshotter = the proxy plugin's name, in quotes",
            cri,
        ),
        Condition(
            "references for the snapshotter",
            "in the table of CRI: disable_snapshot_annotations = false",
            references,
        ),
        Condition(
            "pulls by the transfer service",
            "the last tables of: btrfs-ublk snapshotter config",
            transfer,
        ),
        Condition(
            "room for images, as the kubelet sees it",
            "containerd 2: see btrfs-ublk snapshotter config; containerd 1: make it a "
            "symbolic link to the snapshotter's root",
            images,
        ),
    ]


def version() -> str | None:
    """Return containerd's version."""
    said = first_line("containerd", "--version")
    found = re.search(r"\bv?(\d+\.\d+\.\S+)", said or "")
    return f"containerd {found[1]}" if found else None
