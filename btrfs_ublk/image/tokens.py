"""Tokens of registries, which the processes of one user on one host share: one of them
asks the token server, and the others wait for what it gets. The file format is that of
csrc/fetch/mirror/token.h, as servers use the same tokens.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from btrfs_ublk.base.private_dirs import make_private
from btrfs_ublk.device.locks import lock_file
from btrfs_ublk.device.state import RUN_DIRECTORY, RUN_VARIABLE
from btrfs_ublk.errors import BtrfsUblkError

#: How long a token is good, at most.
TOKEN_MAX_S = 86400
#: The process that asks may have died.
_ASKING_S, _FAILED_S = 10.0, 1.0
_LOOK_S = 0.02
_MAX_TOKEN_BYTES = 64 << 10


class SharedToken:
    """A token for what ``texts`` say, of which some may be secrets."""

    def __init__(self, texts: Sequence[str]) -> None:
        data = b"".join(text.encode() + b"\0" for text in texts)
        self._name = hashlib.sha256(data).hexdigest()
        self._path: Path | None = None

    def find(self, *, refused: str | None) -> tuple[str, float] | None:
        """Return a token, and until when it is good (time.monotonic()); None: it is the
        caller's to ask for one, and to ``tell``. Waits while somebody else asks, and
        for a second after the token server has failed."""
        late_s = time.monotonic() + _ASKING_S
        while time.monotonic() < late_s:
            with self._locked() as fd:
                if fd is None:
                    return None
                record = _read(fd)
                now_ns = time.monotonic_ns()
                token, until_ns = _token(record)
                if token is not None and until_ns > now_ns and token != refused:
                    return token, until_ns / 1e9
                waits_ns = max(
                    _time(record, "asking_ns", most_s=_ASKING_S),
                    _time(record, "failed_ns", most_s=_FAILED_S),
                )
                if waits_ns <= now_ns:
                    _write(fd, {"asking_ns": now_ns + int(_ASKING_S * 1e9)})
                    return None
            time.sleep(_LOOK_S)
        return None

    def tell(self, token: str | None, until_s: float = 0.0) -> None:
        """Tell what was got; None: the token server has failed."""
        record: dict[str, Any] = {"until_ns": int(until_s * 1e9), "asking_ns": 0}
        if token is None:
            record["failed_ns"] = time.monotonic_ns() + int(_FAILED_S * 1e9)
        elif len(token) <= _MAX_TOKEN_BYTES:
            record["token"] = token
        with self._locked() as fd:
            if fd is None:
                return
            # A failure takes no token away that another one has got meanwhile: who asks
            # leaves none that is bad.
            if "token" not in record:
                found, found_until_ns = _token(_read(fd))
                if found is not None and found_until_ns > time.monotonic_ns():
                    return
            _write(fd, record)

    @contextmanager
    def _locked(self) -> Iterator[int | None]:
        """Yield the file's descriptor; None where nothing can be shared."""
        lock = None
        with suppress(OSError, BtrfsUblkError):
            # NB: `device gc` may remove it meanwhile, and lock_file() sees that.
            lock = lock_file(self._directory() / self._name, timeout_s=_ASKING_S)
        if lock is None:
            yield None
        else:
            with lock:
                yield lock.fileno()

    def _directory(self) -> Path:
        if self._path is None:
            base = Path(os.environ.get(RUN_VARIABLE) or RUN_DIRECTORY)
            for directory in (base, base / "tokens"):
                make_private(directory, what="directory of tokens", hint="run as root")
            self._path = base / "tokens"
        return self._path


def _read(fd: int) -> dict[str, Any]:
    """What makes no sense, as of a process that was killed while it wrote, is as good
    as nothing."""
    try:
        record = json.loads(os.pread(fd, 2 * _MAX_TOKEN_BYTES, 0))
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _token(record: dict[str, Any]) -> tuple[str | None, int]:
    """A token, and until when it is good."""
    token = record.get("token")
    until_ns = _time(record, "until_ns", most_s=TOKEN_MAX_S)
    return (token if isinstance(token, str) else None), until_ns


def _time(record: dict[str, Any], key: str, *, most_s: float) -> int:
    """A time that is further ahead is of before a boot, after which the clock begins
    anew."""
    value = record.get(key)
    latest_ns = time.monotonic_ns() + int(most_s * 1e9)
    return value if isinstance(value, int) and value <= latest_ns else 0


def _write(fd: int, record: dict[str, Any]) -> None:
    os.ftruncate(fd, 0)
    os.pwrite(fd, json.dumps(record).encode(), 0)
