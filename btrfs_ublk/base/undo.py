"""Undo what was begun when an error occurs, without hiding that error."""

from __future__ import annotations

from collections.abc import Callable

from btrfs_ublk.base.ledger import release_frames
from btrfs_ublk.base.signals import deferred


def undoing(
    undo: Callable[[], object],
) -> Callable[[object, BaseException | None, object], None]:
    """Make a callback for an ExitStack that undoes a step after an error. If it fails
    too, that becomes a note on the first error. It is tried twice: a file that is open
    in the frames that the error has left, which keeps a mount busy, is closed then."""

    def on_exit(_kind: object, error: BaseException | None, _trace: object) -> None:
        with deferred():
            try:
                try:
                    undo()
                except Exception:
                    release_frames(error)
                    undo()
            except Exception as failure:
                note = f"while cleaning up after this: {failure}"
                if error is not None and note not in getattr(error, "__notes__", ()):
                    error.add_note(note)

    return on_exit
