"""The physical map of one file, with assertions on it."""

from __future__ import annotations

import os
from typing import NamedTuple, Self

from btrfs_ublk.base.helpers import MAP_PHYSICAL, helper_path
from btrfs_ublk.base.paths import StrPath
from btrfs_ublk.base.process import run
from btrfs_ublk.physmap import rules
from btrfs_ublk.physmap.columns import Columns
from btrfs_ublk.physmap.rows import REGULAR, MappingError

#: The share of a file in several runs that the largest one must have.
CONTIGUOUS_PERCENT = 80
_READ_TIMEOUT_S = 300.0


class ContiguousRun(NamedTuple):
    """Bytes that follow each other both in the file and on the device."""

    file_offset: int
    physical_offset: int
    size_bytes: int


class PhysicalMap(Columns):
    """The places of a file's bytes: a sequence of MapRow, with assertions, which raise
    MappingError with the first row that breaks a rule.
    """

    __slots__ = ()

    @classmethod
    def read(cls, path: StrPath, *, timeout_s: float = _READ_TIMEOUT_S) -> Self:
        """Read the map of a btrfs file, whose dirty data is written first; needs root.

        Raises CommandError when the file is not on btrfs, or cannot be read.
        """
        # run() returns text, so the binary numbers are passed in a memfd.
        fd = os.memfd_create("physical-map", os.MFD_CLOEXEC)
        with open(fd, "rb") as file:
            run(
                [
                    *(helper_path(MAP_PHYSICAL), "--format", "binary"),
                    *("--output-fd", str(fd), "--", path),
                ],
                timeout_s=timeout_s,
                keep_open_fds=[fd],
            )
            file.seek(0)
            return cls.parse_binary(file.read())

    def assert_plain(self) -> None:
        """All rules hold, for device 1 and 4 KiB blocks: see rules.py."""
        for rule in rules.RULES:
            rule(self)

    def file_bytes(self) -> int:
        """The number of bytes of the file in all rows."""
        return sum(self.file_size)

    def contiguous_runs(self) -> list[ContiguousRun]:
        """Return all runs in file order, of a map that passes assert_plain().

        Raises MappingError when a row is not exactly one extent.
        """
        starts = rules.run_starts(self)
        if starts is None:
            raise MappingError(
                "contiguous runs", "an extent is not plain, or not whole"
            )
        positions = [self.file_offset[row] for row in starts]
        ends = [*positions[1:], self.file_offset[-1] + self.file_size[-1]]
        return [
            ContiguousRun(begin, self.physical_offset[row], end - begin)
            for row, begin, end in zip(starts, positions, ends, strict=True)
        ]

    def largest_contiguous_run(self) -> ContiguousRun:
        """The longest run that is contiguous in the file and on one device: the first
        of equals, or one of size 0 if there is none.

        Only regular extents in one piece count; each copy is a run of its own.
        """
        best = ContiguousRun(0, 0, 0)
        if rules.run_starts(self):
            return max(self.contiguous_runs(), key=lambda run: run.size_bytes)
        # The start of the current run, and where the next row would continue it.
        start, size, end = (0, 0), 0, (-1, -1, -1)
        for kind, whole, stored, position, length, inner, devid, physical in zip(
            *(self.extent_type, self.logical_size, self.physical_size),
            *(self.file_offset, self.file_size, self.extent_offset),
            *(self.devid, self.physical_offset),
            strict=True,
        ):
            if kind != REGULAR or whole != stored:
                end = (-1, -1, -1)
                continue
            begin = physical + inner
            if (position, begin, devid) != end:
                start, size = (position, begin), 0
            size += length
            end = (position + length, begin + length, devid)
            if size > best.size_bytes:
                best = ContiguousRun(*start, size)
        return best

    def assert_virtual_data(
        self,
        *,
        size_bytes: int,
        device_offset: int | None = None,
        whole: bool = True,
    ) -> ContiguousRun:
        """Assert what a file of virtual data needs before use: assert_plain(), and that
        its bytes are at the expected place on the device.

        The file must be ``size_bytes`` long. With ``whole`` all of it must be one run,
        else at least 80 % of it. That run, which is returned, must begin at
        ``device_offset`` if that is given.
        """
        self.assert_plain()
        if self.file_bytes() != size_bytes:
            raise MappingError(
                "virtual data",
                f"the file has {self.file_bytes()} bytes, not {size_bytes}",
            )
        run_found = self.largest_contiguous_run()
        least_bytes = size_bytes if whole else size_bytes * CONTIGUOUS_PERCENT // 100
        if run_found.size_bytes < least_bytes:
            raise MappingError(
                "virtual data",
                f"at least {least_bytes} of {size_bytes} bytes must be contiguous; the "
                f"largest run has {run_found.size_bytes}, from file offset "
                f"{run_found.file_offset} and device offset "
                f"{run_found.physical_offset} on",
            )
        if device_offset not in (None, run_found.physical_offset):
            raise MappingError(
                "virtual data",
                f"the data begins at device offset {run_found.physical_offset}, not "
                f"{device_offset}",
            )
        return run_found
