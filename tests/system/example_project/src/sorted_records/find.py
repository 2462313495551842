"""Where a number is, by bisection: a few reads, however large the file is."""

from __future__ import annotations

import sys
from pathlib import Path

RECORD_BYTES = 8


def find(path: Path, number: int) -> int | None:
    """The index of the first record that is ``number``; None when there is none."""
    low, high = 0, path.stat().st_size // RECORD_BYTES
    with path.open("rb", buffering=0) as file:

        def record(index: int) -> int:
            file.seek(index * RECORD_BYTES)
            return int.from_bytes(file.read(RECORD_BYTES), "little")

        end = high
        while low < high:
            middle = (low + high) // 2
            if record(middle) < number:
                low = middle + 1
            else:
                high = middle
        return low if low < end and record(low) == number else None


def main() -> None:
    path, number = sys.argv[1:]
    index = find(Path(path), int(number))
    print("none" if index is None else index)
    sys.exit(index is None)
