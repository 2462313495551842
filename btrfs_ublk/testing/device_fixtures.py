"""Fixtures: block devices of given descriptions, each with its own server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from btrfs_ublk.testing.factory import (
    Factory,
    factory_for_each_scope,
    one_for_each_scope,
)

if TYPE_CHECKING:
    from btrfs_ublk.server import BlockServer, Description, FrontEndName, Segment


class DeviceFactory(Factory["BlockServer"]):
    """``make(contents)``: a running BlockServer whose ``device`` is the block device;
    ``contents`` are segments, or a Description. Needs root.
    """

    def default(self) -> BlockServer:
        """A running BlockServer; ``btrfs_ublk_contents`` is what its ``device`` holds.
        Needs root.
        """
        return self(self._request.getfixturevalue("btrfs_ublk_contents"))

    def __call__(
        self,
        contents: Description | Sequence[Segment],
        *,
        size_bytes: int | None = None,
        front_end: FrontEndName | None = None,
        queues: int | None = None,
        depth: int | None = None,
    ) -> BlockServer:
        """``size_bytes`` is the device's (default: to the last segment's end); ranges
        without a segment give EIO. ``front_end`` overrides marker and settings. See
        BlockServer for errors, and for the rest.
        """
        from btrfs_ublk.server import BlockServer, Description

        if not isinstance(contents, Description):
            size_bytes = size_bytes or max(segment.end for segment in contents)
            contents = Description.filled(size_bytes, contents)
        return self.hold(
            BlockServer(
                contents,
                front_end=front_end or self.front_end,
                queues=queues,
                depth=depth,
                ready_timeout_s=self.settings.timeout_s,
            )
        )


btrfs_ublk_device, btrfs_ublk_device_module, btrfs_ublk_device_session = (
    one_for_each_scope(DeviceFactory)
)
(
    btrfs_ublk_device_factory,
    btrfs_ublk_device_factory_module,
    btrfs_ublk_device_factory_session,
) = factory_for_each_scope(DeviceFactory)
