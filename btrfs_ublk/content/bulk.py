"""Parse many mappings as lines of JSON, as `btrfs-ublk map add --bulk` reads them."""

from __future__ import annotations

import json
from typing import Any

from btrfs_ublk.content.maps import Addition
from btrfs_ublk.content.source import SourceKeys
from btrfs_ublk.errors import UsageError


def parse_bulk(text: str, *, where: str) -> tuple[list[SourceKeys], list[Addition]]:
    """Parse lines that are each a source's description or a mapping, ``[OFFSET|null,
    LENGTH|null, SOURCE, SOURCE_OFFSET]``. Raises UsageError, which names the line."""
    sources: list[SourceKeys] = []
    additions: list[Addition] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        place = f"{where}, line {number}"
        match parse_json(line, place):
            case dict() as source:
                sources.append(source)
            case [
                int() | None as offset,
                int() | None as length,
                int(source),
                int(at),
            ]:
                additions.append(
                    Addition(
                        offset=offset, length=length, source=source, source_offset=at
                    )
                )
            case _:
                raise UsageError(
                    f"{place}: neither a source nor a mapping",
                    hint="an object, or [OFFSET|null, LENGTH|null, SOURCE,"
                    " SOURCE_OFFSET]",
                )
    return sources, additions


def parse_json(text: str, where: str) -> Any:
    """Parse JSON; ``where`` names it in errors. Raises UsageError."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise UsageError(f"{where}: not valid JSON: {error}") from error
