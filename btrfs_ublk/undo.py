"""Undoing what was begun, on the way of an error that is the one to tell."""

from __future__ import annotations

from collections.abc import Callable

from btrfs_ublk.interrupts import deferred


def undoing(
    undo: Callable[[], object],
) -> Callable[[object, BaseException | None, object], None]:
    """To be pushed on an ExitStack: on the way of an error, which must not be hidden by
    another one. That becomes a note on it.
    """

    def on_exit(_kind: object, error: BaseException | None, _trace: object) -> None:
        with deferred():
            try:
                undo()
            except Exception as failure:
                note = f"while cleaning up after this: {failure}"
                if error is not None and note not in getattr(error, "__notes__", ()):
                    error.add_note(note)

    return on_exit
