"""Arithmetic on whole columns.

A column is treated as one large integer with a lane of 64 bits for each row, so that
one addition adds all rows: 300,000 in a millisecond, without a dependency. It is exact
as long as no lane overflows into the next: every function here tests for that, and
answers "no" where it cannot tell. Offsets and sizes of btrfs files are below 2^63.
"""

from __future__ import annotations

import sys
from array import array

_TOP = 1 << 63


def _pack(column: array[int]) -> int:
    return int.from_bytes(column.tobytes(), sys.byteorder)


def _repeat(value: int, rows: int) -> int:
    return _pack(array("Q", [value]) * rows)


def any_bits(column: array[int], bits: int) -> bool:
    """Whether any row has one of these bits."""
    return bool(_pack(column) & _repeat(bits, len(column)))


def follow_on(offsets: array[int], sizes: array[int]) -> bool:
    """Whether each row begins exactly where the one before ends; no row is empty."""
    if any_bits(offsets, _TOP) or any_bits(sizes, _TOP) or 0 in sizes:
        return False
    return _pack(offsets[1:]) == _pack(offsets[:-1]) + _pack(sizes[:-1])


def rise(offsets: array[int], sizes: array[int]) -> bool:
    """Whether no row begins before the end of the one before."""
    if any_bits(offsets, _TOP) or any_bits(sizes, _TOP):
        return False
    top = _repeat(_TOP, max(0, len(offsets) - 1))
    ends = _pack(offsets[:-1]) + _pack(sizes[:-1])
    # Where an offset is below the end, the subtraction borrows the lane's top bit.
    return not ends & top and (_pack(offsets[1:]) + top - ends) & top == top


def differences(column: array[int], other: array[int]) -> array[int] | None:
    """Return column - other + 2^63 for each row; None if a row does not fit."""
    if any_bits(column, _TOP) or any_bits(other, _TOP):
        return None
    lanes = _pack(column) + _repeat(_TOP, len(column)) - _pack(other)
    result = array("Q")
    result.frombytes(lanes.to_bytes(len(column) * result.itemsize, sys.byteorder))
    return result
