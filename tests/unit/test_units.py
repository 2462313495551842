"""Sizes as people read them."""

from __future__ import annotations

import pytest

from btrfs_ublk.errors import UsageError
from btrfs_ublk.units import EIB, GIB, KIB, MIB, format_size, parse_block_size


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (KIB, "1 KiB"),
        (MIB - 1, "1 MiB"),
        (GIB - 1, "1 GiB"),
        (GIB - MIB, "1023 MiB"),
        (7 * MIB + MIB // 5, "7.2 MiB"),
        (4 * EIB, "4 EiB"),
        (5000 * EIB, "5000 EiB"),
        (1 - GIB, "-1 GiB"),
    ],
)
def test_the_unit_fits_what_is_printed(size_bytes: int, text: str) -> None:
    assert format_size(size_bytes) == text


@pytest.mark.parametrize(
    ("text", "hint"),
    [("1", "give a unit"), ("0", "give a unit"), ("5000", "4096 and 8192")],
)
def test_a_hint_is_no_size_that_is_refused_next(text: str, hint: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_block_size(text)
    assert hint in str(refused.value.hint)
