"""Text for terminals."""

from __future__ import annotations

import re
from collections.abc import Sequence

#: Control characters but tab and newline, and what changes the direction of writing.
_CONTROLS = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """Return a text in which control characters are shown as escapes. It may be of
    others, as a registry's answer or the name of a file, and terminals obey them.
    """
    return _CONTROLS.sub(lambda found: repr(found[0])[1:-1], text)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Make a table for people. The first row is the headings, and each column is as
    wide as its longest text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = (zip(row, widths, strict=True) for row in rows)
    lines = ("  ".join(x.ljust(width) for x, width in row).rstrip() for row in padded)
    return visible("\n".join(lines))
