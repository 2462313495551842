"""Layers with programs of this machine, which run in them."""

import io
import os
import re
import subprocess
import tarfile
from pathlib import Path

SHELL = Path("/bin/sh")
_TIMEOUT_S = 60.0


class LayerTar:
    """A tar of a layer, with files of this machine under their own names, and the
    symbolic links that lead to them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tar = tarfile.open(path, "w:gz", compresslevel=1)
        self._there: set[str] = set()

    def take(self, *paths: Path) -> None:
        for path in paths:
            self._take(Path("/"), list(path.parts[1:]))

    def _take(self, parent: Path, rest: list[str]) -> None:
        if not rest:
            return
        path = parent / rest[0]
        if path.is_symlink():
            target = Path(os.path.normpath(parent / os.readlink(path)))
            self.link(str(path), os.readlink(path))
            self._take(Path("/"), [*target.parts[1:], *rest[1:]])
        elif path.is_dir():
            self._take(path, rest[1:])
        else:
            self.file(str(path), path.read_bytes(), path.stat().st_mode & 0o7777)

    def file(self, name: str, content: bytes = b"", mode: int = 0o755) -> None:
        member = tarfile.TarInfo(name.lstrip("/"))
        member.size, member.mode = len(content), mode
        self._add(member, content)

    def link(self, name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> None:
        member = tarfile.TarInfo(name.lstrip("/"))
        member.type, member.linkname = kind, target
        self._add(member, b"")

    def _add(self, member: tarfile.TarInfo, content: bytes) -> None:
        if member.name not in self._there:
            self._there.add(member.name)
            self._tar.addfile(member, io.BytesIO(content))

    def close(self) -> Path:
        self._tar.close()
        return self.path


def linked(program: Path) -> list[Path]:
    """Return the files that the dynamic linker says that it loads for a program."""
    said = subprocess.run(
        ["ldd", program], capture_output=True, text=True, check=True, timeout=_TIMEOUT_S
    )
    return [Path(x) for x in re.findall(r"(?:=> )?(/\S+) \(0x", said.stdout)]


def add_shell(layer: LayerTar) -> None:
    """Put ``sh`` into a layer, with all that it needs."""
    layer.take(SHELL, *linked(SHELL), Path("/etc/ld.so.cache"))
