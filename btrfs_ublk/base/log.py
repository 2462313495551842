"""Write messages to people on stderr, one per line. Data go to stdout, elsewhere."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from btrfs_ublk.base.urls import shown_text

#: The package's logger; modules use ``log.getChild(...)`` or this one.
log = logging.getLogger("btrfs_ublk")


class _Formatter(logging.Formatter):
    """Hides secrets in URLs, which may also be in the command lines that are logged."""

    def format(self, record: logging.LogRecord) -> str:
        return shown_text(super().format(record))


def setup_logging(*, verbosity: int = 0) -> None:
    """Send the package's messages to stderr; for entry points, not for libraries.

    ``verbosity``: -1 for errors only, 0 for warnings, 1 for steps, 2 for commands.
    """
    levels = {-1: logging.ERROR, 0: logging.WARNING, 1: logging.INFO}
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter("btrfs-ublk: %(levelname)s: %(message)s"))
    log.handlers[:] = [handler]
    log.setLevel(levels.get(verbosity, logging.DEBUG))
    log.propagate = False


@contextmanager
def step(what: str) -> Iterator[None]:
    """Log at INFO how long ``what`` took, and whether it failed."""
    start_s = time.monotonic()
    log.debug("%s ...", what)
    try:
        yield
    except BaseException:
        log.info("%s: failed after %.3f s", what, time.monotonic() - start_s)
        raise
    log.info("%s: %.3f s", what, time.monotonic() - start_s)
