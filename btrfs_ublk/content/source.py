"""Descriptions of where bytes come from."""

from typing import Any

#: A source's description: ``{"kind": "file", "path": …, "size": …, "unit": …}``, or
#: with a list of ``"mirrors"``; ``"digests"`` and ``"root"`` where they are known.
Source = dict[str, Any]
