"""The physical map of one file, with assertions on it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self, overload

from btrfs_ublk.base.helpers import MAP_PHYSICAL, helper_path
from btrfs_ublk.base.paths import StrPath
from btrfs_ublk.base.process import run
from btrfs_ublk.physmap import rules
from btrfs_ublk.physmap.rows import REGULAR, MappingError, MapRow, parse_rows

#: The share of a file in several runs that the largest one must have.
CONTIGUOUS_PERCENT = 80
_READ_TIMEOUT_S = 300.0


class ContiguousRun(NamedTuple):
    """Bytes that follow each other both in the file and on the device."""

    file_offset: int
    physical_offset: int
    size_bytes: int


class PhysicalMap(Sequence[MapRow]):
    """The places of a file's bytes: a sequence of MapRow, with assertions, which raise
    MappingError with the first row that breaks a rule.
    """

    def __init__(self, rows: Iterable[MapRow]) -> None:
        self._rows = tuple(rows)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> MapRow: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[MapRow]: ...

    def __getitem__(self, index: int | slice) -> MapRow | Sequence[MapRow]:
        return self._rows[index]

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
            return cls(parse_rows(file.read()))

    def assert_plain(self) -> None:
        """All rules hold, for device 1 and 4 KiB blocks: see rules.py."""
        for rule in rules.RULES:
            rule(self._rows)

    def file_bytes(self) -> int:
        """The number of bytes of the file in all rows."""
        return sum(row.file_size for row in self._rows)

    def contiguous_runs(self) -> list[ContiguousRun]:
        """Return all runs in file order, of a map that passes assert_plain().

        Raises MappingError when a row is not exactly one extent.
        """
        runs: list[ContiguousRun] = []
        position = 0
        for row in self._rows:
            place = row.physical_offset
            if (
                *(row.extent_type, row.extent_offset, row.devid),
                *(row.logical_size, row.physical_size),
            ) != (REGULAR, 0, self._rows[0].devid, row.file_size, row.file_size) or (
                place is None or (runs and row.file_offset != position)
            ):
                raise MappingError(
                    "contiguous runs", "an extent is not plain, or not whole"
                )
            position = row.file_offset + row.file_size
            begin, where, _ = runs[-1] if runs else (0, -1, 0)
            if runs and place - row.file_offset == where - begin:
                runs[-1] = ContiguousRun(begin, where, position - begin)
            else:
                runs.append(ContiguousRun(row.file_offset, place, row.file_size))
        return runs

    def largest_contiguous_run(self) -> ContiguousRun:
        """The longest run that is contiguous in the file and on one device: the first
        of equals, or one of size 0 if there is none.

        Only regular extents in one piece count; each copy is a run of its own.
        """
        best = ContiguousRun(0, 0, 0)
        # The start of the current run, and where the next row would continue it.
        start, size, end = (0, 0), 0, (-1, -1, -1)
        for row in self._rows:
            place, devid = row.physical_offset, row.devid
            whole = row.logical_size == row.physical_size
            if (
                row.extent_type != REGULAR
                or place is None
                or devid is None
                or not whole
            ):
                end = (-1, -1, -1)
                continue
            begin = place + row.extent_offset
            if (row.file_offset, begin, devid) != end:
                start, size = (row.file_offset, begin), 0
            size += row.file_size
            end = (row.file_offset + row.file_size, begin + row.file_size, devid)
            if size > best.size_bytes:
                best = ContiguousRun(*start, size)
        return best

    def assert_virtual_data(
        self, *, size_bytes: int, device_offset: int | None = None, whole: bool = True
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
