"""Fixtures: whole volumes, mounted and writable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from btrfs_ublk.testing.factory import (
    Factory,
    factory_for_each_scope,
    one_for_each_scope,
)

if TYPE_CHECKING:
    from btrfs_ublk.server import FrontEndName, Segment
    from btrfs_ublk.volume.temporary import Volume

_SIZE_BYTES = 1 << 40
_WRITABLE_BYTES = 1 << 30


class VolumeFactory(Factory["Volume"]):
    """``make(files={NAME: URL})``: a Volume with files that are fetched when they are
    read; ``make(contents)``: one whose virtual data are these segments; its root is
    ``target``. Needs root.
    """

    def default(self) -> Volume:
        """A Volume, whose virtual data are ``btrfs_ublk_contents``, mounted, writable;
        its root is ``target``. Needs root.
        """
        return self(self._request.getfixturevalue("btrfs_ublk_contents"))

    def __call__(
        self,
        contents: Sequence[Segment] | None = None,
        *,
        files: Mapping[str, str] | None = None,
        virtual_data_size: int | None = None,
        writable_bytes: int = _WRITABLE_BYTES,
        front_end: FrontEndName | None = None,
    ) -> Volume:
        """``files`` are paths in the volume and the URLs of their content; a server
        must answer ranges. ``front_end`` overrides marker and settings. See
        temporary_volume() for errors, and for the rest.
        """
        from btrfs_ublk.base.capabilities import BTRFS, LOOP, ROOT
        from btrfs_ublk.content.refused import Refused
        from btrfs_ublk.errors import UsageError
        from btrfs_ublk.server import LazySegment
        from btrfs_ublk.volume.temporary import volume

        self.need(ROOT, BTRFS, LOOP)
        directory = self.directory()
        target = directory / "mnt"
        target.mkdir()
        if contents is None:
            contents = [
                LazySegment(
                    offset=0,
                    length=virtual_data_size or _SIZE_BYTES,
                    map=str(directory / "map"),
                    cache=str(directory / "cache"),
                    deadline_s=self.settings.timeout_s,
                )
            ]
        made = self.hold(
            volume(
                target,
                contents,
                virtual_data_size=virtual_data_size,
                writable_bytes=writable_bytes,
                parent=directory,
                front_end=front_end or self.front_end,
                ready_timeout_s=self.settings.timeout_s,
            )
        )
        if files:
            __tracebackhide__ = True
            try:
                made.add_files(files)
            except (UsageError, Refused) as error:
                # The test's input is wrong: show the test's line, not ours.
                raise error.with_traceback(None) from None
        return made


btrfs_ublk_volume, btrfs_ublk_volume_module, btrfs_ublk_volume_session = (
    one_for_each_scope(VolumeFactory)
)
(
    btrfs_ublk_volume_factory,
    btrfs_ublk_volume_factory_module,
    btrfs_ublk_volume_factory_session,
) = factory_for_each_scope(VolumeFactory)
