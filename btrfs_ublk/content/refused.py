"""What the connection to a server and those who ask for mappings both know."""

from __future__ import annotations

from btrfs_ublk.errors import BtrfsUblkError


class Refused(BtrfsUblkError):
    """The server has refused a request. ``errno`` is the reason, as a name; ``of`` is
    "source" or "mapping", followed by the index of the one that is wrong."""

    def __init__(
        self,
        message: str,
        *,
        hint: str | None,
        errno: str,
        of: tuple[str, int] | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.errno = errno
        self.of = of
