"""What the kernel offers to the front ends, and what the server uses of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from btrfs_ublk.errors import BtrfsUblkError
from btrfs_ublk.helpers import SERVER, helper_path
from btrfs_ublk.process import run

#: The server bounds its own command to the driver to 30 s.
_TIMEOUT_S = 40.0


@dataclass(frozen=True)
class Feature:
    """``offered`` is None where this process may not know. ``used``: "always" (where it
    is offered), "asked" (by an option) or "never"; ``reason`` says why.
    """

    name: str
    since: str
    offered: bool | None
    used: str
    reason: str


@dataclass(frozen=True)
class FrontEndFeatures:
    """``reason`` and ``cure`` are about a front end that this kernel has not."""

    front_end: str
    available: bool
    features: list[Feature]
    protocol: str | None = None
    reason: str | None = None
    cure: str | None = None


def kernel_features() -> tuple[list[FrontEndFeatures], dict[str, Any]]:
    """For each front end; and the document as the server printed it. Makes nothing.
    Raises CommandError, CapabilityError.
    """
    text = run([helper_path(SERVER), "--features"], timeout_s=_TIMEOUT_S).stdout
    document: dict[str, Any] = json.loads(text)
    return parse_features(document), document


def parse_features(document: dict[str, Any]) -> list[FrontEndFeatures]:
    """Raises BtrfsUblkError when the document is not what ``--features`` prints."""
    try:
        return [
            FrontEndFeatures(
                front_end=name,
                available=bool(about["available"]),
                features=[Feature(**feature) for feature in about["features"]],
                protocol=about.get("protocol"),
                reason=about.get("reason"),
                cure=about.get("cure"),
            )
            for name, about in document.items()
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise BtrfsUblkError(f"{SERVER} --features made no sense: {error!r}") from error
