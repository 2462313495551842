"""Talk to people: stderr, one line per message. Data goes to stdout elsewhere."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

#: The package's logger; modules use ``log.getChild(...)`` or this one.
log = logging.getLogger("btrfs_ublk")


def setup_logging(*, verbosity: int = 0) -> None:
    """Send the package's messages to stderr; for entry points, not for libraries.

    ``verbosity``: -1 errors only, 0 warnings, 1 what is being done, 2 every command.
    """
    levels = {-1: logging.ERROR, 0: logging.WARNING, 1: logging.INFO}
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("btrfs-ublk: %(levelname)s: %(message)s"))
    log.handlers[:] = [handler]
    log.setLevel(levels.get(verbosity, logging.DEBUG))
    log.propagate = False


@contextmanager
def step(what: str) -> Iterator[None]:
    """Log ``what`` at INFO, with the time it took, or that it failed."""
    start_s = time.monotonic()
    log.debug("%s ...", what)
    try:
        yield
    except BaseException:
        log.info("%s: failed after %.3f s", what, time.monotonic() - start_s)
        raise
    log.info("%s: %.3f s", what, time.monotonic() - start_s)
