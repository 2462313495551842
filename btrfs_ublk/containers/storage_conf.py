"""The line of containers-storage.conf(5) that names a store of images.

What the user has written there stays as it is, to the byte: only lines between our
marks are added and removed.
"""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from btrfs_ublk.errors import BtrfsUblkError, UsageError, why_unread
from btrfs_ublk.kernel.new_file import write_new

DEFAULT_FILE = Path("/etc/containers/storage.conf")
#: What counts while there is no DEFAULT_FILE, and not at all when there is one.
VENDOR_FILE = Path("/usr/share/containers/storage.conf")
_BEGIN = "# btrfs-ublk podman setup: these lines, and --undo removes them"
_END = "# btrfs-ublk podman setup: end"
_OURS = re.compile(
    rf"^{re.escape(_BEGIN)}\n(?P<lines>.*?)^{re.escape(_END)}\n",
    re.MULTILINE | re.DOTALL,
)
_TABLE = re.compile(
    r"""^[ \t]*\[[ \t]*storage[ \t]*\.[ \t]*options[ \t]*\][^\n]*\n""", re.MULTILINE
)
#: A file that is there has to say what else is podman's default.
_GRAPHROOT = "/var/lib/containers/storage"
_STORAGE = f"""\
[storage]
driver = "overlay"
runroot = "/run/containers/storage"
graphroot = "{_GRAPHROOT}"
"""


@dataclass(frozen=True)
class StorageConf:
    """A file, and its text: that of VENDOR_FILE when there is none, or ""."""

    path: Path
    text: str

    @classmethod
    def read(cls, path: Path = DEFAULT_FILE) -> StorageConf:
        """Raises UsageError for a file that cannot be read, or is not valid."""
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            text = _vendor_text()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read {path}: {why_unread(error)}") from error
        _parse(text, path)
        return cls(path, text)

    def names(self, store: Path) -> bool:
        """Return whether the store is among those that podman looks in."""
        return str(store) in _stores(_parse(self.text, self.path))

    def lines(self, store: Path) -> str:
        """Return what the file lacks."""
        found = _parse(self.text, self.path)
        line = f"additionalimagestores = {json.dumps([str(store)])}\n"
        table = "" if _TABLE.search(self.text) else "[storage.options]\n"
        return ("" if "storage" in found else _STORAGE) + table + line

    def with_store(self, store: Path) -> StorageConf:
        """Return the file with the store added. Raises UsageError where it has other
        stores, or another form than is understood."""
        if self.names(store):
            return self
        before = _parse(self.text, self.path)
        storage = before.get("storage")
        driver = storage.get("driver") if isinstance(storage, dict) else None
        if driver not in (None, "", "overlay"):
            raise UsageError(
                f"{self.path} has the driver {driver!r}, and the store is for overlay",
                hint='only with driver = "overlay" can podman see images of volumes',
            )
        root = storage.get("graphroot") if isinstance(storage, dict) else None
        if _has_only_vfs(Path(str(root or _GRAPHROOT))):
            raise UsageError(
                f"podman keeps its images in {root or _GRAPHROOT} with the driver "
                "'vfs', and the store is for overlay",
                hint="podman system reset deletes them, and makes it choose anew",
            )
        there = _stores(before)
        if there:
            raise UsageError(
                f"{self.path} has additionalimagestores already, which stay as they "
                "are",
                hint="add it there: additionalimagestores = "
                f"{json.dumps([*there, str(store)])}",
            )
        ours = f"{_BEGIN}\n{self.lines(store)}{_END}\n"
        table = _TABLE.search(self.text)
        if table:
            text = self.text[: table.end()] + ours + self.text[table.end() :]
        else:
            gap = "" if not self.text or self.text.endswith("\n") else "\n"
            text = self.text + gap + ours
        made = StorageConf(self.path, text)
        try:
            right = made.names(store) and _without(made.text) == self.text + (
                "" if table or self.text.endswith("\n") or not self.text else "\n"
            )
        except UsageError:
            right = False
        if not right:
            raise UsageError(
                f"{self.path} has a form in which nothing can be added safely",
                hint=f"add by hand: [storage.options] with {self.lines(store)}",
            )
        return made

    def without_ours(self) -> StorageConf:
        """Return the file without what with_store() has added."""
        return StorageConf(self.path, _without(self.text))

    def write(self) -> None:
        """Write the file; one that says no more than VENDOR_FILE is removed. Raises
        BtrfsUblkError."""
        try:
            if self.text in ("", _vendor_text()):
                self.path.unlink(missing_ok=True)
                return
            mode = self.path.stat().st_mode & 0o777 if self.path.exists() else 0o644
            self.path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            data = self.text.encode()
            write_new(self.path, data, mode=mode, replace=True, synced=True)
        except OSError as error:
            raise BtrfsUblkError(
                f"cannot write {self.path}: {error.strerror or error}"
            ) from error


def _has_only_vfs(graphroot: Path) -> bool:
    # NB: podman goes on with the driver that its database has, and says so with each
    # command.
    return (graphroot / "vfs-images").is_dir() and not (
        graphroot / "overlay-images"
    ).is_dir()


def _vendor_text() -> str:
    try:
        return VENDOR_FILE.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {VENDOR_FILE}: {why_unread(error)}") from error


def _without(text: str) -> str:
    return _OURS.sub("", text)


def _parse(text: str, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from error


def _stores(found: dict[str, Any]) -> list[str]:
    storage = found.get("storage")
    options = storage.get("options") if isinstance(storage, dict) else None
    stores = options.get("additionalimagestores") if isinstance(options, dict) else None
    return [str(each) for each in stores] if isinstance(stores, list) else []
