"""The report file: a tar archive of redacted texts."""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.ops.bugreport.collect import Content, Item, items
from btrfs_ublk.ops.bugreport.redact import Redactor, known_secrets

_MODE = 0o600


@dataclass(frozen=True)
class Entry:
    """One file of the report. ``error`` says why there is no content."""

    name: str
    size_bytes: int
    error: str | None = None


def write_report(
    path: Path,
    *,
    found: Iterable[Item] | None = None,
    redactor: Redactor | None = None,
) -> list[Entry]:
    """Write all that can be collected to the new file ``path`` (mode 0600). Returns its
    entries. For what could not be collected, the entry has the reason.

    Raises UsageError when the file exists, BtrfsUblkError when it cannot be written;
    there is no file then.
    """
    redactor = redactor or Redactor(known_secrets())
    top = (
        re.sub(r"(\.tgz|(\.tar)?\.gz|\.tar)$", "", path.name) or "btrfs-ublk-bugreport"
    )
    entries = []
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, _MODE)
    except FileExistsError:
        raise UsageError(
            f"{path} exists", hint="choose another name: nothing is overwritten"
        ) from None
    except OSError as error:
        raise BtrfsUblkError(f"cannot make {path}: {error.strerror}") from error
    try:
        with open(fd, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as tar:
            for name, make in items() if found is None else found:
                text, why = _text_of(make, redactor)
                data = text.encode()
                about = tarfile.TarInfo(f"{top}/{redactor.text(name)}")
                about.size, about.mode, about.mtime = len(data), _MODE, int(time.time())
                tar.addfile(about, io.BytesIO(data))
                entries.append(Entry(redactor.text(name), len(data), why))
    except BaseException as failure:
        with suppress(FileNotFoundError):
            path.unlink()
        if isinstance(failure, OSError):
            reason = failure.strerror
            raise BtrfsUblkError(f"cannot write {path}: {reason}") from failure
        raise
    return entries


def _text_of(make: Callable[[], Content], redactor: Redactor) -> tuple[str, str | None]:
    """Return the redacted text, and the error, if there is one instead."""
    try:
        return _redacted(make(), redactor), None
    except Exception as error:  # a part that fails must not affect the others
        is_told = isinstance(error, BtrfsUblkError)
        why = redactor.text(
            str(error) if is_told else f"{type(error).__name__}: {error}"
        )
        return f"could not be had: {why}\n", why.splitlines()[0]


def _redacted(content: Content, redactor: Redactor) -> str:
    if isinstance(content, str):
        with suppress(ValueError):
            content = json.loads(content)  # JSON is redacted by its names, too
    if isinstance(content, str):
        return redactor.text(content).rstrip("\n") + "\n"
    return json.dumps(redactor.value(content), indent=2, default=str) + "\n"
