"""The table of a volume's settings in docs/volumes.md, made of their declarations."""

from __future__ import annotations

import json
from collections.abc import Iterator

from btrfs_ublk.volume import SETTINGS, Setting

#: The command that makes it, run in the project's directory.
COMMAND = "python -m btrfs_ublk.ops.manual settings docs/volumes.md"
_HEADING = "| key | option | | default | while the volume is up |"
_CHANGES = {
    "never": "never changes",
    "grows": "[only grows](#more-room)",
    "at once": "changes at once",
    "down": "is refused",
}


def with_settings(document: str) -> str:
    """Return the document with the current table in place of the one that it has."""
    before, heading, after = document.partition(f"{_HEADING}\n")
    if not heading:
        return document
    lines = after.splitlines(keepends=True)
    while lines and lines[0].startswith("|"):
        del lines[0]
    return before + "\n".join([heading.strip(), *_rows(), ""]) + "".join(lines)


def _rows() -> Iterator[str]:
    yield "|---|---|---|---|---|"
    for setting in SETTINGS.values():
        if setting.kind.type is not None:
            cells = (
                f"`{setting.key}`",
                f"`{setting.option}`",
                f"{setting.help} {setting.more}".strip(),
                _default(setting),
                _CHANGES[setting.change],
            )
            yield f"| {' | '.join(cells)} |"


def _default(setting: Setting) -> str:
    if setting.default is None:
        return setting.unset
    value = json.dumps(setting.kind.write(setting.default))
    return f"`{value.removesuffix('.0')}`"
